"""An index, launch by launch, and what it must be."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.lab.selftest.cases import Cases, dtype_of
from qla_kernels.sparse_ring import VerticalSlash, VSIndex, cpu, launch_index
from qla_kernels.sparse_ring.layouts import ContiguousLayout, Layout, StripedLayout, ZigZagLayout
from qla_kernels.sparse_ring.select import Candidates, last_block
from qla_kernels.sparse_ring.shapes import BLOCK, OBSERVED, UNIT

# Masses are counted in units of 2^-30 of a window. A sum of fp32 numbers is rounded to one of them
# in the end; before that, exponents are fp32, of up to 64 here, and their errors become relative.
RELATIVE = 2e-5
LSE = 1e-5
ROUNDING = 2.0**-22  # fp32, in base 2: score, maximum, logarithm and sum are as large as the LSE


class ObservedWindow(NamedTuple):
    """Queries that are observed, and a rank's keys."""

    q: Tensor  # [B, rows, H, D]
    k: Tensor  # [B, L, Hk, D]
    block: Tensor  # int32 [L / 64]
    last: int
    scale: float


def window(
    L: int,
    heads: tuple[int, int] = (1, 2),
    D: int = 64,
    dtype: torch.dtype = torch.float16,
    B: int = 1,
    rows: int = OBSERVED,
    blocks: list[int] | None = None,
    size: float = 1.0,
    device: str = "cpu",
) -> ObservedWindow:
    """Returns random tensors; the last block but one is observed, or `blocks` count from it."""
    Hk, H = heads
    q = torch.randn(B, rows, H, D) * size
    k = torch.randn(B, L, Hk, D)
    numbers = list(range(2 - L // BLOCK, 2)) if blocks is None else blocks
    first = max(0, -min(numbers))
    block = torch.tensor([first + n for n in numbers], dtype=torch.int32)
    return ObservedWindow(
        q.to(device, dtype), k.to(device, dtype), block.to(device), first, D**-0.5
    )


def check_window(x: ObservedWindow) -> None:
    """Checks that LSE and masses are those of fp64, as far as fp32 tells them apart."""
    lse = launch_index.window_lse(x.q, x.k, x.block, x.last, x.scale)
    mass = launch_index.window_mass(x.q, x.k, x.block, x.last, lse, x.scale)
    wide = (x.q.double().cpu(), x.k.double().cpu(), x.block.cpu(), x.last)
    want_lse = cpu.window_lse(*wide, x.scale)
    whole = want_lse.logsumexp(0)
    assert ((lse.cpu().logsumexp(0) - whole).abs() < LSE + ROUNDING * whole.abs()).all()
    want = cpu.window_mass(*wide, want_lse, x.scale)
    error = (mass.cpu().long() - want).abs()
    assert (error <= 1 + RELATIVE * want).all(), int(error.max())
    later = wide[2].repeat_interleave(BLOCK) > x.last
    assert not mass.cpu()[..., later].any()


def some_masses(T: int, seqlen: int, kind: str, heads: int = 2) -> Tensor:
    """Returns int32 [1, heads, T] as of a window: nothing after it, 2^30 together."""
    x = torch.rand(1, heads, T).double()
    if kind == "outliers":
        x += 30 * (torch.rand(1, heads, T) < 0.02)
    if kind == "ties":
        x = (3 * x).round()
    if kind == "one sink":
        x[..., 2] += 20 * T
    if kind == "alone":
        x = torch.zeros_like(x)
        x[..., 0] = 1
    x[..., last_block(seqlen) * BLOCK + min(seqlen, BLOCK) :] = 0
    return (x / x.sum(-1, keepdim=True).clamp(min=1e-9) * (1 << UNIT)).round().int()


def check_lines(mass: Tensor, seqlen: int, pattern: VerticalSlash, layout: Layout) -> None:
    """Checks that the kernels choose, of the same masses, what sorts choose, bit by bit."""
    T = mass.shape[-1]
    parts: tuple[list[Candidates], list[Tensor]] = ([], [])
    for rank in range(layout.world):
        token = layout.positions(T, rank).to(mass.device)
        mine, block = mass[..., token].contiguous(), (token[::BLOCK] // BLOCK).int()
        got, tile = launch_index.cut(mine, block, T, pattern)
        want, want_tile = cpu.cut(mine.cpu(), block.cpu(), T, pattern)
        assert torch.equal(tile.cpu(), want_tile)
        assert torch.equal(_by_column(got, T), _by_column(want, T))
        parts[0].append(got)
        parts[1].append(tile)
    found = Candidates(*(torch.cat(x, -1) for x in zip(*parts[0], strict=True)))
    order = layout.perm(T)[::BLOCK].argsort().to(mass.device)
    tiles = torch.cat(parts[1], -1)[..., order].contiguous()
    chosen = launch_index.select(found, tiles, seqlen, T, pattern)
    on_cpu = Candidates(*(x.cpu() for x in found))
    assert_same(chosen, cpu.select(on_cpu, tiles.cpu(), seqlen, T, pattern))


def assert_same(got: VSIndex, want: VSIndex) -> None:
    """Compares two indices, bit by bit."""
    for name in VSIndex._fields[:4]:
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name).cpu()), name


def _by_column(found: Candidates, T: int) -> Tensor:
    """Returns masses at their columns; -1 where there is no candidate."""
    table = torch.full((*found.column.shape[:2], T + 1), -1, dtype=torch.int32)
    return table.scatter(-1, found.column.cpu().long(), found.mass.cpu())[..., :T]


def budget(
    estimator: Any, recall: tuple[float, float], caps: tuple[int, int | None], **others: Any
) -> VerticalSlash:
    """Returns a pattern whose forced lines fit under its caps."""
    sink, slashes = min(4, caps[0]), min(2, caps[1] or 2)
    return VerticalSlash(*recall, *caps, sink, slashes, estimator, **others)


ONE = StripedLayout(1)


def _window(variant: Any, given: dict[str, Any], device: str) -> None:
    check_window(window(D=variant.D, dtype=dtype_of(variant), device=device, **given))


def _lines(_: Any, given: tuple[Any, ...], device: str) -> None:
    T, heads, kind, seqlen, recall, caps, gap, layout = given
    for estimator in ("residual", "independent"):
        pattern = budget(estimator, recall, caps, gap_close=gap)
        check_lines(some_masses(T, seqlen, kind, heads).to(device), seqlen, pattern, layout)


CASES = (
    # parts of one tile and of several; heads that share keys, of which some are not there
    Cases(
        ("sparse_ring.window_lse", "sparse_ring.window_mass"),
        _window,
        [{"L": 384, "heads": (1, 4)}, {"L": 1152, "heads": (1, 5)}, {"L": 640, "heads": (2, 2)}],
        [{"L": 16384 + 128, "heads": heads} for heads in ((2, 8), (1, 8), (2, 2), (1, 6))],
        emulated=("fp16-d64", "bf16-d128"),
    ),
    # tokens, heads, masses, tokens of the sequence, recall, caps, gaps that are closed, layout
    Cases(
        (
            "sparse_ring.mark_candidates",
            "sparse_ring.keep_best_columns",
            "sparse_ring.select_lines",
        ),
        _lines,
        [
            (1024, 2, "outliers", 1024, (0.5, 0.95), (4096, None), 2, ONE),
            (1024, 2, "outliers", 1021, (0.9, 0.3), (8, 3), 2, StripedLayout(2, 64)),
            (1024, 2, "ties", 1024, (0.3, 0.9), (500, None), 0, ZigZagLayout(4)),
            (1024, 2, "one sink", 200, (0.95, 0.95), (64, None), 0, ContiguousLayout(2)),
            (1024, 2, "alone", 64, (0.0, 0.0), (1, 1), 0, ONE),
            (1024, 2, "flat", 1, (1.0, 1.0), (4096, None), 0, StripedLayout(2)),
        ],
        [
            (32768, 4, kind, 32700, *limits, 1, layout)
            for kind in ("flat", "outliers", "ties", "one sink", "alone")
            for limits in (((0.5, 0.95), (4096, None)), ((0.95, 0.6), (300, 40)))
            for layout in (ONE, StripedLayout(4))
        ],
    ),
)
