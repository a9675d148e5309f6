"""What the warpgroups of chunk_grads share, and the warps that bring it.

chunk_grads states the maths and what each step is for, under the numbers used here.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from qla_kernels.tile.loops import rolled
from qla_kernels.tile.mask import clear_tail
from qla_kernels.tile.math import CHUNK, LOG2E
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import ONE, Role

# rows of a gate slot; gated_tiles.cuh reads the first three
GATE_ROWS = 7
GAMMA, BETA, FALL, E, BETA_E, SCALE_E, D = range(GATE_ROWS)

# Rows of a value head's sums, a number a token. The column sums of dP o P and of F o K K^T come in
# one row a warp, which holds nothing right of the warp's own rows.
SUM_ROWS = 14
Y_W = 0  # <Y, W>
OF_Q = 1  # <Q, dQi> and the row sums of dP o P
OF_K = 2  # <K, dKu> and the row sums of F o K K^T
K_DKI = 3  # <K, dKi>
E_KK = 4  # row sums of e^(gamma_i - gamma_j) E o K K^T
STATE = 5  # e^gamma_last <dS, S0>, a number a warp
COLUMNS_Q, COLUMNS_K = 6, 10


class Tiles(NamedTuple):
    """Shared memory. Loaded tiles have slots; the others are worked on in place."""

    q: Any  # [slots, 64, K]
    k: Any  # [slots, 64, K]
    v: Any  # [slots, 64, V] v, then beta W, then dV
    do: Any  # [slots, 64, V]
    a: Any  # [slots, 64, 64]
    h: Any  # [slots, V, K] S0^T
    ds: Any  # [slots, V, K] dS^T
    vn: Any  # [64, V] V'
    y: Any  # [64, V] dV', then Y
    p: Any  # [64, 64] P, then dP0
    qk: Any  # [64, 64] Q K^T
    kk: Any  # [64, 64] K K^T
    f: Any  # [64, 64] F + F^T
    gate: Any  # [slots, GATE_ROWS, 64] fp32
    sums: Any  # [SUM_ROWS, 64] fp32


class Rings(NamedTuple):
    """A step is a value head; for q and k it is a pair of chunk and key head."""

    q: Ring
    k: Ring
    v: Ring
    do: Ring
    a: Ring
    h: Ring
    ds: Ring
    vn: Ring
    dvn: Ring  # y from the query to the value warpgroup
    y: Ring  # y from there to the key warpgroup
    dv: Ring  # v from the value warpgroup to the store warp
    dp0: Ring  # p from the query to the key warpgroup
    gate: Ring
    sums: Ring


class Walk(NamedTuple):
    """The pairs of chunk and key head that this CTA visits: first, first + stride, ..."""

    chunks: Any  # [capacity, 2] first token and rows of each chunk
    first: Any
    stride: Any
    num_pairs: Any
    num_heads: Any
    group: Any  # value heads a key head

    def chunk(self, i: Any) -> Any:
        return (self.first + i * self.stride) // self.num_heads

    def head(self, i: Any) -> Any:
        return (self.first + i * self.stride) % self.num_heads


def serving_roles(regs: int) -> tuple[Role, ...]:
    """Of the warpgroup that has the four warps below."""
    loaded = ("q", "k", "v", "do", "a", "h", "ds")
    return (
        Role(
            "load",
            warps=1,
            regs=regs,
            waits=(*free(*loaded), "tail_full"),
            signals=tuple((barrier, ONE) for barrier in (*full(*loaded), "tail_full")),
            computes="q, k, v, dO, A, S0, dS",
            uses=("tma_load",),
        ),
        Role(
            "gates",
            warps=1,
            regs=regs,
            waits=("gate_free",),
            signals=("gate_full",),
            computes="gamma and its exponentials, beta",
        ),
        Role(
            "store",
            warps=1,
            regs=regs,
            waits=("dv_full",),
            signals=("v_free",),
            computes="dV out",
            uses=("tma_store",),
        ),
        Role(
            "sums",
            warps=1,
            regs=regs,
            waits=("sums_full",),
            signals=("sums_free",),
            computes="dg, dbeta",
        ),
    )


def full(*data: str) -> tuple[str, ...]:
    return tuple(f"{name}_full" for name in data)


def free(*data: str) -> tuple[str, ...]:
    return tuple(f"{name}_free" for name in data)


@T.macro
def fetch(source, tile, ring, i):
    ring.acquire(i)
    T.tma_copy(source, tile, barrier=ring.barrier(i))
    if T.shuffle_elect(32):
        ring.commit(i)


@T.macro
def fetch_tail(source, tile, ring, i, tail_full):
    ring.acquire(i)
    T.tma_copy(source, tile, barrier=tail_full[0])


@T.macro
def load(q, k, v, do, A, h, ds, s, ring, tail_full, walk, K, V):
    chunk, head, step = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    tok0, rows, tails = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    tails = 0
    for i in rolled(walk.num_pairs):
        chunk = walk.chunk(i)
        head = walk.head(i)
        tok0 = walk.chunks[chunk, 0]
        rows = walk.chunks[chunk, 1]
        for r in rolled(walk.group):
            step = i * walk.group + r
            fetch(ds[chunk, head, r, :, :], s.ds[ring.ds.slot(step), :, :], ring.ds, step)  # 1
            if rows == CHUNK:
                fetch(
                    v[tok0 : tok0 + CHUNK, head, r, :], s.v[ring.v.slot(step), :, :], ring.v, step
                )
                fetch(
                    A[tok0 : tok0 + CHUNK, head, r, :], s.a[ring.a.slot(step), :, :], ring.a, step
                )
                fetch(
                    do[tok0 : tok0 + CHUNK, head, r, :],
                    s.do[ring.do.slot(step), :, :],
                    ring.do,
                    step,
                )
            else:  # the next sequence's rows, or nobody's, must not meet a product: 0 * NaN is NaN
                if r == 0:
                    fetch_tail(
                        k[tok0 : tok0 + CHUNK, head, :],
                        s.k[ring.k.slot(i), :, :], ring.k, i, tail_full,
                    )  # fmt: skip
                    fetch_tail(
                        q[tok0 : tok0 + CHUNK, head, :],
                        s.q[ring.q.slot(i), :, :], ring.q, i, tail_full,
                    )  # fmt: skip
                fetch_tail(
                    v[tok0 : tok0 + CHUNK, head, r, :],
                    s.v[ring.v.slot(step), :, :], ring.v, step, tail_full,
                )  # fmt: skip
                fetch_tail(
                    A[tok0 : tok0 + CHUNK, head, r, :],
                    s.a[ring.a.slot(step), :, :], ring.a, step, tail_full,
                )  # fmt: skip
                fetch_tail(
                    do[tok0 : tok0 + CHUNK, head, r, :],
                    s.do[ring.do.slot(step), :, :], ring.do, step, tail_full,
                )  # fmt: skip
                if T.shuffle_elect(32):
                    T.barrier_arrive(tail_full[0])
                T.barrier_wait(tail_full[0], tails % 2)
                tails += 1
                if r == 0:
                    clear_tail(s.k, ring.k.slot(i), rows, K)
                    clear_tail(s.q, ring.q.slot(i), rows, K)
                clear_tail(s.v, ring.v.slot(step), rows, V)
                clear_tail(s.a, ring.a.slot(step), rows, CHUNK)
                clear_tail(s.do, ring.do.slot(step), rows, V)
                T.fence_proxy_async()  # zeros: written by threads, read by wgmma
                T.sync_warp()
                if T.shuffle_elect(32):
                    if r == 0:
                        ring.k.commit(i)
                        ring.q.commit(i)
                    ring.v.commit(step)
                    ring.a.commit(step)
                    ring.do.commit(step)
            fetch(h[chunk, head, r, :, :], s.h[ring.h.slot(step), :, :], ring.h, step)
            if (r == 0) & (rows == CHUNK):  # after the others: of all tiles these leave last
                fetch(k[tok0 : tok0 + CHUNK, head, :], s.k[ring.k.slot(i), :, :], ring.k, i)
                fetch(q[tok0 : tok0 + CHUNK, head, :], s.q[ring.q.slot(i), :, :], ring.q, i)


@T.macro
def read_gates(g_cum, beta, r_gate, walk, i, r):
    """gamma and beta of tokens 2 lane and 2 lane + 1 of a chunk; past its end gamma stays level."""
    lane = T.get_thread_binding() % 32
    chunk, head = T.alloc_var("int32"), T.alloc_var("int32")
    tok0, rows = T.alloc_var("int32"), T.alloc_var("int32")
    if i < walk.num_pairs:
        chunk = walk.chunk(i)
        head = walk.head(i)
        tok0 = walk.chunks[chunk, 0]
        rows = walk.chunks[chunk, 1]
        for e in T.unroll(2):
            r_gate[e] = g_cum[tok0 + T.min(2 * lane + e, rows - 1), head, r]
            r_gate[2 + e] = 0
            if 2 * lane + e < rows:
                r_gate[2 + e] = beta[tok0 + 2 * lane + e, head, r]


@T.macro
def gates(g_cum, beta, s_gate, ring, walk, scale):
    lane = T.get_thread_binding() % 32
    r_gate = T.alloc_local((4,), "float32")  # of the value head to come: two gamma, two beta
    gamma = T.alloc_local((2,), "float32")
    b = T.alloc_local((2,), "float32")
    step = T.alloc_var("int32")
    read_gates(g_cum, beta, r_gate, walk, 0, 0)
    for i in rolled(walk.num_pairs):
        for r in rolled(walk.group):
            step = i * walk.group + r
            slot = ring.slot(step)
            for e in T.unroll(2):
                gamma[e] = r_gate[e] * LOG2E
                b[e] = r_gate[2 + e]
            # arrives while this value head's numbers are made
            read_gates(g_cum, beta, r_gate, walk, (step + 1) // walk.group, (step + 1) % walk.group)
            end = T.shfl_sync(gamma[1], lane // 8 * 8 + 7)  # of the last token of the 16
            last = T.shfl_sync(gamma[1], 31)
            ring.acquire(step)  # 2
            for e in T.unroll(2):
                s_gate[slot, GAMMA, 2 * lane + e] = gamma[e]
                s_gate[slot, BETA, 2 * lane + e] = b[e]
                s_gate[slot, FALL, 2 * lane + e] = T.exp2(end - gamma[e])
                s_gate[slot, E, 2 * lane + e] = T.exp2(gamma[e])
                s_gate[slot, BETA_E, 2 * lane + e] = b[e] * T.exp2(gamma[e])
                s_gate[slot, SCALE_E, 2 * lane + e] = scale * T.exp2(gamma[e])
                s_gate[slot, D, 2 * lane + e] = T.exp2(last - gamma[e])
            ring.commit(step)
