"""The cases of the kernels around links, by which ranks that share sequences exchange states."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.launch.segments import Maps, Segments
from qla_kernels.gdn.shapes import key_room
from qla_kernels.gdn.sharded import gathered, links
from qla_kernels.gdn.sharded.layouts import Stretch
from qla_kernels.lab.selftest.cases import Cases
from qla_kernels.lab.selftest.compare import relative_l2

TERMS = 2e-5  # M is exactly two terms of 8 bits here; a state is rounded to two: 2^-17, some folds
FP32 = 1e-6  # of a sum of 128 products, each rounded to 6e-8
FACTS = ("the facts of a call",)


class RankPart(NamedTuple):
    """A rank's part of a batch."""

    sizes: tuple[int, int, int]  # HV, K, V
    segments: list[int]  # of each sequence
    stretches: list[Stretch]

    @property
    def place(self) -> tuple[int, int]:
        """The rank that has these stretches, of how many."""
        return (1, 2) if len(self.stretches) == 2 else (1, 3)

    def cut(self, device: str) -> Segments:
        """Returns segments, with room for three more, of which only first_segment is right."""
        first = torch.tensor([0, *self.segments]).cumsum(0).int().to(device)
        rows = torch.zeros(sum(self.segments) + 4, dtype=torch.int32, device=device)
        return Segments(rows, rows, rows, first, rows)


def _made(_: Any, part: RankPart, device: str) -> None:
    """Checks links in both directions, with heads that need all maps, some, and none."""
    HV, K, V = part.sizes
    room, cut = key_room(K), part.cut(device)
    numbers = torch.randn(cut.capacity, HV, V, room)
    numbers[..., K:] = 0
    M = torch.randn(cut.capacity, HV, 2, room, room).bfloat16() / room**0.5
    M[:, :, 1] /= 256
    M[..., K:, :] = M[..., K:] = 0
    cold = (torch.rand(cut.capacity, HV) < torch.linspace(0, 1, HV)).int()
    ends = cut.first_segment.cpu()
    for reverse in (False, True):
        left = numbers.clone()
        for x in part.stretches:
            if x.through:  # no segment before it is mapped
                left[ends[x.end] - 2 if reverse else ends[x.first] + 1] = torch.nan
        found = Maps(*(x.to(device) for x in (left, M, cold)))
        carried = gathered.signatures(FACTS, part.stretches, reverse)
        got = links.made(found.left, found, cut, part.stretches, K, carried, reverse).cpu()
        assert torch.equal(found.left.cpu().nan_to_num(0.5), left.nan_to_num(0.5)), "not changed"
        for s, (stretch, signature) in enumerate(zip(part.stretches, carried, strict=True)):
            assert (got[:, s, -1] == signature).all()
            b, E = got[:, s, :-1].tensor_split((V,), 1)
            want = _link(part, stretch, left.double(), M.double().sum(2), cold, reverse)
            for its, y in zip((b, E), want, strict=True):
                assert relative_l2(its, y[..., :K]) < TERMS if y.any() else not its.any()


def _link(
    part: RankPart, stretch: Stretch, left: Tensor, M: Tensor, cold: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Returns b [HV, V, K] and the map [HV, K, K] of a stretch, transposed, segment by segment."""
    _, HV, V, room = left.shape
    n, is_open = stretch.end - 1, stretch.after > 0
    if reverse:
        n, is_open = stretch.first, stretch.before > 0
    b, E = left.new_zeros(HV, V, room), left.new_zeros(HV, part.sizes[1], room)
    ends = list(pairwise([0, *torch.tensor(part.segments).cumsum(0).tolist()]))[n]
    first, last = ends[0], ends[1] - 1
    if not is_open or first == last:
        return b, E
    walk = range(last - 1, first, -1) if reverse else range(first + 1, last)
    step = -1 if reverse else 1
    if not stretch.through:
        b = left[last - 1 if reverse else first + 1]
    else:
        E = torch.eye(room, dtype=left.dtype)[: part.sizes[1]].expand(HV, -1, -1)
    for p in walk:
        goes_on = cold[p].view(HV, 1, 1)
        map_p = M[p].mT if reverse else M[p]
        b, E = b @ map_p * goes_on + left[p + step], E @ map_p * goes_on
    return b, E


def _entered(_: Any, part: RankPart, device: str) -> None:
    """Checks states that enter stretches, where they go, and links of another call."""
    (HV, K, V), (rank, world), cut = part.sizes, part.place, part.cut(device)
    each, room, first = len(part.stretches), key_room(K), cut.first_segment.cpu()
    maps = torch.randn(world, HV, each, V + K + 1, K) / K**0.5
    for reverse in (False, True):
        lines = gathered.lines(FACTS, part.stretches, rank, world, reverse)
        for passed in (x for line in lines for x in line):
            maps[passed.rank, :, passed.place, -1] = passed.signature
        want, before = gathered.folded(maps, lines, V), torch.randn(cut.capacity, HV, V, room)
        states, all_links = before.to(device), maps.to(device)
        its = part.stretches
        got = links.enter(all_links, lines, states, cut, its, reverse, results=True)
        assert got is not None, "asked for"
        rows = {}
        for s, (stretch, line) in enumerate(zip(part.stretches, lines, strict=True)):
            assert not line or relative_l2(got[s].cpu(), want[s]) < FP32
            assert line or not got[s].any()
            if line:
                rows[s] = int(first[stretch.end] - 2 if reverse else first[stretch.first] + 1)
        _check_rows(states, before, rows, got)
        if not reverse:
            again = before.to(device)
            links.enter_again(got, again, cut, part.stretches)
            _check_rows(again, before, rows, got)
        for s in rows:  # a link of another call
            passed = lines[s][-1]
            wrong = maps.clone()
            wrong[passed.rank, :, passed.place, -1] += 1
            states = before.to(device)
            links.enter(wrong.to(device), lines, states, cut, its, reverse)
            assert states[rows[s], ..., :K].isnan().all()


def _check_rows(states: Tensor, before: Tensor, rows: dict[int, int], found: Tensor) -> None:
    """Checks that rows of states have what was found, then zeros, and that no other row changed."""
    want, K = before.clone(), found.shape[-1]
    for s, row in rows.items():
        want[row] = 0
        want[row, ..., :K] = found[s].cpu()
    assert torch.equal(states.cpu(), want)


PARTS = [
    RankPart((2, 128, 64), [4], [Stretch(0, 1, 1, 1)]),  # through
    RankPart((3, 64, 128), [4, 1, 3], [Stretch(0, 3, 1, 1)]),
    RankPart((2, 96, 64), [2, 3, 4, 1, 2], [Stretch(0, 2, 1, 1), Stretch(2, 5, 1, 1)]),
    RankPart((2, 128, 64), [5, 3], [Stretch(0, 1, 1, 2), Stretch(1, 2, 2, 1)]),  # neighbours
    RankPart((1, 16, 192), [3, 4], [Stretch(0, 1, 0, 1), Stretch(1, 2, 1, 0)]),
    RankPart((1, 128, 64), [1, 1], [Stretch(0, 1, 0, 0), Stretch(1, 2, 0, 0)]),  # none
]
LARGE = [
    RankPart((32, 128, 128), [17], [Stretch(0, 1, 1, 1)]),
    RankPart((64, 96, 192), [9, 8], [Stretch(0, 1, 1, 2), Stretch(1, 2, 2, 1)]),
]
CASES = (
    Cases(("gdn.link_start", "gdn.link_rows"), _made, PARTS, LARGE),
    Cases(("gdn.link_fold",), _entered, PARTS, LARGE),
)
