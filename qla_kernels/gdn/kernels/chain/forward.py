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
    find_row,
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
# Of OnTheWay.keeps: entries every so many chunks; the first after until_of chunks
EVERY, FROM = 1, 2


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


class RawGates(NamedTuple):
    """The gates of all tokens, as a forward gets them; beta is in fp32 or, if is_16, in beta16."""

    g: Any
    beta: Any
    beta16: Any
    is_16: Any
    g_cum: Any  # takes cumulated gates


@T.macro
def read_gates(gates, is_16, r_gate, r_beta16, token, end, hv):
    """Reads g and beta of this lane's two tokens of a chunk into registers.

    The numbers are not converted here, because that would wait for the loads. Past the end they are
    0, so gamma keeps its value.
    """
    for e in T.unroll(2):
        r_gate[e] = 0
        r_gate[2 + e] = 0
        r_beta16[e] = 0
        if token + e < end:
            r_gate[e] = gates.g[token + e, hv]
            if is_16 != 0:
                r_beta16[e] = gates.beta16[token + e, hv]
            else:
                r_gate[2 + e] = gates.beta[token + e, hv]


@T.macro
def gate(gates, s_gate, ring, item, scale, saves=False, one_chunk=False):
    """Writes the rows of a gate slot for each chunk.

    `item` has begin, length, num_chunks and hv. With `saves`, it says whether to write cumulated
    gates to g_cum. With `one_chunk` no other one is read ahead.
    """
    begin, length, num_chunks, hv = item.begin, item.length, item.num_chunks, item.hv
    is_16 = gates.is_16
    saves = item.saves if saves else 0
    lane = T.get_thread_binding() % 32
    r_gate = T.alloc_local((4,), "float32")  # of the next chunk: two g, two beta
    r_beta16 = T.alloc_local((2,), gates.beta16.dtype)
    g2 = T.alloc_local((2,), "float32")
    b = T.alloc_local((2,), "float32")
    total, before = T.alloc_var("float32"), T.alloc_var("float32")
    token, end = T.alloc_var("int32"), T.alloc_var("int32")
    token = begin + 2 * lane
    end = begin + length
    read_gates(gates, is_16, r_gate, r_beta16, token, end, hv)
    for i in rolled(num_chunks):
        for e in T.unroll(2):
            g2[e] = T.max(r_gate[e] * LOG2E, GATE_FLOOR)
            b[e] = r_gate[2 + e] + r_beta16[e]  # one of them is 0
        # the values arrive while this chunk is processed
        if not one_chunk:
            read_gates(gates, is_16, r_gate, r_beta16, token + CHUNK, end, hv)
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
                    gates.g_cum[token + e, hv] = g2[e] * LN2
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
def state(variant, s, ring, turn, enters, leaves, item, kept=None, shares=None, piece=0):
    """Walks an item's chunks; `enters` and `leaves` are the rows of its first and last state."""
    states, K, dtype = variant.states, variant.K, variant.dtype
    num_chunks, n, hv, v0 = item.num_chunks, item.n, item.hv, item.i_tile * variant.tile_v
    length = item.length
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
    w = T.get_thread_binding(1) - variant.first_state
    null_slot = None if kept is None else kept.null_slot
    start = T.alloc_var("int32")
    find_row(enters, n, start, null_slot)
    if shares is not None:
        if shares.takes(piece) != 0:
            start = -1
    if start >= 0:
        move_state("load", K, r_s, enters.tensor, start, hv, v0 + w * TILE, kept)
    else:
        T.clear(r_s)
    if shares is not None:
        if shares.takes(piece) != 0:
            take_state(K, r_s, shares, w)
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
            slot = ring.k.slot(i)
            gate_slot = ring.gate.slot(i)
            ring.k.wait(i)
            ring.q.wait(i)
            take_turn(turn, w)
            T.wgmma_gemm(r_s16, s.k[slot, :, :], r_x, transpose_B=True, clear_accum=True)  # 4
            give_turn(turn, w)
            if states == 1:
                T.copy(r_o, r_o16)  # of the chunk before; unused in the first pass
            T.wgmma_gemm(r_s16, s.q[ring.q.slot(i), :, :], r_o, transpose_B=True, clear_accum=True)
            if states == 1:
                if i > 0:
                    put_out(r_o16, s.o, ring.o, w, i - 1)
            ring.v.wait(i)
            load_transposed(s.v, ring.v.slot(i), w, r_vt)
            ring.gate.wait(i)
            if states == 1:
                T.wait_wgmma(1)  # S K^T is ready, S Q^T in flight
            else:
                T.wait_wgmma(0)
                ring.q.release(i)
            for r, c in T.Parallel(TILE, CHUNK):  # 5
                r_x[r, c] = (
                    s.gate[gate_slot, BETA, c] * r_vt[c, r]
                    - s.gate[gate_slot, BETA_E, c] * r_x[r, c]
                )
            ring.v.release(i)
            T.copy(r_x, r_w16)
            ring.a.wait(i)
            take_turn(turn, w)
            T.wgmma_gemm(r_w16, s.a[ring.a.slot(i), :, :], r_n, transpose_B=True, clear_accum=True)
            give_turn(turn, w)
            for r, c in T.Parallel(TILE, K):
                r_s[r, c] *= s.gate[gate_slot, LAST, 0]
            if states == 1:
                T.wait_wgmma(1)
                ring.q.release(i)
            for r, c in T.Parallel(TILE, CHUNK):
                r_o[r, c] *= s.gate[gate_slot, SCALE_E, c]
            T.wait_wgmma(0)
            ring.a.release(i)
            for r, c in T.Parallel(TILE, CHUNK):
                r_dn16[r, c] = r_n[r, c] * s.gate[gate_slot, D, c]
            if states == 1:
                T.wgmma_gemm(r_dn16, s.k[slot, :, :], r_s)  # 6
                T.copy(r_n, r_n16)
                ring.gate.release(i)
                ring.p.wait(i)
                T.wgmma_gemm(r_n16, s.p[ring.p.slot(i), :, :], r_o, transpose_B=True)
            else:
                T.copy(r_n, r_n16)
                ring.gate.release(i)
                ring.p.wait(i)
                take_turn(turn, w)
                T.wgmma_gemm(r_dn16, s.k[slot, :, :], r_s)  # 6
                T.wgmma_gemm(r_n16, s.p[ring.p.slot(i), :, :], r_o, transpose_B=True)
                give_turn(turn, w)
            T.wait_wgmma(1)  # S is ready, V'^T P^T in flight
            T.copy(r_s, r_s16)
            # V'^T P^T, too: with a product in flight across the back edge ptxas would serialise all
            T.wait_wgmma(0)
            ring.k.release(i)
            ring.p.release(i)
            if states == 2:
                T.copy(r_o, r_o16)
                put_out(r_o16, s.o, ring.o, w, i * states + w)
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
            put_out(r_o16, s.o, ring.o, w, num_chunks - 1)
    row = T.alloc_var("int32")
    find_row(leaves, n, row, null_slot)
    if shares is not None:
        if shares.gives(piece) != 0:
            give_state(K, r_s, shares, w)
            row = -1
    if row >= 0:
        move_state("store", K, r_s, leaves.tensor, row, hv, v0 + w * TILE, kept)
