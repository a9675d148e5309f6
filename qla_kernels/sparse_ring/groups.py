"""The process groups of a ring, and the transfers over them.

A call that went wrong on one rank must not leave the others waiting: facts are compared on every
rank before the first transfer, each group has a timeout, and whatever a lost rank makes of a
transfer becomes one kind of error.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qla_kernels.errors import need
from qla_kernels.sparse_ring.agreement import GROUPS, Agreement, RingError, explained

__all__ = ["ALONE", "Pending", "Ring", "RingError", "RingGroups"]

_created = itertools.count()  # rings of this process: all ranks make them together


class Pending:
    """Transfers under way, and what they fill."""

    def __init__(self, works: Sequence[dist.Work], received: Sequence[Tensor]) -> None:
        self._works, self._received = list(works), received

    def wait(self) -> Sequence[Tensor]:
        """On a GPU the current stream waits, not the host."""
        while self._works:  # each is waited for once: gloo would wait for another transfer
            with explained("a transfer between ranks failed"):
                self._works.pop(0).wait()
        return self._received


@dataclass(frozen=True)
class Ring:
    """Ranks that pass tensors around; `group` is None for a single rank, which passes nothing."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def in_order(self, x: Tensor) -> bool:
        """Whether a transfer sees what the one posted before it received, without a wait.

        NCCL's of a group do, on a stream that they share; gloo's do not.
        """
        return x.is_cuda

    def shift(self, send: Sequence[Tensor], receive: Sequence[Tensor], tag: int) -> Pending:
        """Send tensors to the next rank, and receive as many from the one before it."""
        return self.swap(send, receive, self.rank + 1, self.rank - 1, tag)

    def swap(
        self,
        send: Sequence[Tensor],
        receive: Sequence[Tensor],
        to: int,
        source: int,
        tag: int,
    ) -> Pending:
        """Send each tensor to rank `to`, and fill receive[n] with the n-th that `source` sends.

        Transfers under way at the same time need tags that differ by at least len(send).
        """
        to, source = to % self.size, source % self.size
        ops = []
        for n, (x, room) in enumerate(zip(send, receive, strict=True)):
            ops.append(dist.P2POp(dist.isend, x, None, self.group, tag + n, to))
            ops.append(dist.P2POp(dist.irecv, room, None, self.group, tag + n, source))
        with explained("a transfer between ranks could not be posted"):
            return Pending(dist.batch_isend_irecv(ops), receive)

    def gather(self, *tensors: Tensor) -> Pending:
        """Of each tensor that of every rank, [size, ...], on every rank."""
        if self.group is None:
            return Pending([], [x[None] for x in tensors])
        rooms = [x.new_empty(self.size, *x.shape) for x in tensors]
        with explained("a gather over all ranks could not be posted"):  # one transfer
            work = self.group.allgather_into_tensor_coalesced(
                [x.view(-1) for x in rooms], [x.view(-1) for x in tensors]
            )
        return Pending([work], rooms)

    def sum(self, x: Tensor) -> Pending:
        """Of x [size, ...] of all ranks the sum of x[rank], each rank's to that rank."""
        own = torch.empty_like(x[0])
        assert self.group is not None, "more than one rank"
        with explained("a sum over all ranks could not be posted"):
            work = self.group.reduce_scatter_tensor_coalesced([own.view(-1)], [x.view(-1)])
        return Pending([work], [own])

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """x of rank `source`, in place."""
        if self.group is not None:
            with explained("a broadcast to all ranks failed"):
                dist.broadcast(x, group=self.group, group_src=source)
        return x

    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows of x, so many for each rank in turn; the rows that the others have for this one."""
        if self.group is None:
            return x
        rows = x.new_empty(sum(received), *x.shape[1:])
        with explained("an exchange between all ranks failed"):
            dist.all_to_all_single(rows, x, received, sent, group=self.group)
        return rows


ALONE = Ring(None, 0, 1)


@dataclass(frozen=True)
class RingGroups:
    """The ranks of a ring, as one ring and as a double ring; made once, by all ranks together.

    Rank r is number r % inner.size of node r // inner.size. Inner and outer rings have groups of
    their own, because transfers of one group wait for each other, and a hop inside a node must not
    wait for one between nodes. Hosts compare their calls over groups of their own, in `agreement`.
    """

    whole: Ring
    inner: Ring
    outer: Ring
    agreement: Agreement | None = field(repr=False, compare=False)

    @property
    def world(self) -> int:
        return self.whole.size

    @property
    def rank(self) -> int:
        return self.whole.rank

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup | None = None,
        inner_size: int | None = None,
        timeout: timedelta = timedelta(seconds=120),
        side_timeout: timedelta = timedelta(seconds=30),
    ) -> "RingGroups":
        """Collective over all ranks of the job, each of which names the ring that it is in.

        Args:
            group: whose ranks make this rank's ring, in their order; None for all ranks.
            inner_size: ranks a node; they are neighbours in `group`. None: all are on one node.
            timeout: how long a transfer may take before it is an error on the ranks it concerns,
                and how long ranks wait for each other in this function.
            side_timeout: how long ranks wait for each other to compare what they were asked for.

        Raises:
            ValueError: the rings that ranks name do not fit together; on every rank.
            RingError: a rank did not come; on every rank that did.
        """
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        inner = len(ranks) if inner_size is None else inner_size
        return cls._of_ranks(ranks, inner, timeout, side_timeout)

    @classmethod
    def from_mesh(
        cls,
        mesh: Any,
        timeout: timedelta = timedelta(seconds=120),
        side_timeout: timedelta = timedelta(seconds=30),
    ) -> "RingGroups":
        """`create` for a DeviceMesh of dimension (ring) or dimensions (nodes, ranks of a node)."""
        if mesh.ndim > 2:
            fix = "pass a slice of it, such as mesh['node', 'ring']"
            got = f"a mesh of {mesh.ndim} dimensions"
            raise ValueError(need(GROUPS, got, "1 or 2", fix))
        ranks, inner = mesh.mesh.flatten().tolist(), mesh.mesh.shape[-1]
        return cls._of_ranks(ranks, inner, timeout, side_timeout)

    @classmethod
    def _of_ranks(
        cls, ranks: list[int], inner: int, timeout: timedelta, side_timeout: timedelta
    ) -> "RingGroups":
        everyone = _named_by_all(ranks, inner, timeout)
        _check_rings(everyone)
        mine = cls(ALONE, ALONE, ALONE, None)
        # torch wants every group made on every rank, in the same order
        for members, size in dict.fromkeys(everyone):
            if len(members) == 1:
                continue
            num = len(members)
            whole = _ring(members, timeout)
            inners = [_ring(members[n : n + size], timeout) for n in range(0, num, size)]
            outers = [_ring(members[n::size], timeout) for n in range(size)]
            side, behind = (
                dist.new_group(list(members), limit, dist.Backend.GLOO)
                for limit in (side_timeout, timeout)
            )
            if dist.get_rank() in members:
                rank = members.index(dist.get_rank())
                agreement = Agreement(side, behind)
                mine = cls(whole, inners[rank // size], outers[rank % size], agreement)
        return mine

    def agree(
        self,
        op: str,
        facts: Mapping[str, object],
        problem: Exception | None = None,
        again: bool = False,
    ) -> None:
        """Raise on every rank if any has a problem, or if they were asked for different things.

        Facts that were agreed on before are not compared at once unless `again`; see agreement.py.
        """
        if self.agreement is not None:
            said = None if problem is None else f"{type(problem).__name__}: {problem}"
            self.agreement.on({"the call": op, **facts, "what is wrong": said}, again)
        if problem is not None:
            raise problem


def _named_by_all(
    ranks: list[int], inner: int, timeout: timedelta
) -> list[tuple[tuple[int, ...], int]]:
    """What each rank of the job says of its ring, through the job's store: it takes a limit."""
    store, number = dist.distributed_c10d._get_default_store(), next(_created)
    keys = [f"qla_ring/{number}/{rank}" for rank in range(dist.get_world_size())]
    said = inner if type(inner) is int else repr(inner)
    store.set(keys[dist.get_rank()], json.dumps([ranks, said]))
    try:
        with explained("ranks did not all make their ring"):
            store.wait(keys, timeout)
    except RingError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        got, fix = (
            f"no ring of ranks {missing} within {timeout}",
            "call it on every rank of the job",
        )
        raise RingError(need(GROUPS, got, "RingGroups.create on every rank", fix)) from error
    everyone = [json.loads(store.get(key)) for key in keys]
    return [(tuple(members), size) for members, size in everyone]


