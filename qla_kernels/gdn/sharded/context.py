"""Sequences cut over ranks: what a rank holds, what ranks agree on, and what they exchange.

Tokens are dealt out in order, as many to each rank, as FLA's contiguous layout has it. A rank's
first sequence may have begun on the ranks before it, and its last one may go on behind it; FLA's
FLACPContext says so, and so does `build_cp_context` where there is no FLA. Each rank finds out what
its part of such a sequence does to a state or gradient that comes through, a link; one gather hands
all links to all ranks, and each of them folds those it needs.
"""

import functools
import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from qla_kernels.errors import need
from qla_kernels.ranks import RankError, expect_equal, lost_ranks_explained

Reason = tuple[str, str, str]  # got, need, fix
Facts = tuple[object, ...]  # what has to be the same on all ranks
LAYOUT = "contiguous"

# its name until torch 2.13, where the old one warns
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# What a group's ranks have agreed on, so that a GPU does not wait for them to agree again.
_agreed: "WeakKeyDictionary[dist.ProcessGroup, set[str]]" = WeakKeyDictionary()


ShardError = RankError
LINKS = "ranks could not exchange links"


@dataclass(frozen=True)
class CPContext:
    """A rank's part of a packed batch, under the names of FLA's FLACPContext."""

    group: dist.ProcessGroup | None  # all ranks of the job if None
    cu_seqlens: Tensor  # [n + 1] of the sequences that have tokens here, counted from the first one
    cu_seqlens_cpu: Tensor
    pre_num_ranks: int  # ranks before this one that hold its first sequence
    post_num_ranks: int  # ranks behind it that hold its last one
    layout: str = LAYOUT

    @property
    def is_first_rank(self) -> bool:
        return self.pre_num_ranks == 0

    @property
    def is_last_rank(self) -> bool:
        return self.post_num_ranks == 0


