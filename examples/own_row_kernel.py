"""A kernel that memory bounds: each row of x divided by the root of the mean of its squares.

One role, without barriers: threads load a row, add up its squares together, and store it.

    python -m qla_kernels inspect examples/own_row_kernel.py
    python -m qla_kernels emulate examples/own_row_kernel.py
"""

from typing import NamedTuple

import torch

import qla_kernels.tile.language as T
from qla_kernels.lab.emulator import Case
from qla_kernels.tile.schedule import Role, Schedule

ROWS = 8  # of a CTA: 2 or 4 loads of 16 bytes a thread


class Variant(NamedTuple):
    dtype: str
    width: int  # of a row: it is divided among threads at compile time


VARIANTS = (Variant("bfloat16", 512), Variant("float16", 1024))
PASS_CONFIGS: dict[str, object] = {}


def schedule(variant: Variant) -> Schedule:
    # 4 CTAs share an SM: while one waits for memory, others compute
    role = Role("rows", warps=8, regs=64, computes="y")
    # shared memory is that of reduce_sum: 0 if a row stays in a warp; inspect says the number
    return Schedule(roles=(role,), smem_bytes=1024, ctas_per_sm=4)


def build(variant: Variant):
    width, rows = variant.width, T.dynamic("rows")

    @T.prim_func
    def own_row_kernel(
        x: T.Tensor((rows, width), variant.dtype), y: T.Tensor((rows, width), variant.dtype)
    ):
        with T.Kernel(T.ceildiv(rows, ROWS), threads=schedule(variant).threads) as block:
            r_x = T.alloc_fragment((ROWS, width), "float32")
            r_squares = T.alloc_fragment((ROWS, width), "float32")
            r_sum = T.alloc_fragment((ROWS,), "float32")
            T.copy(x[block * ROWS : (block + 1) * ROWS, :], r_x)  # rows past the end are 0
            for i, j in T.Parallel(ROWS, width):
                r_squares[i, j] = r_x[i, j] * r_x[i, j]
            T.reduce_sum(r_squares, r_sum, dim=1)
            for i, j in T.Parallel(ROWS, width):
                r_x[i, j] = r_x[i, j] * T.rsqrt(r_sum[i] / width + 1e-6)
            T.copy(r_x, y[block * ROWS : (block + 1) * ROWS, :])  # and are not stored

    return own_row_kernel


def case(variant: Variant) -> Case:
    """Three CTAs, the last of which has five rows."""
    dtype = getattr(torch, variant.dtype)
    x = torch.randn(21, variant.width).to(dtype)
    y = torch.full_like(x, torch.nan)
    wide = x.double()
    half_a_step = {"bfloat16": 2**-9, "float16": 2**-12}[variant.dtype]
    want = wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    return Case((x, y), {"y": want}, tolerance=half_a_step)


if __name__ == "__main__":
    from qla_kernels.lab.emulator.command import main

    raise SystemExit(main([__file__]))
