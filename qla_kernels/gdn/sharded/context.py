"""Sequences that are cut over ranks: contexts, the comparison of calls, and the exchange of links.

Every rank holds the same number of tokens, in order, as in FLA's contiguous layout. A rank's first
sequence may begin on the ranks before it, and its last one may continue on the ranks after it.
FLA's FLACPContext holds these numbers of ranks, and `build_cp_context` makes such a context without
FLA. Each rank computes a link: the map that its part of such a sequence applies to a state or
gradient that passes through. One gather sends all links to all ranks, and each rank folds the links
that it needs.
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
from qla_kernels.sm90 import Reason

Facts = tuple[object, ...]  # properties of a call that must be the same on all ranks
LAYOUT = "contiguous"

# all_gather_into_tensor warns since torch 2.13, which has the new name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# The facts that a group's ranks have compared, so that GPUs do not wait to compare them again.
_agreed: "WeakKeyDictionary[dist.ProcessGroup, set[str]]" = WeakKeyDictionary()


ShardError = RankError
LINKS = "ranks could not exchange links"


@dataclass(frozen=True)
class CPContext:
    """A rank's part of a packed batch; its fields have the names of FLA's FLACPContext."""

    group: dist.ProcessGroup | None  # all ranks of the job if None
    cu_seqlens: Tensor  # [n + 1] bounds of the n sequences with tokens here; 0 is the first token
    cu_seqlens_cpu: Tensor
    pre_num_ranks: int  # number of ranks before this one that hold a part of its first sequence
    post_num_ranks: int  # number of ranks after this one that hold a part of its last sequence
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
    """Returns the `cp_context` argument of `chunk_gated_delta_rule` on this rank.

    It holds the bounds of the sequences with tokens here, and how many ranks before and after hold
    the rest of the first and the last one. Rank r of W has the tokens r T / W to (r + 1) T / W.

    Args:
        cu_seqlens: [N + 1] bounds of the whole batch of T tokens. The context's cu_seqlens will be
            on the same device.
        group: the ranks that share the batch; None for all ranks of the job.
        cu_seqlens_cpu: the same values on the CPU. Without it the host waits for a GPU tensor.

    Raises:
        ValueError: bounds do not start at 0 or fall, T is not a multiple of W, or this process is
            not in the group.
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
    held, before, after = local_bounds(rank, bounds, bounds[-1] // world)
    local = torch.tensor(held, dtype=cu_seqlens.dtype, device="cpu")  # not the default device
    return CPContext(group, local.to(cu_seqlens.device), local, before, after)


def _place_in(op: str, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Returns this process's rank in `group` and the number of ranks; ValueError if outside it."""
    rank = dist.get_rank(group)
    if rank < 0:  # torch raises no error for a process outside the group
        fix = "call it on the group's ranks alone"
        raise ValueError(need(op, "a group without this process", "one that it is in", fix))
    return rank, dist.get_world_size(group)


def local_bounds(rank: int, bounds: Sequence[int], size: int) -> tuple[list[int], int, int]:
    """Returns the part of a batch on a rank that holds `size` tokens.

    The results are the bounds of the sequences that have tokens on the rank, counted from its first
    token; the number of ranks before it that hold its first sequence; and the number of ranks after
    it that hold its last one.
    """
    if not size:
        return [0], 0, 0
    begin, end = rank * size, (rank + 1) * size
    inside = sorted({x for x in bounds if begin < x < end})
    before = rank - max(x for x in bounds if x <= begin) // size
    after = (min(x for x in bounds if x >= end) - 1) // size - rank
    return [0, *(x - begin for x in inside), size], before, after


class LinePlace(NamedTuple):
    """The parts of a context that a call uses."""

    group: dist.ProcessGroup
    rank: int
    world: int
    before: int  # number of ranks before this one that hold its first sequence
    after: int  # number of ranks after this one that hold its last sequence
    through: bool  # these are the same sequence, which comes from a rank and continues on one


def goes_through(cu_seqlens: Tensor, before: int, after: int) -> bool:
    """Returns True if this rank has one sequence, which enters from a rank and leaves to another.

    Only then does the state that leaves the rank depend on the state that enters it.
    """
    return cu_seqlens.shape[0] == 2 and before > 0 and after > 0


def layout_refused(cp_context: Any) -> Reason | None:
    layout = getattr(cp_context, "layout", LAYOUT)
    if layout == LAYOUT:
        return None
    fix = "build the context with layout='contiguous'"
    return f"cp_context with layout {layout!r}", f"{LAYOUT!r}: tokens in order", fix


def group_of(op: str, cp_context: Any) -> dist.ProcessGroup:
    """Returns the process group of a context, or the job's if it has none.

    Reads nothing else of the context, so that an error in it can be sent to the group. Raises
    ValueError if there is no process group.
    """
    group = getattr(cp_context, "group", None)
    if group is None:
        if not dist.is_initialized():
            fix = "call torch.distributed.init_process_group, or drop cp_context"
            raise ValueError(need(op, "cp_context without a process group", "one", fix))
        group = dist.group.WORLD
    assert group is not None, "torch is initialized"
    return group


def place_of(op: str, cp_context: Any) -> LinePlace:
    """Returns the place that a context describes; `agree` compares it with other ranks' contexts.

    Raises ValueError if a field is absent, or if there are not as many ranks as the context says.
    """
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
    return LinePlace(group, rank, world, before, after, through)


def agree(
    op: str, shard: LinePlace, facts: Mapping[str, object], problem: Exception | None, on_gpu: bool
) -> None:
    """Compares the ranks' calls; raises on every rank if one has a problem or if calls differ.

    Calls differ if `facts` differ between ranks, or if ranks disagree about the sequences between
    them (before, after, through). `problem` is the error of this rank's own call, if any; it is
    raised here, and as a ValueError with its text on the other ranks.

    CPU calls are always compared. A GPU call is compared only if its facts are new to the group,
    because ranks wait for each other and for the GPU when they compare. If ranks make the same
    calls, either all of them compare or none does:

    * Only `facts` decide whether a call is compared. They are equal on all ranks if the call is
      right. The tuple (before, after, through) does not decide: it differs by rank and batch.
    * The set of known facts is the same on all ranks. It grows only after an exchange in which all
      ranks took part, and all ranks decide from the same data whether it grows and whether to
      raise.

    If one rank has a problem, or facts that are new to it alone, while the other ranks make a known
    call, then the other ranks do not take part here, and the group's timeout ends the job. Later
    mixtures of known facts and the tuples of later batches are not compared here; the links carry
    a checksum of them, see `signed`.
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
    """Raises ValueError unless neighbouring ranks agree about the sequence between them.

    `line` has each rank's (before, after, through).
    """
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
    """Returns the process group of that name; operators take names, as torch's collectives do."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore


def gather(link: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges signed links; returns those of all ranks, [ranks, HV, V + K + 1, K]."""
    links = link.new_empty(dist.get_world_size(group), *link.shape)
    with lost_ranks_explained("cp_context", LINKS):
        _all_gather(links.view(-1), link.reshape(-1), group)
    return links


def signed(link: Tensor, facts: Facts, sent: int, came: int) -> Tensor:
    """Returns a link [HV, V + K, K] with one more row, a checksum that `folded` verifies.

    Args:
        facts: the facts of the call.
        sent: the number of ranks that will fold this link.
        came: if the link's sequence passes through this rank, the number of ranks before it that
            the sequence has passed; else 0.
    """
    HV, _, K = link.shape
    row = link.new_full((1, 1, 1), _signature(facts, sent, came)).expand(HV, 1, K)
    return torch.cat([link, row], 1)


def folded(links: Tensor, ranks: Sequence[int], V: int, facts: Facts, onward: int) -> Tensor:
    """Folds the links of these ranks, from a state of 0, into the state that enters this rank.

    Computes in fp64, so that torch's precision setting for fp32 products has no effect. If a link's
    checksum is not that of this call, CPU tensors raise ShardError; on a GPU, where the host does
    not wait, the result is NaN.

    Args:
        links: of all ranks, as `gather` returns them.
        ranks: the ranks that the sequence passes before this one, in that order.
        onward: the number of ranks that will fold this rank's own link of the same sequence.

    Returns:
        [HV, V, K] in the dtype of links: the state or, for links of a backward, the gradient.
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
    """Returns a checksum of 24 bits, which fp32 holds exactly."""
    return zlib.crc32(repr(said).encode()) >> 8
