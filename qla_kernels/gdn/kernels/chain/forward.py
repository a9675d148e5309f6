"""The roles `gate` and `state` of the forward; solve.py and transfer.py have the other roles.

fused_fwd.py states the maths and the steps, with the numbers used here. The block is
two-dimensional: threadIdx.x is the thread within its warpgroup, and threadIdx.y is the warpgroup,
so both state warpgroups run the same loop. Two copies of the loop, together with the other roles,
would not fit the SM's instruction cache of 32 KB.
"""

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
    accumulator_layout,
    give_turn,
    load_transposed,
    slot_of,
    take_turn,
)
from qla_kernels.gdn.kernels.chain.shares import give_state, take_state
from qla_kernels.tile.constants import CHUNK, GATE_FLOOR, LN2, LOG2E
from qla_kernels.tile.loops import rolled

# Of OnTheWay.next: chunks before the next checkpoint, its entry, the sequence's whole chunks
UNTIL, ENTRY, LAST_WHOLE = range(3)
EVERY, FROM = (
    1,
    2,
)  # of OnTheWay.keeps: entries every so many chunks; the first after until_of chunks


class OnTheWay(NamedTuple):
    """What the state role of a variant for pools reads besides, and where it keeps states.

    The tables are a caller's: starts_of and ends_of have slots of the pool, which are checked.
    """

    checkpoints: Any  # [entries, HV, K, V, bytes]
    entries_of: Any  # the entry of a sequence's first checkpoint
    until_of: Any  # the number of chunks before it, with FROM
    every: Any  # the number of chunks from one checkpoint to the next
    keeps: Any  # 0, EVERY or FROM
    null_slot: Any  # no slot, and no lower number, is a state
    # [states, 3, threads] in shared memory: the loop over chunks has no registers for it. None in
    # a variant that keeps no states.
    next: Any


@T.macro
def read_gates(g, beta, beta16, is_16, r_gate, r_beta16, token, end, hv):
    """Reads g and beta of this lane's two tokens of a chunk into registers.

    The numbers are not converted here, because that would wait for the loads. Past the end they are
    0, so gamma keeps its value.
    """
    for e in T.unroll(2):
        r_gate[e] = 0
        r_gate[2 + e] = 0
        r_beta16[e] = 0
        if token + e < end:
            r_gate[e] = g[token + e, hv]
            if is_16 != 0:
                r_beta16[e] = beta16[token + e, hv]
            else:
                r_gate[2 + e] = beta[token + e, hv]


