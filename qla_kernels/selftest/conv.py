"""The cases of the causal convolution's kernels: a small tree, with a chain of short nodes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.cpu import reference
from qla_kernels.selftest.cases import Result, error_of, label

LENGTHS = (70, 33, 1, 2, 5, 40)  # tokens of each node
PARENTS = (-1, 0, 0, 2, 3, -1)
CONV_CHANNELS, CONV_WIDTH = 136, 4
LIMITS = ((torch.bfloat16, 3e-3), (torch.float16, 4e-4))


class _Runs(NamedTuple):
    """Results on the GPU, and what they should be."""

    y: tuple[Tensor, Tensor]
    dx: tuple[Tensor, Tensor]
    dweight: tuple[Tensor, Tensor]
    dbias: tuple[Tensor, Tensor]
    shared: Tensor  # tokens that other nodes read


def _run(dtype: torch.dtype) -> _Runs:
    from qla_kernels.conv import ops
    from qla_kernels.dualkv import SharedLayout
    from qla_kernels.hybrid.conv_tables import prepare

    layout = SharedLayout.from_forest(LENGTHS, PARENTS)
    tables = prepare(layout, CONV_WIDTH)
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=random).to(dtype)

    x, dy = draw(2, layout.num_tokens, CONV_CHANNELS)
    weight, bias = draw(CONV_CHANNELS, CONV_WIDTH), draw(CONV_CHANNELS)
    exact = [t.double() for t in (x, weight, bias)]
    conv = reference().conv
    y = conv.forward(*exact, True, *tables[:2])
    want = conv.backward(dy.double(), *exact, True, *tables[:2])
    on_gpu = [t.cuda() for t in (x[None], weight.float(), bias.float())]
    there = [table.cuda() for table in tables]
    got_y = ops.conv_fwd(*on_gpu, there, True)
    got = ops.ConvBackward(*ops.conv_bwd(dy[None].cuda(), *on_gpu, there, True))
    assert got.dbias is not None, "there is a bias"
    pairs = (got_y[0], y), (got.dx[0], want.dx), (got.dweight, want.dweight)
    return _Runs(*pairs, (got.dbias, want.dbias), tables[3].long())


def _fwd() -> list[Result]:
    return [Result(label("conv.fwd", d), error_of(*_run(d).y), limit) for d, limit in LIMITS]


def _bwd() -> list[Result]:
    return [Result(label("conv.bwd", d), error_of(*_run(d).dx), limit) for d, limit in LIMITS]


def _join_parts() -> list[Result]:
    results = []
    for dtype, limit in LIMITS:
        runs = _run(dtype)
        error = error_of(*(dx[runs.shared.to(dx.device)] for dx in runs.dx))
        results.append(Result(label("conv.join_parts", dtype), error, limit))
    return results


def _weight_sums() -> list[Result]:
    runs = _run(torch.bfloat16)
    return [
        Result("conv.weight_sums dweight", error_of(*runs.dweight), 1e-5),
        Result("conv.weight_sums dbias", error_of(*runs.dbias), 1e-5),
    ]


KERNELS: dict[str, Callable[[], list[Result]]] = {
    "conv.fwd": _fwd,
    "conv.bwd": _bwd,
    "conv.join_parts": _join_parts,
    "conv.weight_sums": _weight_sums,
}
