"""Sequences that are split over ranks: contexts, and the comparison of the ranks' calls.

Every rank holds the same number of tokens, in one stretch or in two (layouts.py). The first
sequence of a stretch may begin in earlier stretches, and its last one may continue in later ones. A
context holds the numbers of these stretches, like FLA's FLACPContext; `build_cp_context` makes one
without FLA. For each stretch a rank computes a link: the map that its part of a sequence applies to
a state or gradient that passes through (gathered.py).
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from qla_kernels.gdn.sharded.layouts import (
    CONTIGUOUS,
    LAYOUTS,
    STRETCHES,
    ZIGZAG,
    Stretch,
    held_by,
    holder,
    local_bounds,
    stretches,
)
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.ranks import RankError, expect_equal, lost_ranks_explained
from qla_kernels.runtime.sm90 import Reason

Facts = tuple[object, ...]  # properties of a call that must be the same on all ranks
TOKENS_FACT = "the number of tokens"  # the fact that changes from batch to batch

# The facts that a group's ranks have already compared, so that GPUs do not wait again.
_agreed: "WeakKeyDictionary[dist.ProcessGroup, set[str]]" = WeakKeyDictionary()


ShardError = RankError
LINKS = "ranks could not exchange links"


@dataclass(frozen=True)
class CPContext:
    """A record of the part of a packed batch that this rank holds, from `build_cp_context`.

    The fields have the names of FLA's FLACPContext. In the contiguous layout a rank holds
    consecutive tokens. In the zigzag layout a rank holds two stretches of consecutive tokens, which
    FLA calls parts. A sequence may begin on an earlier rank, and continue on a later one.

    Attributes:
        group: the ranks; None becomes the group of all ranks of the job.
        cu_seqlens: [n + 1], the bounds of the n sequences with tokens on this rank, counted from
            the first token of this rank.
        cu_seqlens_cpu: the same numbers on the CPU.
        pre_num_ranks: how many ranks before this one hold tokens of its first sequence.
        post_num_ranks: how many ranks after this one hold tokens of its last sequence.
        layout: "contiguous" or "zigzag". Zigzag uses the following fields in place of pre_num_ranks
            and post_num_ranks.
        part_len: number of tokens of a stretch.
        front_num_seqs: number of sequences with tokens in the first stretch.
        pre_num_ranks_by_part: for each stretch of this rank, how many stretches before it, of all
            ranks, hold tokens of its first sequence.
        post_num_ranks_by_part: for each stretch of this rank, how many stretches after it hold
            tokens of its last sequence.
    """

    group: dist.ProcessGroup | None
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    pre_num_ranks: int | None = None
    post_num_ranks: int | None = None
    layout: str = CONTIGUOUS
    part_len: int | None = None
    front_num_seqs: int | None = None
    pre_num_ranks_by_part: tuple[int, int] | None = None
    post_num_ranks_by_part: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.group is None:  # FLA would run a context without a group as none at all
            object.__setattr__(self, "group", dist.group.WORLD)

    @property
    def is_first_rank(self) -> bool | None:
        """True if the first sequence of this rank begins on this rank; None for zigzag."""
        return None if self.pre_num_ranks is None else self.pre_num_ranks == 0

    @property
    def is_last_rank(self) -> bool | None:
        """True if the last sequence of this rank ends on this rank; None for zigzag."""
        return None if self.post_num_ranks is None else self.post_num_ranks == 0

    @property
    def is_first_by_part(self) -> tuple[bool, ...] | None:
        """For each stretch, True if its first sequence begins there; None for contiguous."""
        before = self.pre_num_ranks_by_part
        return None if before is None else tuple(num == 0 for num in before)

    @property
    def is_last_by_part(self) -> tuple[bool, ...] | None:
        """For each stretch, True if its last sequence ends there; None for contiguous."""
        after = self.post_num_ranks_by_part
        return None if after is None else tuple(num == 0 for num in after)


def build_cp_context(
    cu_seqlens: Tensor,
    group: dist.ProcessGroup | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    layout: str = CONTIGUOUS,
) -> CPContext:
    """Returns the `cp_context` argument of `chunk_gated_delta_rule` for this rank.

    The T tokens of a packed batch are split over W ranks, wherever sequences begin, as in FLA. Rank
    r has

        contiguous   tokens r * T / W to (r + 1) * T / W
        zigzag       stretches r and 2 * W - 1 - r, of 2 * W stretches of T / (2 * W) tokens

    The context says which sequences this rank holds, and how many ranks hold the rest of its first
    and of its last sequence.

    Args:
        cu_seqlens: [N + 1] bounds of the whole batch. The context's cu_seqlens will be on the same
            device.
        group: the ranks that share the batch; None for all ranks of the job.
        cu_seqlens_cpu: the same values on the CPU. Without them, and with cu_seqlens on a GPU, the
            host waits for the GPU.
        layout: "contiguous" or "zigzag".

    Raises:
        ValueError: bounds do not start at 0, or bounds decrease; T is not a multiple of W (zigzag:
            2 * W); the layout is unknown; or this process is not in the group.
    """
    op = "build_cp_context"
    rank, world = _place_in(op, group)
    if layout not in LAYOUTS:
        raise ValueError(need(op, *_unknown(f"layout {layout!r}")))
    bounds = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    if bounds[:1] != [0] or bounds != sorted(bounds):
        needs, fix = "to start at 0 and never fall", "rebuild it from the lengths"
        raise ValueError(need(op, f"cu_seqlens {bounds}", needs, fix))
    each = STRETCHES[layout]
    size, rest = divmod(bounds[-1], each * world)
    if rest:
        got = f"{bounds[-1]} tokens for {world} ranks"
        needs = "as many tokens on every rank"
        if layout == ZIGZAG:
            got, needs = f"{got} in the zigzag layout", f"a multiple of {each * world}"
        raise ValueError(need(op, got, needs, "pad the last sequence"))
    parts = [local_bounds(number, bounds, size) for number in held_by(rank, world, each)]
    held, before, after = zip(*parts, strict=True)
    bounds_here = [*held[0], *(size + x for x in (held[1][1:] if each == 2 else ()))]
    local = torch.tensor(
        bounds_here, dtype=cu_seqlens.dtype, device="cpu"
    )  # not the default device
    here = group, local.to(cu_seqlens.device), local
    if layout == CONTIGUOUS:
        return CPContext(*here, before[0], after[0])
    return CPContext(*here, None, None, layout, size, len(held[0]) - 1, before, after)


def _place_in(op: str, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Returns this process's rank in `group` and the number of ranks; ValueError if outside it."""
    rank = dist.get_rank(group)
    if rank < 0:  # torch raises no error for a process outside the group
        fix = "call it on the group's ranks alone"
        raise ValueError(need(op, "a group without this process", "one that it is in", fix))
    return rank, dist.get_world_size(group)