def _check_rings(everyone: Sequence[tuple[tuple[int, ...], int]]) -> None:
    """What each rank of the job said of its ring: all see all of it, so that all raise."""
    for rank, (ranks, inner) in enumerate(everyone):
        if list(ranks) != sorted(ranks):
            fix = "make the ring of a group whose ranks ascend"
            raise ValueError(need(GROUPS, f"ranks {list(ranks)}", "them in ascending order", fix))
        if type(inner) is not int or inner < 1 or len(ranks) % inner:
            fix = "pass the number of ranks on each node"
            got = f"inner_size is {inner} for {len(ranks)} ranks"
            raise ValueError(need(GROUPS, got, "a divisor of the number of ranks", fix))
        for member in ranks:
            if everyone[member] != (ranks, inner):
                rings = ((rank, ranks, inner), (member, *everyone[member]))
                said = (f"{list(r)} in nodes of {n} on rank {at}" for at, r, n in rings)
                got = f"a ring of ranks {' and '.join(said)}"
                fix = f"look at what rank {member} was given"
                raise ValueError(need(GROUPS, got, "one ring on all of its ranks", fix))


def _ring(members: Sequence[int], timeout: timedelta) -> Ring:
    """A group of these ranks, made on every rank of the job; of use on these alone."""
    if len(members) == 1:
        return ALONE
    options = None
    if "nccl" in dist.get_backend_config():  # its transfers should not queue behind attention
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout  # else torch warns that it takes the group's
    group = dist.new_group(list(members), timeout, pg_options=options, group_desc="qla_ring")
    rank = members.index(dist.get_rank()) if dist.get_rank() in members else -1
    return Ring(group, rank, len(members))
