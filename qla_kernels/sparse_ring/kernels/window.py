"""Parts that window_lse and window_mass share: the loading role, variants, functions on scores.

The observed queries stay in shared memory, and keys arrive tile by tile. While the tensor cores
compute one product of queries and keys, threads work on the exponentials of the product before,
also across iterations of the loop. This requires that threads only read accumulators. Therefore
`fold` and `weigh` are CUDA functions, in window.cuh.
"""

from pathlib import Path
from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.sparse_ring.shapes import BLOCK
from qla_kernels.tile import softmax
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import ONE, Role

FLOOR = -1e30  # maximum of a row that has seen no key: finite, and the row's sum is 0
HEADS = 4  # query heads of a CTA; a warpgroup has two of them, or takes two at a time
CTA_ROWS = HEADS * BLOCK  # rows of queries of a CTA
SOURCE = softmax.SOURCE + Path(__file__).with_suffix(".cuh").read_text()

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

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # barriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # indices are clamped, or guarded
}


class Part(NamedTuple):
    """What a CTA computes: rows of a unit, a batch row and key head, and a part of its keys."""

    unit: Any
    row0: Any
    first: Any  # tile of keys
    num_tiles: Any


@T.macro
def load(q, k, s, ring, part):
    """Loads rows of q [units, rows, D], once, then `num_tiles` tiles of k from `first`."""
    Hk = k.shape[2]
    row0, b, head = part.row0, part.unit // Hk, part.unit % Hk
    first, num_tiles = part.first, part.num_tiles
    rows, keys = s.q.shape[1], s.k.shape[1]
    for n in T.unroll(s.q.shape[0]):
        T.tma_copy(
            q[part.unit, row0 + n * rows : row0 + (n + 1) * rows, :], s.q[n, :, :], barrier=ring.q
        )
    if T.shuffle_elect(32):
        T.barrier_arrive(ring.q)
    for i in rolled(num_tiles):
        key0 = (first + i) * keys
        ring.k.acquire(i)
        T.tma_copy(
            k[b, key0 : key0 + keys, head, :], s.k[ring.k.slot(i), :, :], barrier=ring.k.barrier(i)
        )
        if T.shuffle_elect(32):
            ring.k.commit(i)


def fold(r_s: Any, m: Any, l: Any, b0: Any, b1: Any, last: Any, scale2: Any) -> Any:
    """Adds scores to m and l, the maximum and the sum of exponentials of this thread's part.

    A thread has a quarter of each of two rows. b0 and b1 are the blocks of the tile's keys.
    """
    return T.call_extern("handle", "qla::fold", r_s.data, m.data, l.data, b0, b1, last, scale2)


def fold_quad(m: Any, l: Any, scale2: Any) -> Any:
    """Combines m and l of the four threads that share a row; each gets those of the whole row."""
    return T.call_extern("handle", "qla::fold_quad", m.data, l.data, scale2)


def weigh(r_s: Any, lse2: Any, b: Any, last: Any, scale2: Any) -> Any:
    """Returns the sum of 2^(score - LSE) over the queries of one head, for one key.

    window.cuh says which head and key a lane gets.
    """
    return T.call_extern("float32", "qla::weigh", r_s.data, lse2, b, last, scale2)
