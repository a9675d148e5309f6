"""A kernel of one's own: C = A B^T, of which one warp loads the tiles that a warpgroup multiplies.

docs/kernels.md walks through this file. Neither command needs a GPU:

    python -m qla_kernels inspect examples/own_kernel.py     compares machine code with the schedule
    python -m qla_kernels emulate examples/own_kernel.py    compares numbers, in six orders

Steps (numbers appear again in the roles); a CTA makes 64 rows and 64 columns of C:
    1 load      64 columns of 64 rows of A and of B
    2 multiply  the product of both, added up
    3 multiply  C, by one store
"""

from typing import NamedTuple

import torch

import qla_kernels.tile.language as T
from qla_kernels.lab.emulator import Case
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Named, Role, Schedule, Tile
from qla_kernels.tile.tiles import tiles

TILE = 64


class Variant(NamedTuple):
    dtype: str  # of A, B and C


VARIANTS = (Variant("bfloat16"), Variant("float16"))

PASS_CONFIGS = {
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
}


def schedule(variant: Variant) -> Schedule:
    slots = 4
    return Schedule(
        roles=(
            Role(
                "multiply",
                warps=4,
                regs=160,
                waits=("ab_full",),
                signals=("ab_free",),
                computes="C",
                uses=("wgmma", "tma_store"),
            ),
            Role(
                "load",
                warps=1,
                regs=40,
                waits=("ab_free",),
                signals=("ab_full",),
                computes="tiles of A and B",
                uses=("tma_load",),
            ),
            Role("padding", warps=3, regs=40, computes="nothing: fills up the warpgroup"),
        ),
        rings={"ab": slots},
        named={"staged": Named(WARPGROUP_THREADS)},
        tiles={
            "a": Tile((slots, TILE, TILE), variant.dtype),
            "b": Tile((slots, TILE, TILE), variant.dtype),
            "c": Tile((TILE, TILE), variant.dtype),
        },
    )


@T.macro
def fetch(x, row, k, shared, ab, i):
    T.tma_copy(x[row : row + TILE, k : k + TILE], shared[ab.slot(i), :, :], barrier=ab.barrier(i))


@T.macro
def load(a, b, s, ab, steps, row, column):
    for i in T.serial(steps):
        ab.acquire(i)
        fetch(a, row, i * TILE, s.a, ab, i)  # 1
        fetch(b, column, i * TILE, s.b, ab, i)
        ab.commit(i)


@T.macro
def multiply(c, s, ab, steps, row, column, staged):
    r_c = T.alloc_fragment((TILE, TILE), "float32")
    T.clear(r_c)
    for i in T.serial(steps):
        ab.wait(i)
        slot = ab.slot(i)
        T.wgmma_gemm(s.a[slot, :, :], s.b[slot, :, :], r_c, transpose_B=True)  # 2
        T.wait_wgmma(0)  # the products read the slot until here
        ab.release(i)
    T.copy(r_c, s.c)
    T.fence_proxy_async()  # s.c: written by threads, read by TMA
    staged.sync()
    if T.get_thread_binding() < 32:
        T.tma_copy(s.c, c[row : row + TILE, column : column + TILE])  # 3
        T.tma_store_wait(0)


def build(variant: Variant):
    plan = schedule(variant)
    m, n, k = T.dynamic("m, n, k")

    @T.prim_func
    def own_kernel(
        a: T.Tensor((m, k), variant.dtype),
        b: T.Tensor((n, k), variant.dtype),
        c: T.Tensor((m, n), variant.dtype),
    ):
        with T.Kernel(T.ceildiv(n, TILE), T.ceildiv(m, TILE), threads=plan.threads) as (bx, by):
            s, ring = tiles(plan), rings(plan)
            steps = T.ceildiv(k, TILE)
            tx = T.get_thread_binding()
            if tx < plan.end("multiply"):
                T.set_max_nreg(plan.role("multiply").regs, 1)
                staged = NamedBarrier(plan, "staged")
                multiply(c, s, ring.ab, steps, by * TILE, bx * TILE, staged)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    load(a, b, s, ring.ab, steps, by * TILE, bx * TILE)

    return own_kernel


def case(variant: Variant) -> Case:
    """A launch with tiles that stick out of all three tensors, and more steps than slots."""
    dtype = getattr(torch, variant.dtype)
    a, b = torch.randn(150, 456).to(dtype), torch.randn(72, 456).to(dtype)
    c = torch.full((150, 72), torch.nan, dtype=dtype)
    half_a_step = {"bfloat16": 2**-9, "float16": 2**-12}[variant.dtype]  # of the last place of C
    return Case((a, b, c), {"c": a.double() @ b.double().T}, tolerance=half_a_step)


if __name__ == "__main__":
    from qla_kernels.lab.emulator.command import main

    raise SystemExit(main([__file__]))
