"""What the kernels of the observed window share: its queries stay, keys come tile by tile."""

from typing import NamedTuple

import tilelang.language as T

from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import ONE, Role

FLOOR = -1e30  # a row that has seen nothing: its maximum is finite, its sum 0
ROW = T.GemmWarpPolicy.FullRow

LOADING = (
    Role(
        "load",
        warps=1,
        regs=24,
        waits=("k_free",),
        signals=(("q_full", ONE), ("k_full", ONE)),
        computes="Q, K",
        uses=("tma_load",),
    ),
    Role("spare", warps=3, regs=24, computes="fills the warpgroup"),
)


class Variant(NamedTuple):
    dtype: str
    D: int


VARIANTS = tuple(Variant(dtype, D) for dtype in ("bfloat16", "float16") for D in (128, 64))


@T.macro
def load(q, k, s_q, s_k, q_full, ring, unit, row0, b, head, first, num_tiles):
    """Rows of q [units, rows, D] once, in the pieces of s_q; tiles of k from `first` on."""
    rows, keys = s_q.shape[1], s_k.shape[1]
    for n in T.unroll(s_q.shape[0]):
        T.tma_copy(
            q[unit, row0 + n * rows : row0 + (n + 1) * rows, :], s_q[n, :, :], barrier=q_full
        )
    if T.shuffle_elect(32):
        T.barrier_arrive(q_full)
    for i in rolled(num_tiles):
        key0 = (first + i) * keys
        ring.acquire(i)
        T.tma_copy(
            k[b, key0 : key0 + keys, head, :], s_k[ring.slot(i), :, :], barrier=ring.barrier(i)
        )
        if T.shuffle_elect(32):
            ring.commit(i)
