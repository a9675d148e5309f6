"""Roles of wide_dstate besides the state: load, score, and what store writes.

wide_dstate.py states the maths and the steps, with the numbers used here.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.halves import HALF
from qla_kernels.gdn.kernels.chain.layout import TILE
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.mask import clear_tail


class ChunkGradients(NamedTuple):
    """The tensors to which role `store` writes the results of a head's chunks, last chunk first."""

    dS: Any  # [slots, HV, V, K]
    y: Any  # [slots, HV, V / 64, 64, 64]
    dv: Any  # [T, HV, V / 64, 64]
    s_dv: Any  # dV, which is committed with Y
    first_chunk: Any  # slot of the sequence's first chunk
    item: Any
    states: int  # state warpgroups, of HALF columns of K each; the tensor dS may have fewer

    def put(self, tile, step, w):
        item = self.item
        i = item.num_chunks - 1 - step
        chunk, v0 = self.first_chunk + i, item.i_tile * TILE
        if w == self.states:
            return put_values(self, tile, chunk, item.begin + i * CHUNK, item.length - i * CHUNK)
        k0, k1 = w * HALF, w * HALF + HALF
        return T.tma_copy(tile, self.dS[chunk, item.hv, v0 : v0 + TILE, k0:k1])


@T.macro
def put_values(out, s_y, chunk, tok0, rows):
    item = out.item
    lane = T.get_thread_binding() % 32
    T.tma_copy(s_y, out.y[chunk, item.hv, item.i_tile, :, :])  # 8
    if rows >= CHUNK:
        T.tma_copy(out.s_dv[0, :, :], out.dv[tok0 : tok0 + CHUNK, item.hv, item.i_tile, :])
    else:
        for piece in rolled(T.ceildiv(rows, 4)):  # a row in eight pieces of 16 bytes
            row = piece * 4 + lane // 8
            if row < rows:
                for e in T.vectorized(8):
                    out.dv[tok0 + row, item.hv, item.i_tile, lane % 8 * 8 + e] = out.s_dv[
                        0, row, lane % 8 * 8 + e
                    ]


@T.macro
def load(loads, tail_full, item):
    """Loads the tiles of each ring as soon as its slot is released; `loads` has rings and tiles."""
    begin, length, num_chunks = item.begin, item.length, item.num_chunks
    tok0, rows = T.alloc_var("int32"), T.alloc_var("int32")
    for step in rolled(num_chunks):
        tok0 = begin + (num_chunks - 1 - step) * CHUNK
        rows = begin + length - tok0
        if rows >= CHUNK:  # 1
            for ring, tiles in loads:
                ring.acquire(step)
                for tile in tiles:
                    tile.copy(tok0, ring.slot(step), ring.barrier(step))
                ring.commit(step)
        else:  # rows past the end must not enter a product: 0 * NaN is NaN
            for ring, tiles in loads:
                ring.acquire(step)
                for tile in tiles:
                    tile.copy(tok0, ring.slot(step), tail_full[0])
            T.barrier_arrive(tail_full[0])
            T.barrier_wait(tail_full[0], 0)
            for ring, tiles in loads:
                for tile in tiles:
                    clear_tail(tile.shared, ring.slot(step), rows, tile.shared.shape[-1])
            T.fence_proxy_async()  # the tiles: written by threads, read by wgmma
            for ring, _ in loads:
                ring.commit(step)


@T.macro
def score(s, ring, num_chunks, scale, first):
    """Makes P as soon as q and k are there: while the state is a chunk behind.

    `score` of cumulated.py waits for the next chunk's q and k before it makes P, and so needs three
    slots of them.
    """
    r_qk = T.alloc_fragment((CHUNK, CHUNK), "float32")
    thread = T.get_thread_binding() - first
    for slot, j in T.grid(ring.p.stages, CHUNK // 2):  # above the diagonal P stays zero for good
        s.p[slot, thread // 2, thread % 2 * (CHUNK // 2) + j] = 0
    for i in T.serial(num_chunks):
        ring.q.wait(i)
        ring.k.wait(i)
        T.wgmma_gemm(  # 3
            s.q[ring.q.slot(i), :, :],
            s.k[ring.k.slot(i), :, :],
            r_qk,
            transpose_B=True,
            clear_accum=True,
        )
        ring.gate.wait(i)
        ring.p.acquire(i)
        T.wait_wgmma(0)
        ring.q.release(i)
        ring.k.release(i)
        T.call_extern(
            "handle",
            "qla::gated_scores",
            r_qk.data,
            T.access_ptr(s.gate[ring.gate.slot(i), 0, 0], "r", 3 * CHUNK),
            T.access_ptr(s.p[ring.p.slot(i), 0, 0], "w", CHUNK * CHUNK),
            scale,
        )
        ring.gate.release(i)
        T.fence_proxy_async()  # P: written by threads, read by wgmma
        ring.p.commit(i)