_FIELDS = {  # of a context, beside cu_seqlens
    CONTIGUOUS: ("pre_num_ranks", "post_num_ranks"),
    ZIGZAG: ("pre_num_ranks_by_part", "post_num_ranks_by_part", "part_len", "front_num_seqs"),
}
_UNITS = {CONTIGUOUS: ("rank", "ranks"), ZIGZAG: ("stretch", "stretches")}  # in errors


class LinePlace(NamedTuple):
    """A record: which tokens of a packed batch this rank holds, from a checked `CPContext`.

    A batch is split over ranks. A rank holds one stretch of consecutive tokens in the layout
    "contiguous", and two in "zigzag".

    Attributes:
        group: the ranks that share the batch.
        rank: number of this rank in the group.
        world: number of ranks.
        layout: "contiguous" or "zigzag".
        front: zigzag: number of sequences with tokens in the first stretch; else 0.
        size: zigzag: number of tokens of a stretch; else None.
        stretches: for each stretch of this rank, its sequences, and how many other stretches hold
            the rest of its first and of its last sequence.
    """

    group: dist.ProcessGroup
    rank: int
    world: int
    layout: str
    front: int
    size: int | None
    stretches: list[Stretch]


def layout_refused(cp_context: Any) -> Reason | None:
    layout = getattr(cp_context, "layout", CONTIGUOUS)
    return None if layout in LAYOUTS else _unknown(f"cp_context with layout {layout!r}")


def _unknown(got: str) -> Reason:
    return got, f"{CONTIGUOUS!r} or {ZIGZAG!r}", "build the context with one of them"


def group_of(op: str, cp_context: Any) -> dist.ProcessGroup:
    """Returns the process group of cp_context, or the group of all ranks if it has none.

    Reads only the group, so a rank whose context is otherwise invalid can still get the group and
    report the error to the other ranks. Raises ValueError if cp_context has no group and
    torch.distributed is not initialised.

    Args:
        op: the name of the function, for the error.
        cp_context: a `CPContext`, or FLA's FLACPContext: the part of a batch that a rank holds.
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
    """Returns which part of a batch that is split over ranks this rank holds, as a `LinePlace`.

    cp_context is a `CPContext`, or FLA's FLACPContext. Raises ValueError if a field is absent, or
    if a number of ranks cannot be right for this rank of the group; the error names `op`.
    """
    layout = getattr(cp_context, "layout", CONTIGUOUS)
    names = ("cu_seqlens", *_FIELDS[layout])
    fields = {name: getattr(cp_context, name, None) for name in names}
    absent = [
        name for name, x in fields.items() if x is None or (isinstance(x, tuple) and None in x)
    ]
    if absent:
        fix = "make it with build_cp_context"
        got = f"cp_context without {', '.join(absent)}"
        raise ValueError(need(op, got, "what FLA's build_cp_context makes", fix))
    group = group_of(op, cp_context)
    rank, world = _place_in(op, group)
    num_sequences = len(cp_context.cu_seqlens) - 1
    if layout == ZIGZAG:
        front, size = int(cp_context.front_num_seqs), int(cp_context.part_len)
        before, after = (list(getattr(cp_context, name)) for name in _FIELDS[layout][:2])
        _check_pairs(op, front, num_sequences, before, after)
    else:
        front, size = 0, None
        before, after = [cp_context.pre_num_ranks], [cp_context.post_num_ranks]
    before, after = list(map(int, before)), list(map(int, after))
    numbers = held_by(rank, world, len(before))
    for number, b, a in zip(numbers, before, after, strict=True):
        behind = len(before) * world - 1 - number
        if not (0 <= b <= number and 0 <= a <= behind):
            unit, units = _UNITS[layout]
            got = (
                f"cp_context with {b} {units} before and {a} behind {unit} {number} of "
                f"{len(before) * world}"
            )
            needs = f"at most {number} and {behind}"
            raise ValueError(need(op, got, needs, "make it with build_cp_context on this rank"))
    own = stretches(before, after, front, num_sequences)
    return LinePlace(group, rank, world, layout, front, size, own)


def _check_pairs(op: str, front: int, num_sequences: int, *pairs: list[int]) -> None:
    """Raises ValueError if a zigzag context's fields do not describe two stretches."""
    if num_sequences > 0 and not 0 < front < num_sequences:
        got = f"cp_context with front_num_seqs {front} and {num_sequences} sequences"
        needs = "at least one sequence in either stretch"
    elif any(len(pair) != 2 for pair in pairs):
        got = f"cp_context with ranks by part {' and '.join(map(str, pairs))}"
        needs = "one number for each of two stretches"
    else:
        return
    raise ValueError(need(op, got, needs, "make it with build_cp_context"))


