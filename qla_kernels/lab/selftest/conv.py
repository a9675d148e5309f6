"""The cases of the causal convolution's kernels: a small tree, with a chain of short nodes."""

from typing import Any

import torch

from qla_kernels.conv import launch
from qla_kernels.conv.ops import conv_prefill
from qla_kernels.dualkv import SharedLayout
from qla_kernels.hybrid.conv_tables import prepare
from qla_kernels.lab.selftest.cases import Cases, dtype_of
from qla_kernels.lab.selftest.compare import assert_close
from qla_kernels.runtime.cpu import reference

TREE = (70, 33, 1, 2, 5, 40), (-1, 0, 0, 2, 3, -1)  # tokens and parent of each node
LEAVES = (6, *[3] * 33), (-1, *[0] * 33)

# Sums are in fp32 and each result is rounded once
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
WEIGHTS = 1e-5  # fp32


def _conv(variant: Any, given: tuple[Any, int, tuple[int, int]], device: str) -> None:
    """Checks results and gradients of a tree, with a bias and silu, against fp64."""
    (lengths, parents), channels, heads = given
    layout, dtype = SharedLayout.from_forest(lengths, parents), dtype_of(variant)
    tables = prepare(layout, variant.W)
    x, dy = torch.randn(2, layout.num_tokens, channels).to(dtype)
    weight, bias = torch.randn(channels, variant.W), torch.randn(channels)
    exact = [t.double() for t in (x, weight, bias)]
    conv = reference().conv
    y = conv.forward(*exact, True, *tables[:2], heads)
    want = conv.backward(dy.double(), *exact, True, *tables[:2], heads)
    given_x, given_dy, given_weight, given_bias = (
        t.to(device) for t in (x[None], dy[None], weight, bias)
    )
    call = given_x, given_weight, given_bias, [t.to(device) for t in tables], True, *heads
    got_y = launch.conv_fwd(*call)
    first, *others = given_dy.split([8, 16, channels - 24], 2)
    got = launch.conv_bwd(first, *call, *others)
    assert got.dbias is not None, "there is a bias"
    assert_close("y", got_y[0].cpu(), y, ROUNDING[dtype])
    assert_close("dx", got.dx[0].cpu(), want.dx, ROUNDING[dtype])
    assert_close("dweight", got.dweight.cpu(), want.dweight, WEIGHTS)
    assert_close("dbias", got.dbias.cpu(), want.dbias, WEIGHTS)


def _update(
    variant: Any, given: tuple[int, list[int] | None, int, bool, tuple[int, int]], device: str
) -> None:
    """Checks a token of each sequence against fp64, in a pool between other data."""
    channels, slots, null_slot, by_channels, heads = given
    count, dtype, places = 3 if slots is None else len(slots), dtype_of(variant), variant.W - 1
    x = torch.randn(count, channels + 8).to(dtype)[:, :channels]
    weight, bias = torch.randn(channels, variant.W).to(dtype), torch.randn(channels)
    room = torch.randn(7, 8 + channels * (places + 1)).to(dtype)
    room = torch.unflatten(room[:, 8:], 1, (channels, -1) if by_channels else (-1, channels))
    pool = room if by_channels else room.mT  # [slots, channels, W]
    before = pool.clone()
    indices = None if slots is None else torch.tensor(slots)
    live = [n for n in range(count) if slots is None or null_slot < slots[n] < len(pool)]
    used = live if slots is None else [slots[n] for n in live]
    exact = (t.double() for t in (x[live], before[used][..., :places], weight, bias))
    want, after = reference().conv.update(*exact, True, heads)
    on_device = room.to(device)
    rows = on_device if by_channels else on_device.mT
    y = torch.full((count, channels), torch.nan, dtype=dtype, device=device)
    x, weight, bias = (t.to(device) for t in (x, weight, bias))
    indices = None if indices is None else indices.to(device)
    launch.conv_update(x, rows, weight, bias, indices, null_slot, True, y, *heads)
    assert_close("y", y.cpu()[live], want, ROUNDING[dtype])
    padding = [n for n in range(count) if n not in live]
    assert not y.cpu()[padding].any(), "rows of padding are not 0"
    before[used, :, :places] = after.to(dtype)
    assert torch.equal(rows.cpu(), before), "the pool is not as it should be"


def _prefill(
    variant: Any, given: tuple[list[int], int, bool, tuple[int, int]], device: str
) -> None:
    """Checks packed sequences that go on from a pool, or start anew, and keep tokens on the way."""
    lengths, channels, by_channels, heads = given
    W, count, dtype = variant.W, len(lengths), dtype_of(variant)
    x = torch.randn(sum(lengths) + 3, channels + 8).to(dtype)[:, :channels]  # 3 of no sequence
    weight, bias = torch.randn(channels, W).to(dtype), torch.randn(channels)
    room = torch.randn(2 * count + 3, channels, W) if by_channels else None
    pool = room if room is not None else torch.randn(2 * count + 3, W, channels).mT
    pool, places = pool.to(dtype), torch.randperm(2 * count + 2).int() + 1
    ends, kept = places[:count], places[count : 2 * count]
    starts = torch.where(torch.arange(count) % 3 < 2, ends, 0).int()
    offsets = torch.tensor([n * (i % 3) // 2 for i, n in enumerate(lengths)]).int()
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    tables = bounds, starts, ends, offsets, kept
    after = pool.double()
    exact: Any = (x.double(), after, weight.double(), bias.double(), *tables, 0, True, *heads)
    want, rows = conv_prefill(*exact), pool.to(device)
    placed = (t.to(device) for t in (weight, bias, *tables))
    call: Any = (x.to(device), rows, *placed, 0, True, *heads)
    y = launch.conv_prefill(*call)
    assert_close("y", y.cpu(), want, ROUNDING[dtype])
    assert torch.equal(rows.cpu().double(), after), "the pool is not as it should be"


CASES = (
    Cases(
        ("conv.fwd", "conv.bwd", "conv.join_parts", "conv.weight_sums"),
        _conv,
        [(TREE, 136, (0, 0)), (LEAVES, 40, (0, 0)), (TREE, 136, (2, 64)), (TREE, 264, (1, 192))],
        [(((5000, *[700] * 40), (-1, *[0] * 40)), 1024, heads) for heads in ((0, 0), (6, 128))],
        emulated=("bf16-w4",),  # tests/emulated/test_conv.py has every variant
    ),
    Cases(
        ("conv.prefill",),
        _prefill,
        [
            ([1, 1, 2, 40, 3, 0, 9, 70], 40, False, (0, 0)),
            ([17, 1, 2], 136, True, (2, 16)),
            ([2] * 20, 264, False, (2, 128)),
            ([130], 168, False, (1, 160)),
        ],
        [([5000, 16, 1, 300, 64], 8192, by_channels, (32, 128)) for by_channels in (False, True)],
        emulated=("bf16-w4",),  # tests/emulated/test_conv.py has every variant
    ),
    Cases(
        ("conv.update",),
        _update,
        [
            (channels, slots, null_slot, by_channels, heads)
            for channels, slots, null_slot, heads in (
                (520, [3, -1, 0, 6, 9], -1, (0, 0)),
                (40, [0, 5, 2, 0], 0, (0, 0)),
                (40, None, -1, (0, 0)),
                (520, [3, -1, 0, 6, 9], -1, (4, 128)),
                (136, [0, 5, 2, 0], 0, (1, 96)),
                (264, None, -1, (1, 256)),
            )
            for by_channels in (False, True)
        ],
        emulated=("bf16-w4", "fp16-w3"),
    ),
)
