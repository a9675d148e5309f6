"""Cases of each kernel that builds an index: two heads with one key head, 640 keys."""

from collections.abc import Callable

import torch
from torch import Tensor

from qla_kernels.selftest.cases import Result, error_of, label

T, H, D = 640, 2, 128
LAST = T // 64 - 1
LIMIT = 2e-5  # fp32, of the exponents of scores around 20


def _inputs() -> tuple[Tensor, Tensor]:
    """Returns q [1, 64, H, D] and k [1, T, 1, D], fp64 with values that bf16 can represent."""
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, h, D, generator=random) for n, h in ((64, H), (T, 1)))
    return q.bfloat16().double(), k.bfloat16().double()


def _expected() -> tuple[Tensor, Tensor]:
    """Returns the CPU path's LSEs of the parts of the keys, and its masses, in fp64."""
    from qla_kernels.sparse_ring import cpu

    window = (*_inputs(), torch.arange(T // 64), LAST)
    lse = cpu.window_lse(*window, D**-0.5)
    return lse, cpu.window_mass(*window, lse, D**-0.5)


def _on_gpu(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, int]:
    q, k = (x.to("cuda", dtype) for x in _inputs())
    return q, k, torch.arange(T // 64, dtype=torch.int32, device="cuda"), LAST


def _window_lse() -> list[Result]:
    from qla_kernels.sparse_ring import launch_index

    want, results = _expected()[0], []
    for dtype in (torch.bfloat16, torch.float16):
        got = launch_index.window_lse(*_on_gpu(dtype), D**-0.5)
        name = label("sparse_ring.window_lse", dtype)
        results.append(Result(name, error_of(got.logsumexp(0), want.logsumexp(0)), LIMIT))
    return results


def _window_mass() -> list[Result]:
    from qla_kernels.sparse_ring import launch_index

    (lse, want), results = _expected(), []
    for dtype in (torch.bfloat16, torch.float16):
        got = launch_index.window_mass(*_on_gpu(dtype), lse.float().cuda(), D**-0.5)
        name = label("sparse_ring.window_mass", dtype)
        results.append(Result(name, error_of(got, want.double()), LIMIT))
    return results


def _lines() -> list[Result]:
    """Returns the results of the kernels behind the masses: integers, so no error is allowed."""
    from qla_kernels.sparse_ring import VerticalSlash, cpu, launch_index

    pattern, mass = VerticalSlash(0.3, 0.6), _expected()[1]
    block = torch.arange(T // 64, dtype=torch.int32)
    found, tile = launch_index.cut(mass.cuda(), block.cuda(), T, pattern)
    want_found, want_tile = cpu.cut(mass, block, T, pattern)
    got = launch_index.select(found, tile, T, T, pattern)
    want = cpu.select(type(found)(*(x.cpu() for x in found)), want_tile, T, T, pattern)
    results = [Result("sparse_ring.mark_candidates", error_of(tile, want_tile.double()), 0)]
    columns, want_columns = (x.column.sort(-1).values for x in (found, want_found))
    results.append(
        Result("sparse_ring.keep_best_columns", error_of(columns, want_columns.double()), 0)
    )
    for name in ("v_idx", "v_cnt", "d_bits"):
        error = error_of(getattr(got, name), getattr(want, name).double())
        results.append(Result(f"sparse_ring.select_lines {name}", error, 0))
    return results


KERNELS: dict[str, Callable[[], list[Result]]] = {
    "sparse_ring.window_lse": _window_lse,
    "sparse_ring.window_mass": _window_mass,
    "sparse_ring.mark_candidates": lambda: _lines()[:1],
    "sparse_ring.keep_best_columns": lambda: _lines()[1:2],
    "sparse_ring.select_lines": lambda: _lines()[2:],
}
