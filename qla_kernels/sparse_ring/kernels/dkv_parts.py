"""Parts that bwd_dkv and bwd_dkv_columns share: the gradients of 64 keys by one warpgroup.

A tile is two halves of 64 keys. Keys are rows, so S^T and dP^T are [64 keys, 64 queries], and P^T
and dS^T are left operands in the registers where they were computed. The tensor cores compute four
products a block of queries, and no result goes back to shared memory:

    S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q

A warp loads blocks of queries for both halves. With each block it sends a code for each half that
says which pairs see each other, in the codes of walk.py; a mask of COLUMNS has a bit for each key
of the half.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.attn.kernels.delta import DELTA, LSE2
from qla_kernels.sparse_ring.kernels.walk import COLUMNS, END, HALVES, TRIANGLE, UNSEEN
from qla_kernels.sparse_ring.shapes import BLOCK
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.softmax_backward import clear_hidden, ds_from_dp, probs_from_lse

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warpgroups
    "tl.disable_safe_memory_legalize": True,  # walks stay in their tables and in the shard
}


class Variant(NamedTuple):
    dtype: str  # of q, k, v and do
    D: int

    @property
    def slots(self) -> int:
        """Slots for blocks of queries: they fit next to K and V, and hide the latency of loads."""
        return 512 // self.D


VARIANTS = tuple(Variant(dtype, D) for dtype in ("bfloat16", "float16") for D in (128, 64))


def schedule(variant: Variant, words: int, *serving: Role) -> Schedule:
    """Returns the Schedule of a variant.

    `words` is the number of words in the tile `seen` for each half: 1 for codes, or SEEN for codes
    with masks of COLUMNS. `serving` are the roles of the third warpgroup.
    """
    keys = Tile((HALVES, BLOCK, variant.D), variant.dtype)
    queries = Tile((variant.slots, BLOCK, variant.D), variant.dtype)
    return Schedule(
        roles=(
            Role(
                "grads",
                warps=4 * HALVES,
                regs=240,
                waits=("keys_full", "q_full"),
                signals=("q_free",),
                computes="P^T, dS^T; dV, dK",
                uses=("wgmma",),
            ),
            *serving,
        ),
        rings={"keys": 1, "q": variant.slots},
        tiles={
            "k": keys,
            "v": keys,
            "q": queries,
            "do": queries,
            "rows": Tile((variant.slots, 2, BLOCK), "float32"),  # lse2 and delta
            "seen": Tile((variant.slots, HALVES, words), "int32"),
        },
    )


@T.macro
def load_keys(k, v, s, ring, b, row0, head):
    for half in T.unroll(HALVES):
        rows = slice(row0 + half * BLOCK, row0 + (half + 1) * BLOCK)
        T.tma_copy(k[b, rows, head, :], s.k[half, :, :], barrier=ring.keys)
        T.tma_copy(v[b, rows, head, :], s.v[half, :, :], barrier=ring.keys)
    if T.shuffle_elect(32):
        T.barrier_arrive(ring.keys)


@T.macro
def put_queries(x, s, ring, i, b, row, head):
    """Loads the block of queries of step i, and does not commit its slot."""
    slot = ring.q.slot(i)
    rows = slice(row, row + BLOCK)
    ring.q.acquire(i)
    T.tma_copy(x.q[b, rows, head, :], s.q[slot, :, :], barrier=ring.q.barrier(i))
    T.tma_copy(x.do[b, rows, head, :], s.do[slot, :, :], barrier=ring.q.barrier(i))
    T.tma_copy(x.lse2[b, head, rows], s.rows[slot, LSE2, :], barrier=ring.q.barrier(i))
    T.tma_copy(x.delta[b, head, rows], s.rows[slot, DELTA, :], barrier=ring.q.barrier(i))


@T.macro
def put_seen(s, ring, i, what, low=0, high=0):
    """Writes the codes of step i: of half 0 by lane 0, of half 1 by lane 1; the warp commits."""
    lane = T.get_thread_binding() % 32
    if lane < HALVES:
        s.seen[ring.q.slot(i), lane, 0] = what
        if s.seen.shape[2] > 1:
            s.seen[ring.q.slot(i), lane, 1] = low
            s.seen[ring.q.slot(i), lane, 2] = high
    ring.q.commit(i)


@T.macro
def hide(r_p, s, slot, half, what):
    if s.seen.shape[2] > 1:
        seen = s.seen
        if T.any_sync(what == COLUMNS) != 0:
            clear_hidden(
                r_p, lambda key, query: (seen[slot, half, 1 + key // 32] >> key % 32) & 1 == 0
            )
    else:
        if T.any_sync(what == TRIANGLE) != 0:
            clear_hidden(r_p, lambda key, query: query < key)


@T.macro
def gradients(s, ring, w, r_dk, r_dv, scale, scale2, variant):
    """Sets r_dk and r_dv to dK and dV of half w, by all steps up to END.

    The shuffle and the votes tell ptxas that all lanes have the same value. It then keeps the
    descriptors in uniform registers, and products stay asynchronous.
    """
    r_s = T.alloc_fragment((BLOCK, BLOCK), "float32")
    r_dp = T.alloc_fragment((BLOCK, BLOCK), "float32")
    r_p = T.alloc_fragment((BLOCK, BLOCK), variant.dtype)
    r_ds = T.alloc_fragment((BLOCK, BLOCK), variant.dtype)
    i, what, half = (T.alloc_var("int32") for _ in range(3))
    half = T.shfl_sync(w, 0)
    T.clear(r_dk)
    T.clear(r_dv)
    T.barrier_wait(ring.keys, 0)
    i = 0
    ring.q.wait(i)
    what = s.seen[0, half, 0]
    while T.any_sync(what != END) != 0:
        slot = ring.q.slot(i)
        if T.any_sync(what != UNSEEN) != 0:
            T.wgmma_gemm(s.k[half, :, :], s.q[slot, :, :], r_s, transpose_B=True, clear_accum=True)
            T.wgmma_gemm(
                s.v[half, :, :], s.do[slot, :, :], r_dp, transpose_B=True, clear_accum=True
            )
            T.wait_wgmma(1)
            probs_from_lse(r_s, lambda key, query: s.rows[slot, LSE2, query], scale2)
            hide(r_s, s, slot, half, what)
            T.copy(r_s, r_p)
            T.wait_wgmma(0)
            ds_from_dp(r_dp, r_s, lambda key, query: s.rows[slot, DELTA, query])
            T.copy(r_dp, r_ds)
            T.wgmma_gemm(r_p, s.do[slot, :, :], r_dv)
            T.wgmma_gemm(r_ds, s.q[slot, :, :], r_dk)
            T.wait_wgmma(0)
        ring.q.release(i)
        i += 1
        ring.q.wait(i)
        what = s.seen[ring.q.slot(i), half, 0]
    for key, e in T.Parallel(BLOCK, variant.D):
        r_dk[key, e] *= scale