def build_cp_context(
    cu_seqlens: Tensor,
    group: dist.ProcessGroup | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> CPContext:
    """This rank's part of a batch; rank r of W has the tokens r T / W to (r + 1) T / W.

    Args:
        cu_seqlens: [N + 1] of the whole batch, of T tokens; the context's own is on its device.
        group: the ranks that share the batch; None for all of the job.
        cu_seqlens_cpu: the same on the CPU; without it a GPU is waited for.
    """
    rank, world = _place_in("build_cp_context", group)
    bounds = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    if bounds[:1] != [0] or bounds != sorted(bounds):
        needs, fix = "to start at 0 and never fall", "rebuild it from the lengths"
        raise ValueError(need("build_cp_context", f"cu_seqlens {bounds}", needs, fix))
    if bounds[-1] % world:
        fix = "pad the last sequence"
        got = f"{bounds[-1]} tokens for {world} ranks"
        raise ValueError(need("build_cp_context", got, "as many tokens on every rank", fix))
    held, before, after = held_by(rank, bounds, bounds[-1] // world)
    local = torch.tensor(held, dtype=cu_seqlens.dtype, device="cpu")  # whatever the default is
    return CPContext(group, local.to(cu_seqlens.device), local, before, after)


def _place_in(op: str, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank among the ranks of `group`, and how many those are."""
    rank = dist.get_rank(group)
    if rank < 0:  # torch answers those outside, and hands them a group that is none
        fix = "call it on the group's ranks alone"
        raise ValueError(need(op, "a group without this process", "one that it is in", fix))
    return rank, dist.get_world_size(group)


def held_by(rank: int, bounds: Sequence[int], size: int) -> tuple[list[int], int, int]:
    """The bounds of the sequences that have some of this rank's `size` tokens, counted from its
    first one, and how many ranks before it and behind it hold the first and the last of them.
    """
    if not size:
        return [0], 0, 0
    begin, end = rank * size, (rank + 1) * size
    inside = sorted({x for x in bounds if begin < x < end})
    before = rank - max(x for x in bounds if x <= begin) // size
    after = (min(x for x in bounds if x >= end) - 1) // size - rank
    return [0, *(x - begin for x in inside), size], before, after


class Shard(NamedTuple):
    """What a call needs of a context."""

    group: dist.ProcessGroup
    rank: int
    world: int
    before: int  # ranks
    after: int
    through: bool


def goes_through(cu_seqlens: Tensor, before: int, after: int) -> bool:
    """Whether one sequence comes in and goes on: what comes in has to do with what leaves."""
    return cu_seqlens.shape[0] == 2 and before > 0 and after > 0


def layout_refused(cp_context: Any) -> Reason | None:
    layout = getattr(cp_context, "layout", LAYOUT)
    if layout == LAYOUT:
        return None
    fix = "build the context with layout='contiguous'"
    return f"cp_context with layout {layout!r}", f"{LAYOUT!r}: tokens in order", fix


def group_of(op: str, cp_context: Any) -> dist.ProcessGroup:
    """The ranks that share the call, which is all that it takes to tell them what is wrong."""
    group = getattr(cp_context, "group", None)
    if group is None:
        if not dist.is_initialized():
            fix = "call torch.distributed.init_process_group, or drop cp_context"
            raise ValueError(need(op, "cp_context without a process group", "one", fix))
        group = dist.group.WORLD
    assert group is not None, "torch is initialized"
    return group


def shard_of(op: str, cp_context: Any) -> Shard:
    """Its tables have to be there; whether they fit other ranks' is found out by `agree`."""
    names = ("cu_seqlens", "pre_num_ranks", "post_num_ranks")
    absent = [name for name in names if getattr(cp_context, name, None) is None]
    if absent:
        fix = "make it with build_cp_context"
        got = f"cp_context without {', '.join(absent)}"
        raise ValueError(need(op, got, "what FLA's build_cp_context makes", fix))
    group = group_of(op, cp_context)
    rank, world = _place_in(op, group)
    before, after = int(cp_context.pre_num_ranks), int(cp_context.post_num_ranks)
    if not (0 <= before <= rank and 0 <= after < world - rank):
        got = f"cp_context with {before} ranks before and {after} behind rank {rank} of {world}"
        needs = f"at most {rank} and {world - 1 - rank}"
        raise ValueError(need(op, got, needs, "make it with build_cp_context on this rank"))
    through = goes_through(cp_context.cu_seqlens, before, after)
    return Shard(group, rank, world, before, after, through)


def agree(
    op: str, shard: Shard, facts: Mapping[str, object], problem: Exception | None, on_gpu: bool
) -> None:
    """Raise on every rank unless all were asked for the same, in one line of ranks.

    `problem` is what is wrong with this rank's call alone.

    On a GPU, ranks compare only facts that are new to the group, because they wait for each other
    and for the GPU. No rank waits here for one that has gone on:

    * Facts alone decide, and those of one call are equal on all ranks, or the call is wrong. The
      line (before, after, through) has no say: it differs by rank and by batch.
    * What is known is the same on all ranks: it grows after an exchange in which all took part, and
      what all heard decides whether it does, and whether all raise.

    So in a program whose ranks make the same calls, they exchange together or not at all. A rank
    with a problem, or with facts that are new to it alone, may find no one to tell: its group's
    timeout ends the others. What is not compared here, facts that are mixed later and lines of
    later batches, travels with the links: see `signed`.
    """
    said = (
        {name: str(fact) for name, fact in facts.items()},
        (shard.before, shard.after, shard.through),
        None if problem is None else str(problem),
    )
    known, mine = _agreed.setdefault(shard.group, set()), repr(said[0])
    if on_gpu and problem is None and mine in known:
        return
    everyone: list[Any] = [None] * shard.world
    with lost_ranks_explained(op, LINKS):
        dist.all_gather_object(everyone, said, group=shard.group)
    for rank, (_, _, wrong) in enumerate(everyone):
        if wrong is not None:
            raise problem or ValueError(f"rank {rank}: {wrong}")
    expect_equal(op, [theirs for theirs, _, _ in everyone])
    _expect_one_line(op, [line for _, line, _ in everyone])
    known.add(mine)


def _expect_one_line(op: str, line: list[tuple[int, int, bool]]) -> None:
    """Of (ranks before, ranks after, whether one sequence comes through): neighbours must fit."""
    ends = [(0, 0, False), *line, (0, 0, False)]
    for rank, (left, right) in enumerate(itertools.pairwise(ends)):
        before = 1 + left[0] * left[2] if left[1] else 0
        after = 1 + right[1] * right[2] if right[0] else 0
        if (before, after) != (right[0], left[1]):
            got = (
                f"{left[1]} ranks after rank {rank - 1} and {right[0]} before rank {rank} hold the "
                "sequence between them"
            )
            fix = "make every rank's cp_context of the same cu_seqlens"
            raise ValueError(need(op, got, f"{after} and {before}", fix))


def group_named(name: str) -> dist.ProcessGroup:
    """An operator is given its group by name, as torch's own collectives are."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore


def gather(link: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The links of all ranks, [ranks, HV, V + K + 1, K]."""
    links = link.new_empty(dist.get_world_size(group), *link.shape)
    with lost_ranks_explained("cp_context", LINKS):
        _all_gather(links.view(-1), link.reshape(-1), group)
    return links


def signed(link: Tensor, facts: Facts, sent: int, came: int) -> Tensor:
    """A link [HV, V + K, K] with one more row, by which those that fold it know what it is.

    sent: how many ranks are to fold it.
    came: how many ranks its sequence has come through before, if it comes through here.
    """
    HV, _, K = link.shape
    row = link.new_full((1, 1, 1), _signature(facts, sent, came)).expand(HV, 1, K)
    return torch.cat([link, row], 1)


def folded(links: Tensor, ranks: Sequence[int], V: int, facts: Facts, onward: int) -> Tensor:
    """What has come through these ranks, in the order in which it meets them: [HV, V, K].

    In fp64, which is the same whatever precision torch is told to multiply fp32 in. A link of
    another call, or of another line of ranks, is an error; on a GPU, which nobody waits for, NaN.

    onward: how many ranks fold this one's own link with the same sequence in it.
    """
    K, num = links.shape[3], len(ranks)
    state = links.new_zeros(links.shape[1], V, K, dtype=torch.float64)
    for passed, rank in enumerate(ranks):
        link = links[rank].double()
        state = state @ link[:, V:-1] + link[:, :V]
        foreign = link[0, -1, 0] != _signature(facts, num - passed + onward, passed)
        if foreign.is_cpu and foreign:
            got = f"the link of rank {rank} is not of this call"
            needs, fix = "the same calls on all ranks, in one order", f"look at rank {rank}"
            raise RankError(need("cp_context", got, needs, fix))
        state.masked_fill_(foreign, torch.nan)
    return state.to(links.dtype)


@functools.lru_cache(maxsize=4096)
def _signature(*said: object) -> int:
    """Exact in fp32."""
    return zlib.crc32(repr(said).encode()) >> 8