@T.macro
def gate(
    g, beta, beta16, is_16, g_cum, s_gate, ring, begin, length, num_chunks, hv, scale, saves,
    one_chunk=False,
):  # fmt: skip
    """Writes the rows of a gate slot for each chunk, and cumulated gates to g_cum if `saves`.

    beta is read from `beta` in fp32 or, if is_16, from `beta16` in 16 bits. With `one_chunk` no
    other one is read ahead.
    """
    lane = T.get_thread_binding() % 32
    r_gate = T.alloc_local((4,), "float32")  # of the next chunk: two g, two beta
    r_beta16 = T.alloc_local((2,), beta16.dtype)
    g2 = T.alloc_local((2,), "float32")
    b = T.alloc_local((2,), "float32")
    total, before = T.alloc_var("float32"), T.alloc_var("float32")
    token, end = T.alloc_var("int32"), T.alloc_var("int32")
    token = begin + 2 * lane
    end = begin + length
    read_gates(g, beta, beta16, is_16, r_gate, r_beta16, token, end, hv)
    for i in rolled(num_chunks):
        for e in T.unroll(2):
            g2[e] = T.max(r_gate[e] * LOG2E, GATE_FLOOR)
            b[e] = r_gate[2 + e] + r_beta16[e]  # one of them is 0
        # the values arrive while this chunk is processed
        if not one_chunk:
            read_gates(g, beta, beta16, is_16, r_gate, r_beta16, token + CHUNK, end, hv)
        total = g2[0] + g2[1]  # inclusive scan of the pairs over the warp
        for d in T.unroll(5):
            below = T.shfl_up(total, 1 << d)
            if lane >= 1 << d:
                total += below
        # A pair's first token adds itself to the pairs before it. total - g2[1] would be rounded
        # after adding the second token, on which the first one's bits must not depend.
        before = T.shfl_up(total, 1)
        if lane == 0:
            before = 0
        g2[0] += before
        g2[1] = total
        block_end = T.shfl_sync(total, lane // 8 * 8 + 7)  # gamma of the last token of the 16
        last = T.shfl_sync(total, 31)
        ring.acquire(i)  # 2
        slot = ring.slot(i)
        for e in T.unroll(2):
            s_gate[slot, GAMMA, 2 * lane + e] = g2[e]
            s_gate[slot, BETA, 2 * lane + e] = b[e]
            s_gate[slot, DECAY_TO_BLOCK_END, 2 * lane + e] = T.exp2(block_end - g2[e])
            s_gate[slot, BETA_E, 2 * lane + e] = b[e] * T.exp2(g2[e])
            s_gate[slot, SCALE_E, 2 * lane + e] = scale * T.exp2(g2[e])
            s_gate[slot, D, 2 * lane + e] = T.exp2(last - g2[e])
        s_gate[slot, LAST, lane] = T.exp2(last)
        ring.commit(i)
        if saves != 0:
            for e in T.unroll(2):
                if token + e < end:
                    g_cum[token + e, hv] = g2[e] * LN2
        token += CHUNK


def move_state(verb, K, r_s, state, n, hv, v, kept=None):
    """Loads or stores S^T, 64 columns of a tensor [n, HV, K, V]; `kept` is given if it is a pool.

    It is inline CUDA, because a TileLang loop would compute each of the 64 addresses separately,
    which takes 5 KB of instructions.
    """
    return T.call_extern(
        "handle",
        f"qla::{verb}_{'state' if kept is None else 'pool'}<{K}>",
        r_s.data,
        T.access_ptr(state[n, hv, 0, v], "rw", 1),
        *(T.cast(stride, "int64") for stride in state.strides[2:]),
    )


def store_entry(K, r_s, states, entry, hv, v0, w):
    """Stores S^T as `move_state` does, to an entry that may not exist."""
    return T.call_extern(
        "handle",
        f"qla::keep_state<{K}>",
        r_s.data,
        T.access_ptr(states[0, 0, 0, 0, 0], "rw", 1),
        *(entry, hv, v0, w),
        *(T.cast(stride, "int64") for stride in states.strides[:4]),
        states.shape[4],
        states.shape[0],
    )


@T.macro
def keep_state(K, r_s, kept, hv, v0, w):
    """Stores S^T to the next entry, between two chunks."""
    thread = T.get_thread_binding()
    if kept.next[w, UNTIL, thread] <= kept.next[w, LAST_WHOLE, thread]:
        store_entry(K, r_s, kept.checkpoints, kept.next[w, ENTRY, thread], hv, v0, w)
        kept.next[w, ENTRY, thread] += 1
        kept.next[w, UNTIL, thread] += kept.every


@T.macro
def put_out(r_o16, s_o, ring, w, i):
    """Writes a state warpgroup's columns of O to its staging tile.

    `store` makes the fence. TileLang is told that the tile is read here: for a write it would
    insert a fence of its own before the next product.
    """
    ring.acquire(i)
    T.call_extern("handle", "qla::stage_transposed", r_o16.data, slot_of(s_o, w, "r"))
    ring.commit(i)


@T.macro
def state(
    states, K, dtype, h0, ht, s_q, s_k, s_v, s_gate, s_a, s_p, s_o,
    q_ring, k_ring, v_ring, gate_ring, a_ring, p_ring, o_ring, turn,
    num_chunks, n, hv, v0, has_h0, has_ht, starts_of, ends_of, first_warpgroup=0,
    kept=None, length=0, shares=None, block=0, piece=0,
):  # fmt: skip
    r_s = T.alloc_fragment((TILE, K), "float32")  # S^T: stays here from first to last chunk
    r_s16 = T.alloc_fragment((TILE, K), dtype)
    r_x = T.alloc_fragment((TILE, CHUNK), "float32")  # S K^T, then W^T
    r_n = T.alloc_fragment((TILE, CHUNK), "float32")  # V'^T
    r_o = T.alloc_fragment((TILE, CHUNK), "float32")  # O^T
    r_w16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_n16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_dn16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_o16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_vt = T.alloc_fragment((CHUNK, TILE), dtype)
    T.annotate_layout({r_vt: accumulator_layout(TILE, CHUNK)})
    w = T.alloc_var("int32")
    w = T.get_thread_binding(1) - first_warpgroup
    start = T.alloc_var("int32")  # row of h0
    start = -1
    if has_h0 == 1:
        start = n
    if has_h0 == 2:
        start = starts_of[n]  # the row in which this node's parent ends, if any
        if kept is not None:
            if (start <= kept.null_slot) | (start >= h0.shape[0]):
                start = -1
    if shares is not None:
        if shares.takes(block, piece) != 0:
            start = -1
    if start >= 0:
        move_state("load", K, r_s, h0, start, hv, v0 + w * TILE, kept)
    else:
        T.clear(r_s)
    if shares is not None:
        if shares.takes(block, piece) != 0:
            take_state(K, r_s, shares, block, w)
    T.copy(r_s, r_s16)
    if states == 1:
        T.clear(r_o)
    if kept is not None and kept.next is not None:
        thread = T.get_thread_binding()
        kept.next[w, UNTIL, thread] = 0
        kept.next[w, LAST_WHOLE, thread] = length // CHUNK
        if kept.keeps != 0:
            kept.next[w, UNTIL, thread] = kept.every
            kept.next[w, ENTRY, thread] = kept.entries_of[n]
        if kept.keeps == FROM:
            kept.next[w, UNTIL, thread] = kept.until_of[n]
            if kept.until_of[n] == 0:
                keep_state(K, r_s, kept, hv, v0, w)
    # Two state warpgroups that keep states have a loop for each stretch between checkpoints: what a
    # checkpoint needs would take registers of one loop over all chunks.
    in_stretches = kept is not None and kept.next is not None and states == 2
    if in_stretches:
        first, last, num_stretches = (T.alloc_var("int32") for _ in range(3))
        first = 0
        last = T.shfl_sync(kept.next[w, UNTIL, thread], 0)
        num_stretches = 1
        if last > 0:
            num_stretches += T.max(num_chunks - last + kept.every, 0) // kept.every
    for _ in rolled(num_stretches) if in_stretches else [None]:
        if in_stretches:
            last = T.shfl_sync(kept.next[w, UNTIL, thread], 0)
            if (last <= first) | (last > num_chunks):
                last = num_chunks
        for i in T.serial(first, last) if in_stretches else T.serial(num_chunks):
            slot = k_ring.slot(i)
            gate_slot = gate_ring.slot(i)
            k_ring.wait(i)
            q_ring.wait(i)
            take_turn(turn, w)
            T.wgmma_gemm(r_s16, s_k[slot, :, :], r_x, transpose_B=True, clear_accum=True)  # 4
            give_turn(turn, w)
            if states == 1:
                T.copy(r_o, r_o16)  # of the chunk before; unused in the first pass
            T.wgmma_gemm(r_s16, s_q[q_ring.slot(i), :, :], r_o, transpose_B=True, clear_accum=True)
            if states == 1:
                if i > 0:
                    put_out(r_o16, s_o, o_ring, w, i - 1)
            v_ring.wait(i)
            load_transposed(s_v, v_ring.slot(i), w, r_vt)
            gate_ring.wait(i)
            if states == 1:
                T.wait_wgmma(1)  # S K^T is ready, S Q^T in flight
            else:
                T.wait_wgmma(0)
                q_ring.release(i)
            for r, c in T.Parallel(TILE, CHUNK):  # 5
                r_x[r, c] = (
                    s_gate[gate_slot, BETA, c] * r_vt[c, r]
                    - s_gate[gate_slot, BETA_E, c] * r_x[r, c]
                )
            v_ring.release(i)
            T.copy(r_x, r_w16)
            a_ring.wait(i)
            take_turn(turn, w)
            T.wgmma_gemm(r_w16, s_a[a_ring.slot(i), :, :], r_n, transpose_B=True, clear_accum=True)
            give_turn(turn, w)
            for r, c in T.Parallel(TILE, K):
                r_s[r, c] *= s_gate[gate_slot, LAST, 0]
            if states == 1:
                T.wait_wgmma(1)
                q_ring.release(i)
            for r, c in T.Parallel(TILE, CHUNK):
                r_o[r, c] *= s_gate[gate_slot, SCALE_E, c]
            T.wait_wgmma(0)
            a_ring.release(i)
            for r, c in T.Parallel(TILE, CHUNK):
                r_dn16[r, c] = r_n[r, c] * s_gate[gate_slot, D, c]
            if states == 1:
                T.wgmma_gemm(r_dn16, s_k[slot, :, :], r_s)  # 6
                T.copy(r_n, r_n16)
                gate_ring.release(i)
                p_ring.wait(i)
                T.wgmma_gemm(r_n16, s_p[p_ring.slot(i), :, :], r_o, transpose_B=True)
            else:
                T.copy(r_n, r_n16)
                gate_ring.release(i)
                p_ring.wait(i)
                take_turn(turn, w)
                T.wgmma_gemm(r_dn16, s_k[slot, :, :], r_s)  # 6
                T.wgmma_gemm(r_n16, s_p[p_ring.slot(i), :, :], r_o, transpose_B=True)
                give_turn(turn, w)
            T.wait_wgmma(1)  # S is ready, V'^T P^T in flight
            T.copy(r_s, r_s16)
            # V'^T P^T, too: with a product in flight across the back edge ptxas would serialise all
            T.wait_wgmma(0)
            k_ring.release(i)
            p_ring.release(i)
            if states == 2:
                T.copy(r_o, r_o16)
                put_out(r_o16, s_o, o_ring, w, i * states + w)
            if kept is not None and kept.next is not None and states == 1:
                if i + 1 == kept.next[w, UNTIL, T.get_thread_binding()]:
                    keep_state(K, r_s, kept, hv, v0, w)
        if in_stretches:
            if (first < last) & (last == kept.next[w, UNTIL, thread]):
                keep_state(K, r_s, kept, hv, v0, w)
            first = last
    if states == 1:
        if num_chunks > 0:
            T.copy(r_o, r_o16)
            put_out(r_o16, s_o, o_ring, w, num_chunks - 1)
    row = T.alloc_var("int32")  # row of ht
    row = -1
    if has_ht == 1:
        row = n
    if has_ht == 2:
        row = ends_of[n]  # the sequence that this segment ends, or the row of this node, if any
        if kept is not None:
            if (row <= kept.null_slot) | (row >= ht.shape[0]):
                row = -1
    if shares is not None:
        if shares.gives(block, piece) != 0:
            give_state(K, r_s, shares, block, w)
            row = -1
    if row >= 0:
        move_state("store", K, r_s, ht, row, hv, v0 + w * TILE, kept)
