"""Equal shares of chunks: the tables of share_table, and the forward that takes them."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

from qla_kernels.gdn import plan
from qla_kernels.gdn.kernels.chain import shares as columns
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.launch.shares import share_out
from qla_kernels.gdn.ops import GdnForward
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.lab.selftest.cases import Cases, to
from qla_kernels.lab.selftest.gdn_calls import Call
from qla_kernels.lab.selftest.gdn_forward import forward
from qla_kernels.tile.constants import CHUNK

KERNEL = ForwardChoice(128, True)
WHOLE, SHARED = plan.Plan(KERNEL), plan.Plan(KERNEL, None, shares=True)


def both(x: Call, taken: plan.Plan = SHARED, **options: Any) -> tuple[GdnForward, GdnForward]:
    """Returns the forward of whole items and of equal shares; their results have the same bits."""
    found = []
    for each in (WHOLE, taken):
        with mock.patch.object(launch, "planned", return_value=(each, False)):
            found.append(forward(x, **options))
    return found[0], found[1]


def assert_same_bits(x: Call, want: GdnForward, got: GdnForward, where: str = "") -> None:
    """Compares all results; of what is saved, the rows of tokens of a sequence."""
    bounds = x.get("cu_seqlens")
    live = None if bounds is None else int(bounds[-1])
    for name in ("o", "final_state", "g_cum", "A"):
        a, b = getattr(want, name), getattr(got, name)
        if a is None and b is None:
            continue
        if name in ("g_cum", "A"):
            a, b = a[:, :live], b[:, :live]
        assert not b.isnan().any(), f"{where}{name}: NaN"
        different = int((a != b).sum())
        assert different == 0, f"{where}{name}: {different} of {a.numel()} numbers differ"


class CutItems(NamedTuple):
    lengths: Sequence[int]
    heads: tuple[int, int]
    tiles: int
    ctas: int
    most_cut: int | None = None
    taken: bool = True  # or sequences lie behind all tokens


def _share_table(variant: Any, given: CutItems, device: str) -> None:
    """Compares the tables with shares that are cut place by place, or with items longest first."""
    (lengths, (H, HV), tiles, ctas, most_cut, taken), K = given, 128
    bounds = to(torch.tensor([0, *lengths]).cumsum(0).int(), device)
    tokens = sum(lengths) + 5
    if not taken:
        bounds, lengths = torch.full_like(bounds, tokens), ()
    like, sizes = torch.zeros(1, device=device), (K, 128 * tiles)
    found = share_out(like, bounds, (H, HV), 128, sizes, tokens, ctas, most_cut)
    pieces, shares = found.pieces.cpu(), found.shares.cpu()
    begins = bounds.tolist()
    if most_cut is not None and max(lengths, default=0) > most_cut * CHUNK:
        order = sorted(range(len(lengths)), key=lambda n: -max(1, -(-lengths[n] // CHUNK)))
        dealt = [(n, hv, i) for n in order for hv in range(HV) for i in range(tiles)]
        assert len(shares) >= len(dealt)
        for c, (n, hv, i) in enumerate(dealt):
            assert shares[c, :2].tolist() == [c, 1]
            assert pieces[c].tolist() == [n, hv, hv // (HV // H), i, begins[n], lengths[n], 0, 0]
        assert not shares[len(dealt) :, columns.NUM_PIECES].any(), "CTAs without items"
        assert not shares[:, columns.GIVEN :].any(), "flags are set"
        return
    places = [  # (item, number of the chunk in it)
        ((n * HV + hv) * tiles + i, chunk)
        for n, length in enumerate(lengths)
        for hv in range(HV)
        for i in range(tiles)
        for chunk in range(max(1, -(-length // CHUNK)))
    ]
    size, larger, at = len(places) // ctas, len(places) % ctas, 0
    for c in range(ctas):
        mine = places[at : at + size + (c < larger)]
        at += len(mine)
        items = sorted({item for item, _ in mine})
        assert shares[c, columns.NUM_PIECES] == len(items), f"pieces of share {c}"
        assert not shares[c, columns.GIVEN :].any(), f"flags of share {c} are set"
        for j, item in enumerate(reversed(items)):
            got = pieces[shares[c, columns.LAST_PIECE] - j].tolist()
            n, hv = item // tiles // HV, item // tiles % HV
            chunks = [chunk for other, chunk in mine if other == item]
            first, end = CHUNK * chunks[0], min(lengths[n], CHUNK * (chunks[-1] + 1))
            takes = chunks[0] > 0
            gives = (item, chunks[-1] + 1) in places[at : at + 1]
            want = [n, hv, hv // (HV // H), item % tiles, begins[n] + first, end - first, takes]
            assert got == [*want, gives], f"piece {j} of share {c}"
    assert at == len(places)
    assert not shares[ctas:, columns.NUM_PIECES].any(), "CTAs past the shares"


# Fewer places than CTAs; as many; items of one place; items longer than several shares; borders
# that are those of items; empty sequences first, in the middle, last; two tiles.
TABLES = (
    CutItems([1], (1, 1), 1, 4),
    CutItems([64, 65], (1, 2), 1, 4),
    CutItems([0, 0, 0], (1, 2), 1, 4),
    CutItems([640], (1, 1), 1, 7),
    CutItems([256, 256], (1, 2), 1, 4),
    CutItems([0, 65, 0, 1, 130, 0], (2, 4), 1, 5),
    CutItems([100, 3000, 0, 700], (1, 3), 2, 11),
    CutItems([1, 2, 3, 400], (2, 2), 1, 3),
    # lengths that the device alone knows: cut, whole, of a path that is not taken
    CutItems([128, 128, 100], (1, 2), 1, 4, most_cut=2),
    CutItems([65, 128, 0, 130, 64, 129], (1, 3), 1, 4, most_cut=2),
    CutItems([65, 300], (1, 2), 2, 12, most_cut=2),
    CutItems([65, 300], (1, 2), 1, 3, most_cut=2, taken=False),
)
LARGE = (
    CutItems([8192] * 4, (16, 48), 1, 132),
    CutItems([8192, 6000, 4000, 9000, 2000], (16, 64), 2, 132),
    CutItems([(37 * i) % 600 for i in range(2500)], (1, 2), 1, 132),
    CutItems([8192] * 4, (16, 48), 1, 132, most_cut=200),
    CutItems([8192, 20000, 4000, 576], (16, 48), 1, 132, most_cut=200),
    CutItems([(37 * i) % 600 for i in range(390)], (1, 1), 1, 132, most_cut=8),
)

CASES = (Cases(("gdn.share_table",), _share_table, TABLES, LARGE),)
