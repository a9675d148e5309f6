"""Roles that the backward's two chains share: chunk_states and dstate_chain.

chunk_states walks from the first chunk to the last, dstate_chain from the last to the first
(`reverse`). Both read cumulated gates that the forward has stored, and both write one state a
chunk. `step` counts the chunks in the order in which a chain visits them.
"""

from pathlib import Path
from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import (
    BETA,
    BETA_E,
    DECAY_TO_BLOCK_END,
    GAMMA,
    LAST,
    SCALE_E,
    TILE,
    D,
)
from qla_kernels.gdn.kernels.tables import read_span
from qla_kernels.tile.constants import CHUNK, LOG2E
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.mask import clear_tail

SOURCE = Path(__file__).with_suffix(".cuh").read_text()


SEQUENCE = "hv n kh begin length num_chunks i_tile v0"  # variables of `find_sequence`


@T.macro
def find_sequence(block, spans, g_cum, num_heads, num_tiles, tile_v, item):
    """Sets `item` to a CTA's sequence, value head and V tile. Long sequences come first."""
    num_tokens, num_value_heads = g_cum.shape
    item["i_tile"] = block % num_tiles
    item["v0"] = item.i_tile * tile_v
    item["hv"] = block // num_tiles % num_value_heads
    place = T.alloc_local((1,), "int32")
    longest_first(spans, spans.shape[0], block // num_tiles // num_value_heads, place)
    item["n"] = T.shfl_sync(place[0], 0)  # so that the compiler sees it is uniform
    item["kh"] = item.hv // (num_value_heads // num_heads)
    read_span(spans, item.n, num_tokens, item.begin, item.length)
    item["num_chunks"] = T.ceildiv(item.length, CHUNK)


@T.macro
def load(tiles, ring, tail_full, item, reverse):
    begin, length, num_chunks = item.begin, item.length, item.num_chunks
    tok0, rows = T.alloc_var("int32"), T.alloc_var("int32")
    for step in rolled(num_chunks):
        i = num_chunks - 1 - step if reverse else step
        tok0 = begin + i * CHUNK
        rows = length - i * CHUNK
        slot = ring.slot(step)
        ring.acquire(step)
        if rows >= CHUNK:  # 1
            for tile in tiles:
                tile.copy(tok0, slot, ring.barrier(step))
            ring.commit(step)
        else:  # rows past the end must not enter a product: 0 * NaN is NaN
            for tile in tiles:
                tile.copy(tok0, slot, tail_full[0])
            T.barrier_arrive(tail_full[0])
            T.barrier_wait(tail_full[0], 0)
            for tile in tiles:
                clear_tail(tile.shared, slot, rows, tile.shared.shape[-1])
            T.fence_proxy_async()  # the tiles: written by threads, read by wgmma
            ring.commit(step)


@T.macro
def read_gates(g_cum, beta, r_gate, begin, length, i, num_chunks, hv):
    """Reads gamma and beta of tokens 2 lane and 2 lane + 1 of chunk i into r_gate, if it exists.

    Past the end of a tail gamma keeps its last value and beta is 0.
    """
    lane = T.get_thread_binding() % 32
    row, token = T.alloc_var("int32"), T.alloc_var("int32")  # in 32 bits, as sums are not
    if (i >= 0) & (i < num_chunks):
        for e in T.unroll(2):
            row = i * CHUNK + 2 * lane + e
            token = begin + T.min(row, length - 1)
            r_gate[e] = g_cum[token, hv] * LOG2E
            r_gate[2 + e] = T.if_then_else(row < length, beta[token, hv], 0)


@T.macro
def gate(g_cum, beta, s_gate, ring, item, reverse, scale):
    """Writes the rows of a gate slot for each chunk.

    `scale` is None for a chain without queries; rows GAMMA, DECAY_TO_BLOCK_END and SCALE_E are then
    not written. In other chains item.unit is the unit of all numbers.
    """
    begin, length, num_chunks, hv = item.begin, item.length, item.num_chunks, item.hv
    if scale is not None:
        scale = scale / item.unit
    lane = T.get_thread_binding() % 32
    r_gate = T.alloc_local((4,), "float32")  # of the next chunk: two gamma, two beta
    gamma = T.alloc_local((2,), "float32")
    b = T.alloc_local((2,), "float32")
    first = num_chunks - 1 if reverse else 0
    direction = -1 if reverse else 1
    read_gates(g_cum, beta, r_gate, begin, length, first, num_chunks, hv)
    for step in rolled(num_chunks):
        for e in T.unroll(2):
            gamma[e] = r_gate[e]
            b[e] = r_gate[2 + e]
        read_gates(  # the values arrive while this chunk is processed
            g_cum, beta, r_gate, begin, length, first + direction * (step + 1), num_chunks, hv
        )
        end = T.shfl_sync(gamma[1], lane // 8 * 8 + 7)  # gamma of the last token of the 16
        last = T.shfl_sync(gamma[1], 31)
        ring.acquire(step)  # 2
        slot = ring.slot(step)
        for e in T.unroll(2):
            s_gate[slot, BETA, 2 * lane + e] = b[e]
            s_gate[slot, BETA_E, 2 * lane + e] = b[e] * T.exp2(gamma[e])
            s_gate[slot, D, 2 * lane + e] = T.exp2(last - gamma[e])
            if scale is not None:
                s_gate[slot, GAMMA, 2 * lane + e] = gamma[e]
                s_gate[slot, DECAY_TO_BLOCK_END, 2 * lane + e] = T.exp2(end - gamma[e])
                s_gate[slot, SCALE_E, 2 * lane + e] = scale * T.exp2(gamma[e])
        s_gate[slot, LAST, lane] = T.exp2(last)
        ring.commit(step)


@T.macro
def score(s, ring, num_chunks, scale, first_thread):
    """Makes P of each chunk, one chunk ahead of the state."""
    r_next = T.alloc_fragment((CHUNK, CHUNK), "float32")  # Q K^T of the chunk after
    r_qk = T.alloc_fragment((CHUNK, CHUNK), "float32")
    thread = T.get_thread_binding() - first_thread
    for slot, j in T.grid(ring.p.stages, CHUNK // 2):  # above the diagonal P stays zero for good
        s.p[slot, thread // 2, thread % 2 * (CHUNK // 2) + j] = 0
    if num_chunks > 0:
        ring.rows.wait(0)
        T.wgmma_gemm(s.q[0, :, :], s.k[0, :, :], r_qk, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        ring.rows.release(0)
    for i in T.serial(num_chunks):
        after = T.alloc_var("int32")
        after = T.min(i + 1, num_chunks - 1)  # the last pass repeats its own product, unused
        ring.rows.wait(after)
        T.wgmma_gemm(  # 3
            s.q[ring.rows.slot(after), :, :],
            s.k[ring.rows.slot(after), :, :],
            r_next,
            transpose_B=True,
            clear_accum=True,
        )
        ring.gate.wait(i)
        ring.p.acquire(i)
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
        T.wait_wgmma(0)
        if i + 1 < num_chunks:
            ring.rows.release(after)
        T.copy(r_next, r_qk)


@T.macro
def put_state(r_s, state, n, hv, v0, K, k0=0):
    """Writes a state warpgroup's 64 rows of V to `state` [N, HV, .., V], from column v0 on.

    The warpgroup has K rows of `state`, from k0 on. `state` may have any strides.
    """
    lane = T.get_thread_binding() % 32
    warp = T.get_thread_binding() // 32 % 4
    T.call_extern(
        "handle",
        f"qla::scatter_state<{K}>",
        r_s.data,
        T.access_ptr(state[n, hv, k0 + lane % 4 * 2, v0 + warp * 16 + lane // 4], "w", 1),
        state.strides[3],
        state.strides[2],
    )


@T.macro
def stage(r_s16, s_h, ring, step, K):
    """Writes a state warpgroup's rows, in 16 bits, to its staging tile [slots, TILE, K].

    `store` makes the fence, and sends the tile. TileLang is told that the tile is read here: for a
    write it would insert a fence of its own before the next product, which would wait for the
    products in flight.
    """
    ring.acquire(step)
    T.call_extern(
        "handle",
        f"qla::stage_state<{K}>",
        r_s16.data,
        T.access_ptr(s_h[ring.slot(step), 0, 0], "r", TILE * K),
    )
    ring.commit(step)


@T.macro
def longest_first(spans, num_sequences, rank, n):
    """Sets n[0] to the sequence number `rank` in the order of falling lengths.

    Every warp computes it by itself. With more than 64 sequences n[0] is `rank`: no sequence is
    then so long that the order would matter. Lengths are taken from spans [N, 2] unchecked; any
    lengths give each rank a different sequence.
    """
    lane = T.get_thread_binding() % 32
    length = T.alloc_local((2,), "int32")  # of sequences lane and lane + 32
    before = T.alloc_local((2,), "int32")
    other = T.alloc_var("int32")
    n[0] = rank
    if (num_sequences > 1) & (num_sequences <= 64):
        for e in T.unroll(2):
            length[e] = -1
            before[e] = 0
            if lane + 32 * e < num_sequences:
                length[e] = spans[lane + 32 * e, 1] - spans[lane + 32 * e, 0]
        for m in rolled(num_sequences):
            other = spans[m, 1] - spans[m, 0]
            for e in T.unroll(2):
                if (other > length[e]) | ((other == length[e]) & (m < lane + 32 * e)):
                    before[e] += 1
        n[0] = -1
        for e in T.unroll(2):
            if (lane + 32 * e < num_sequences) & (before[e] == rank):
                n[0] = lane + 32 * e
        for d in T.unroll(5):
            n[0] = T.max(n[0], T.shfl_xor(n[0], 1 << d))


class States(NamedTuple):
    """Destination of a head's states: h[first], h[first + 1], ..., with h [.., HV, V, K or less].

    Of a state's K columns those are written that h has.
    """

    h: Any
    first: Any
    hv: Any
    v0: Any
    K: int

    def put(self, tile, step, w):
        v = self.v0 + w * TILE
        return T.tma_copy(tile, self.h[self.first + step, self.hv, v : v + TILE, 0 : self.K])


@T.macro
def store(out, s, ring, outputs, num_states):
    """Sends each staged tile of `outputs`, their names, to the destination `out`, for each state.

    With two slots, a slot is released only after the next store has been issued, so the warp does
    not wait for the TMA store that it has just issued.
    """
    behind = ring[outputs[0]].stages - 1
    for step in rolled(num_states):
        for w, name in enumerate(outputs):
            ring[name].wait(step)
            T.fence_proxy_async()  # the tile: written by threads, read by the TMA store
            out.put(s[name][ring[name].slot(step), :, :], step, w)
            T.tma_store_wait(behind * len(outputs))
            if step >= behind:
                ring[name].release(step - behind)
    T.tma_store_wait(0)  # before the CTA ends, and with it its shared memory