def agree(
    op: str, shard: LinePlace, facts: Mapping[str, object], problem: Exception | None, on_gpu: bool
) -> None:
    """Raises an error on every rank of a group unless all ranks make the same call.

    Ranks exchange their facts, the ends of their sequences, and their errors. They raise if facts
    differ, if neighbouring ranks disagree about the sequence between them, or if a rank has a
    `problem`. CPU calls are always compared; a GPU call only if its facts are new to the group,
    because comparing waits for other ranks and for the GPU.

    Args:
        op: the name of the function, for the error.
        shard: which tokens this rank holds, with the ends of its sequences.
        facts: properties of the call by name, such as shapes and dtypes.
        problem: the error of this rank's own call, or None. This rank raises `problem`; the other
            ranks raise a ValueError with its text.
        on_gpu: True if the call's tensors are on a GPU.
    """
    # If ranks make the same calls, either all ranks compare or no rank does, for two reasons. Only
    # `facts` decide whether a call is compared, and they are equal on all ranks if the call is
    # right; the ends of sequences and the number of tokens do not decide, because they differ by
    # batch. And the set of known facts is the same on all ranks: it grows only after an exchange in
    # which all ranks took part, and all ranks decide from the same data whether to add the facts
    # and whether to raise.
    # If one rank has a problem, or facts that are new to this rank alone, while the other ranks
    # make a known call, then the other ranks do not take part here, and the group's timeout ends
    # the job. If ranks make different calls that are both known, the tensors that they exchange
    # show it: these carry a checksum of the facts and of the ends of sequences (`signed`). The
    # number of tokens is compared only when facts are new.
    report = (
        {name: str(fact) for name, fact in facts.items()},
        [(stretch.before, stretch.after, stretch.through) for stretch in shard.stretches],
        None if problem is None else str(problem),
    )
    key = repr({name: fact for name, fact in report[0].items() if name != TOKENS_FACT})
    known = _agreed.setdefault(shard.group, set())
    if on_gpu and problem is None and key in known:
        return
    everyone: list[Any] = [None] * shard.world
    with lost_ranks_explained(op, LINKS):
        dist.all_gather_object(everyone, report, group=shard.group)
    for rank, (_, _, wrong) in enumerate(everyone):
        if wrong is not None:
            raise problem or ValueError(f"rank {rank}: {wrong}")
    expect_equal(op, [theirs for theirs, _, _ in everyone])
    _expect_one_line(op, shard.layout, [ends for _, ends, _ in everyone])
    known.add(key)


Ends = tuple[int, int, bool]  # before, after and through of a stretch


def _expect_one_line(op: str, layout: str, everyone: list[list[Ends]]) -> None:
    """Raises ValueError unless neighbouring stretches agree about the sequence between them.

    `everyone` has the ends of each rank's stretches.
    """
    world = len(everyone)
    holders = (holder(number, world) for number in range(STRETCHES[layout] * world))
    line = [everyone[rank][which] for rank, which in holders]
    ends = [(0, 0, False), *line, (0, 0, False)]
    unit, units = _UNITS[layout]
    for number, (left, right) in enumerate(itertools.pairwise(ends)):
        before = 1 + left[0] * left[2] if left[1] else 0
        after = 1 + right[1] * right[2] if right[0] else 0
        if (before, after) != (right[0], left[1]):
            got = (
                f"{left[1]} {units} after {unit} {number - 1} and {right[0]} before {unit} {number}"
                " hold the sequence between them"
            )
            fix = "make every rank's cp_context of the same cu_seqlens"
            raise ValueError(need(op, got, f"{after} and {before}", fix))


def group_named(name: str) -> dist.ProcessGroup:
    """Returns the process group with this name.

    It serves this package's custom operators, which take a group by its name, because operators of
    torch.library cannot take the group itself.
    """
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore
