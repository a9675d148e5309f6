"""The process groups of a ring, and transfers over them.

A call that fails on one rank must not leave the other ranks waiting. Therefore all ranks compare
their calls before the first transfer, each process group has a timeout, and every error that a lost
rank causes in a transfer becomes a RingError.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qla_kernels.runtime.errors import need
from qla_kernels.sparse_ring.agreement import GROUPS, Agreement, RingError, as_ring_error

__all__ = ["ALONE", "Pending", "RankRing", "RingError", "RingGroups", "Swap"]

_created = itertools.count()  # number of the next create(): the same on all ranks of the job


class Pending:
    """Handle of transfers between ranks that are still running, and of the tensors that they fill.

    Args:
        works: the handles of torch.distributed.
        received: the tensors that receive data, which `wait` returns.
    """

    def __init__(self, works: Sequence[dist.Work], received: Sequence[Tensor]) -> None:
        self._works, self._received = list(works), received

    def wait(self) -> Sequence[Tensor]:
        """Waits for the transfers and returns the tensors that received data.

        On a GPU only the current stream waits; the host does not. Raises RingError if a transfer
        failed.
        """
        while self._works:  # wait once for each: a second wait in gloo waits for another transfer
            with as_ring_error("a transfer between ranks failed"):
                self._works.pop(0).wait()
        return self._received


class Swap(NamedTuple):
    """Record: one exchange for `RankRing.swap`: what this rank sends, and what it receives.

    Attributes:
        send: the tensors to send.
        receive: tensors of the same shapes, which are overwritten by the data that arrives.
        to: number of the rank to which the tensors are sent.
        source: number of the rank from which data arrives.
    """

    send: Sequence[Tensor]
    receive: Sequence[Tensor]
    to: int
    source: int


@dataclass(frozen=True)
class RankRing:
    """A process group whose ranks form a ring, with the transfers that attention needs.

    Attributes:
        group: the process group; None if there is a single rank.
        rank: the number of this rank within the group.
        size: the number of ranks.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def shift(self, send: Sequence[Tensor], receive: Sequence[Tensor], tag: int) -> Pending:
        """Starts to send the tensors `send` to the next rank, and to receive from the previous one.

        Returns a `Pending`, whose `wait` returns the tensors of `receive` when they are filled.

        Args:
            send: the tensors to send.
            receive: a tensor of the same shape for each tensor of `send`; overwritten.
            tag: number by which torch.distributed matches sent and received tensors: `tag` for the
                first tensor, tag + 1 for the second. Transfers that run at the same time need
                different numbers.
        """
        return self.swap([Swap(send, receive, self.rank + 1, self.rank - 1)], tag)

    def swap(self, swaps: Sequence[Swap], tag: int) -> Pending:
        """Starts several point-to-point exchanges at once; returns a `Pending` to wait for.

        Args:
            swaps: exchanges, each with tensors to send to one rank and to receive from one rank.
                Numbers of ranks are taken modulo the size of the ring, and no rank may occur in two
                exchanges.
            tag: number by which torch.distributed matches sent and received tensors: `tag` for the
                first tensor of an exchange, tag + 1 for the second. Calls that run at the same time
                need tags that differ by at least the number of tensors of an exchange.
        """
        received = [x for swap in swaps for x in swap.receive]
        assert self.group is not None, "more than one rank"
        works: list[dist.Work] = []
        with as_ring_error("a transfer between ranks could not be posted"):
            if received[0].is_cuda:  # one kernel; torch's batch_isend_irecv takes the host longer
                self.group._start_coalescing(received[0].device)
            for swap in swaps:
                to, source = swap.to % self.size, swap.source % self.size
                for n, (x, room) in enumerate(zip(swap.send, swap.receive, strict=True)):
                    works.append(self.group.send([x], to, tag + n))
                    works.append(self.group.recv([room], source, tag + n))
            if received[0].is_cuda:
                works = [self.group._end_coalescing(received[0].device)]
        return Pending(works, received)

    def gather(self, *tensors: Tensor) -> Pending:
        """Starts an all-gather of each tensor; returns a `Pending` to wait for.

        `Pending.wait` returns a tensor [size, ...] for each argument, where size is the number of
        ranks; row r is the tensor of rank r.
        """
        if self.group is None:
            return Pending([], [x[None] for x in tensors])
        gathered = [x.new_empty(self.size, *x.shape) for x in tensors]
        with as_ring_error("a gather over all ranks could not be posted"):  # one transfer
            work = self.group.allgather_into_tensor_coalesced(
                [x.view(-1) for x in gathered], [x.view(-1) for x in tensors]
            )
        return Pending([work], gathered)

    def sum(self, x: Tensor) -> Pending:
        """Starts a reduce-scatter of x [size, ...]; returns a `Pending` to wait for.

        size is the number of ranks. `Pending.wait` returns a list of one tensor: row r of the sum
        over all ranks, on rank r.
        """
        own = torch.empty_like(x[0])
        assert self.group is not None, "more than one rank"
        with as_ring_error("a sum over all ranks could not be posted"):
            work = self.group.reduce_scatter_tensor_coalesced([own.view(-1)], [x.view(-1)])
        return Pending([work], [own])

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrites x on every rank with the x of rank `source`, waits for that, and returns x."""
        if self.group is not None:
            with as_ring_error("a broadcast to all ranks failed"):
                dist.broadcast(x, group=self.group, group_src=source)
        return x

    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """All-to-all: sends different rows of x to each rank, and returns the rows received.

        The first sent[0] rows of x go to rank 0, the next sent[1] rows to rank 1, and so on. The
        result has received[0] rows from rank 0, then received[1] rows from rank 1, and so on.
        """
        if self.group is None:
            return x
        rows = x.new_empty(sum(received), *x.shape[1:])
        with as_ring_error("an exchange between all ranks failed"):
            dist.all_to_all_single(rows, x, received, sent, group=self.group)
        return rows


ALONE = RankRing(None, 0, 1)


@dataclass(frozen=True)
class RingGroups:
    """The process groups of the ranks that share one sequence in `sparse_ring_attention`.

    `RingGroups.create` and `RingGroups.from_mesh` make one; all ranks call them together. Node n
    has the ranks n * inner.size to (n + 1) * inner.size - 1 of the ring.

    Attributes:
        whole: all ranks of the ring.
        inner: the ranks of this rank's node. `inner` and `outer` have process groups of their own,
            so that a transfer within a node does not wait for a transfer between nodes.
        outer: one rank of each node: those with the same number within their node as this rank.
        agreement: two groups in which the hosts compare calls; None if there is a single rank.
    """

    whole: RankRing
    inner: RankRing
    outer: RankRing
    agreement: Agreement | None = field(repr=False, compare=False)

    @property
    def world(self) -> int:
        """The number of ranks of the ring."""
        return self.whole.size

    @property
    def rank(self) -> int:
        """The number of this rank within the ring."""
        return self.whole.rank

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup | None = None,
        inner_size: int | None = None,
        timeout: timedelta = timedelta(seconds=120),
        side_timeout: timedelta = timedelta(seconds=30),
    ) -> "RingGroups":
        """Makes the process groups of a ring and returns them.

        Collective over all ranks of the job, including ranks of other rings; each rank passes the
        `group` of its own ring.

        Args:
            group: process group of the ring's ranks, ascending; None for all ranks of the job.
            inner_size: ranks per node, neighbours in `group`; None if all are on one node.
            timeout: limit for a transfer, and for the wait for other ranks in this function. A
                transfer that takes longer is an error on the ranks that take part in it.
            side_timeout: limit for the wait for other ranks when they compare a call.

        Raises:
            ValueError: the rings of the ranks do not fit together; on every rank.
            RingError: a rank did not make this call in time; on all other ranks.
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
        """Makes the process groups of a ring from a DeviceMesh.

        Args:
            mesh: a mesh with the dimensions (ranks) or (nodes, ranks of a node).
            timeout, side_timeout: as in `create`.

        Other properties and the errors are those of `create`.
        """
        if mesh.ndim > 2:
            got, needs = f"mesh has {mesh.ndim} dimensions", "1 or 2: (nodes, ranks of a node)"
            fix = "pass a slice of it, such as mesh['node', 'ring']"
            raise ValueError(need(GROUPS, got, needs, fix))
        ranks, inner = mesh.mesh.flatten().tolist(), mesh.mesh.shape[-1]
        return cls._of_ranks(ranks, inner, timeout, side_timeout)

    @classmethod
    def _of_ranks(
        cls, ranks: list[int], inner: int, timeout: timedelta, side_timeout: timedelta
    ) -> "RingGroups":
        """Makes the groups of all rings of the job; returns those of this rank's ring."""
        everyone = _rings_of_all_ranks(ranks, inner, timeout)
        _check_rings(everyone)
        own = cls(ALONE, ALONE, ALONE, None)
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
                own = cls(whole, inners[rank // size], outers[rank % size], agreement)
        return own

    def agree(
        self,
        op: str,
        facts: Mapping[str, object],
        problem: Exception | None = None,
        again: bool = False,
    ) -> None:
        """Checks that all ranks make the same call without an error; else raises on every rank.

        Arguments on which all ranks agreed in an earlier call are not compared again at once, so
        that hosts need not wait for each other; a difference is then found some calls later (see
        agreement.py).

        Args:
            op: the name of the function.
            facts: the arguments of the call, by name. A difference between ranks is a ValueError on
                every rank.
            problem: the error in the arguments of this rank, or None. This rank raises `problem`;
                other ranks raise a ValueError with its text.
            again: compare `facts` now, even if the ranks have agreed on the same ones before.

        Raises:
            ValueError: the calls of the ranks differ, or another rank has a `problem`.
            RingError: earlier calls differed, or a rank is lost.
        """
        if self.agreement is not None:
            error = None if problem is None else f"{type(problem).__name__}: {problem}"
            self.agreement.check(
                {"the call": op, **facts, "the error of its arguments": error}, again
            )
        if problem is not None:
            raise problem


def _rings_of_all_ranks(
    ranks: list[int], inner: int, timeout: timedelta
) -> list[tuple[tuple[int, ...], int]]:
    """Returns (ranks, inner size) of each rank of the job, in rank order.

    Ranks exchange them through the job's store, because a wait for the store has a time limit.
    Raises RingError with the missing ranks when `timeout` is over.
    """
    store, number = dist.distributed_c10d._get_default_store(), next(_created)
    keys = [f"qla_ring/{number}/{rank}" for rank in range(dist.get_world_size())]
    size_as_json = inner if type(inner) is int else repr(inner)
    store.set(keys[dist.get_rank()], json.dumps([ranks, size_as_json]))
    try:
        with as_ring_error("ranks did not all make their ring"):
            store.wait(keys, timeout)
    except RingError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        got = f"ranks {missing} did not make their ring within {timeout}"
        fix = "call RingGroups.create or from_mesh on every rank, and look for a rank that failed"
        raise RingError(need(GROUPS, got, "the same call on every rank of the job", fix)) from error
    everyone = [json.loads(store.get(key)) for key in keys]
    return [(tuple(members), size) for members, size in everyone]


def _check_rings(everyone: Sequence[tuple[tuple[int, ...], int]]) -> None:
    """Raises ValueError unless the rings of all ranks of the job fit together.

    Every rank checks the same list of rings, so if one rank raises, all do.
    """
    for rank, (ranks, inner) in enumerate(everyone):
        if list(ranks) != sorted(ranks):
            got, fix = f"the group has the ranks {list(ranks)}", "make a group of sorted ranks"
            raise ValueError(need(GROUPS, got, "ranks in ascending order", fix))
        if type(inner) is not int or inner < 1 or len(ranks) % inner:
            fix = "pass the number of ranks on each node"
            got = f"inner_size is {inner} for {len(ranks)} ranks"
            raise ValueError(need(GROUPS, got, "a divisor of the number of ranks", fix))
        for member in ranks:
            if everyone[member] != (ranks, inner):
                rings = ((rank, ranks, inner), (member, *everyone[member]))
                texts = (f"{list(r)} in nodes of {n} on rank {at}" for at, r, n in rings)
                got = f"the ring is {' and '.join(texts)}"
                fix = f"compare the arguments of ranks {rank} and {member}"
                raise ValueError(need(GROUPS, got, "one ring on all of its ranks", fix))


def _ring(members: Sequence[int], timeout: timedelta) -> RankRing:
    """Makes a process group of `members` and returns its Ring; called on every rank of the job.

    Only members may use the result. A single member needs no process group and gets ALONE.
    """
    if len(members) == 1:
        return ALONE
    options = None
    if "nccl" in dist.get_backend_config():  # its transfers should not queue behind attention
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout  # else torch warns that it takes the group's
    group = dist.new_group(list(members), timeout, pg_options=options, group_desc="qla_ring")
    rank = members.index(dist.get_rank()) if dist.get_rank() in members else -1
    return RankRing(group, rank, len(members))
