"""What the convolution's kernels must produce: shared by the emulated and the device tier.

Sums are in fp32 and each result is rounded once, so its error is half a unit in the last place.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.conv import ops
from qla_kernels.conv.ops import ConvBackward
from qla_kernels.hybrid.conv_tables import tree_tables
from reference import conv
from tests.compare import FP32, assert_close
from tests.dualkv_inputs import Forest

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: FP32}

Forward = Callable[..., Tensor]
Backward = Callable[..., ConvBackward]


class ConvCase(NamedTuple):
    """The arguments of conv_fwd, and dy."""

    x: Tensor  # [B, T, C]
    weight: Tensor
    bias: Tensor | None
    tables: list[Tensor]
    silu: bool
    norm_heads: int
    norm_size: int
    dy: Tensor


def case(
    of: Forest | list[int] | tuple[int, int],
    where: str,
    channels: int = 40,
    width: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    parameters: torch.dtype = torch.bfloat16,
    bias: bool = True,
    silu: bool = True,
    padding: int = 0,
    bounds: torch.dtype = torch.int32,
    projection: int = 0,
    heads: tuple[int, int] = (0, 0),
) -> ConvCase:
    """A tree, packed sequences of some lengths, or (B, T) dense rows.

    `padding` tokens behind the last sequence are NaN. x is a slice of a tensor with `projection`
    more channels on either side, which are NaN.
    """
    batch, tables = 1, []
    if isinstance(of, Forest):
        tokens = len(of.tout)
        tables = list(tree_tables(of.nodes, tokens, width))
    elif isinstance(of, list):
        tokens = sum(of) + padding
        tables = [torch.tensor([0, *of]).cumsum(0).to(bounds)]
    else:
        batch, tokens = of
    x = torch.full((batch, tokens, channels + 2 * projection), torch.nan, dtype=dtype)
    x = x[..., projection : projection + channels]
    dy = torch.full((batch, tokens, channels), torch.nan, dtype=dtype)
    live = tokens - padding
    x[:, :live] = torch.randn(batch, live, channels)
    dy[:, :live] = torch.randn(batch, live, channels)
    weight = torch.randn(channels, width).to(parameters)
    b = torch.randn(channels).to(parameters) if bias else None
    strided = x.to(where) if not projection else on(x, where)
    tables = [table.to(where) for table in tables]
    return ConvCase(strided, weight.to(where), None if b is None else b.to(where), tables, silu,
                    *heads, dy.to(where))  # fmt: skip


def on(x: Tensor, where: str) -> Tensor:
    """A copy that keeps the strides and what lies between."""
    if where == "cpu":
        return x
    whole = x._base if x._base is not None else x
    return whole.to(where).as_strided(x.shape, x.stride(), x.storage_offset())


def exact(x: ConvCase) -> tuple[Tensor, Any]:
    """y and the gradients in fp64, on the CPU, from what the kernels are given."""
    wide = [None if t is None else t.cpu().double() for t in (x.x, x.weight, x.bias, x.dy)]
    flat, weight, bias, dy = wide
    B, T, C = x.x.shape
    nodes = [t.cpu() for t in x.tables[:2]] or [torch.arange(B + 1) * T]
    flat, dy = flat.reshape(-1, C), dy.reshape(-1, C)
    heads = x.norm_heads, x.norm_size
    y = conv.forward(flat, weight, bias, x.silu, *nodes, heads=heads)
    return y.view(B, T, C), conv.backward(dy, flat, weight, bias, x.silu, *nodes, heads=heads)


def check(x: ConvCase, fwd: Forward = ops.conv_fwd, bwd: Backward = ops.conv_bwd) -> None:
    """Both directions against fp64."""
    *call, dy = x
    y, done = fwd(*call), bwd(dy, *call)
    want, grads = exact(x)
    assert y.is_contiguous()
    assert done.dx.is_contiguous()
    assert_close("y", y.cpu(), want, ROUNDING[y.dtype])
    live = want.shape[1] if x.x.shape[0] > 1 or not x.tables else int(x.tables[0][-1])
    assert not y[:, live:].any(), "rows of padding tokens are not 0"
    assert not done.dx[:, live:].any(), "gradients of padding tokens are not 0"
    assert_close("dx", done.dx.cpu(), grads.dx.view(want.shape), ROUNDING[y.dtype])
    assert_close("dweight", done.dweight.cpu(), grads.dweight, ROUNDING[x.weight.dtype])
    assert (done.dbias is None) == (x.bias is None)
    if done.dbias is not None:
        assert_close("dbias", done.dbias.cpu(), grads.dbias, ROUNDING[x.bias.dtype])


def check_in_sections(x: ConvCase, sizes: list[int], bwd: Backward = ops.conv_bwd) -> None:
    """The gradient of y in two or three tensors gives the same bits as in one."""
    *call, dy = x
    first, *others = (part.contiguous() for part in dy.split(sizes, 2))
    names = ("dy2", "dy3")[: len(others)]
    got = bwd(first, *call, **dict(zip(names, others, strict=True)))
    for a, b in zip(got, bwd(dy, *call), strict=True):
        assert a is b is None or torch.equal(a, b)


def check_repeats(
    x: ConvCase, fwd: Forward = ops.conv_fwd, bwd: Backward = ops.conv_bwd, times: int = 2
) -> None:
    """The same bits each time."""
    *call, dy = x
    want = [fwd(*call), *bwd(dy, *call)]
    for _ in range(times - 1):
        for a, b in zip([fwd(*call), *bwd(dy, *call)], want, strict=True):
            assert a is b is None or torch.equal(a, b)
