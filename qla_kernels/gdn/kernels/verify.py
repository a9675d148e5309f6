"""verify -- `recurrent` over draft tokens: the state after every token goes to a place of its own.

The maths of a token are those of recurrent.py, whose steps 2 to 4 this kernel shares. It differs in
which state a token starts from, and in who gets the state after it:
    a sequence starts from the slot of the pool that the number of accepted tokens names
    token t starts from the state after token t - 1 or, in a tree of drafts, after its parent
    the state after token t goes to a slot of the pool, or to entry t of a row of checkpoints

Steps (numbers appear again in the code); a CTA owns 64 columns of V, a warp 16 of them:
    1 in      S of the sequence's slot
    2 token   each warp prepares one token
    3 parent  S of the parent, if that is not the token before
    4 step    u and o; S
    5 out     write S

Bounded by memory: S is read once and written once a token.
Why this shape: as recurrent.py. A lane writes and reads back its own numbers of a state, so a
parent needs no barrier. An SM holds fewer CTAs than of recurrent, because the stores are in the
loop over tokens and their addresses need registers.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.recurrent import (
    COLUMN_LANES,
    DENSE,
    KEY_SPAN,
    PASS_CONFIGS,
    SOURCE,
    TOKEN_WARPS,
    V_FIRST,
    WARP_COLUMNS,
    Token,
    clear_rows,
    has,
    known_slot,
    move_blocks,
    move_four,
    prepare,
    step,
)
from qla_kernels.gdn.kernels.tables import inside, sequence_span
from qla_kernels.gdn.shapes import STATE_PIECE
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

__all__ = ["PASS_CONFIGS", "VARIANTS", "Variant", "build", "schedule"]

# Bits of `flags` besides those of recurrent.py. After each token, S goes to a slot of the pool with
# SLOTS, to an entry with ENTRIES, and nowhere with neither.
ACCEPTED, SLOTS, ENTRIES, TREE = (1 << i for i in range(8, 12))


class Variant(NamedTuple):
    dtype: str  # of q, k, v, o
    K: int  # q and k have so many numbers or fewer: `size`
    state: str  # dtype of S in memory


VARIANTS = tuple(
    Variant(dtype, K, state)
    for dtype, state in (("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16"))
    for K in (256, 128, 64)
)


def schedule(variant: Variant) -> Schedule:
    resident, regs = {256: (2, 255), 128: (3, 168), 64: (4, 128)}[variant.K]
    return Schedule(
        roles=(
            Role("step", warps=TOKEN_WARPS, regs=regs, computes="S and o of 16 columns a warp"),
        ),
        smem_bytes=TOKEN_WARPS * (2 * variant.K + 2 * TOKEN_WARPS * WARP_COLUMNS + 2) * 4,
        ctas_per_sm=resident,
    )


def state_at(states, at, hv, k0, column, v_first):
    """Returns a lane's part of a state in memory, as an argument of `move_blocks`."""
    along_k, along_v = states.strides[2:]
    across = T.if_then_else(v_first == 0, along_k, along_v)
    return states[at, hv, k0, column], KEY_SPAN * along_k, across


def of_lane(r_s):
    """Returns a lane's part of a state in registers, as an argument of `move_blocks`."""
    return r_s[0, 0, 0], STATE_PIECE * STATE_PIECE, STATE_PIECE


def build(variant: Variant):
    plan = schedule(variant)
    blocks = variant.K // KEY_SPAN  # a lane
    columns = TOKEN_WARPS * WARP_COLUMNS  # a CTA
    B, num_tokens, H, HV, V, size = T.dynamic("B, num_tokens, H, HV, V, size")
    num_bounds, num_h0, num_ht = T.dynamic("num_bounds, num_h0, num_ht")
    rows, num_slots, num_accepted, num_entries, num_parents = T.dynamic(
        "rows, num_slots, num_accepted, num_entries, num_parents"
    )
    sizes = g_size, beta_size, A_size, dt_size = T.dynamic("g_size, beta_size, A_size, dt_size")
    q_b, q_t, q_h, k_b, k_t, k_h = T.dynamic("q_b, q_t, q_h, k_b, k_t, k_h")
    v_b, v_t, v_h, g_b, g_t, g_h = T.dynamic("v_b, v_t, v_h, g_b, g_t, g_h")
    beta_b, beta_t, beta_h, beta_v = T.dynamic("beta_b, beta_t, beta_h, beta_v")
    A_h, dt_h, bound = T.dynamic("A_h, dt_h, bound")
    index, index_t, accepted_n, entry = T.dynamic("index, index_t, accepted_n, entry")
    parent_rows, parent_n, parent_t = T.dynamic("parent_rows, parent_n, parent_t")
    h0_n, h0_h, h0_k, h0_v = T.dynamic("h0_n, h0_h, h0_k, h0_v")
    ht_n, ht_h, ht_k, ht_v = T.dynamic("ht_n, ht_h, ht_k, ht_v")

    @T.prim_func
    def verify(
        q: T.StridedTensor((B, num_tokens, H, size), (q_b, q_t, q_h, 1), variant.dtype),
        k: T.StridedTensor((B, num_tokens, H, size), (k_b, k_t, k_h, 1), variant.dtype),
        v: T.StridedTensor((B, num_tokens, HV, V), (v_b, v_t, v_h, 1), variant.dtype),
        # as bytes: fp32, or the dtype of q
        g: T.StridedTensor((B, num_tokens, HV, g_size), (g_b, g_t, g_h, 1), "uint8"),
        beta: T.StridedTensor(
            (B, num_tokens, HV, V, beta_size), (beta_b, beta_t, beta_h, beta_v, 1), "uint8"
        ),
        A_log: T.StridedTensor((HV, A_size), (A_h, 1), "uint8"),
        dt_bias: T.StridedTensor((HV, dt_size), (dt_h, 1), "uint8"),
        cu_seqlens: T.StridedTensor((num_bounds,), (bound,), "int32"),
        state_indices: T.StridedTensor((rows, num_slots), (index, index_t), "int32"),
        accepted: T.StridedTensor((num_accepted,), (accepted_n,), "int32"),
        entry_rows: T.StridedTensor((num_entries,), (entry,), "int32"),
        parents: T.StridedTensor((parent_rows, num_parents), (parent_n, parent_t), "int32"),
        h0: T.StridedTensor((num_h0, HV, size, V), (h0_n, h0_h, h0_k, h0_v), variant.state),
        ht: T.StridedTensor((num_ht, HV, size, V), (ht_n, ht_h, ht_k, ht_v), variant.state),
        o: T.Tensor((B, num_tokens, HV, V), variant.dtype),
        num_sequences: T.int32,
        steps: T.int32,  # tokens of a sequence whose states are kept; entries of a row
        scale: T.float32,
        beta_range: T.float32,  # 1 or 2 where beta goes through a sigmoid, else 0
        flags: T.int32,
    ):
        with T.Kernel(num_sequences * HV * (V // columns), threads=plan.threads) as cta:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            s_q = T.alloc_shared((TOKEN_WARPS, variant.K), "float32")
            s_k = T.alloc_shared((TOKEN_WARPS, variant.K), "float32")
            s_v = T.alloc_shared((TOKEN_WARPS, columns), "float32")
            s_beta = T.alloc_shared((TOKEN_WARPS, columns), "float32")
            s_scalars = T.alloc_shared((TOKEN_WARPS, 2), "float32")
            s = Token(s_q, s_k, s_v, s_beta, s_scalars)
            r_s = T.alloc_local((blocks, STATE_PIECE, STATE_PIECE), "float32")
            r_o = T.alloc_local((STATE_PIECE,), "float32")
            # variables, so that they are divided as 32-bit numbers, and once
            n, hv, kh, slot, row = (T.alloc_var("int32") for _ in range(5))
            k0, column, v0, begin, length, t = (T.alloc_var("int32") for _ in range(6))
            first, place = T.alloc_var("int32"), T.alloc_var("int32")
            lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() // 32
            v_first = T.bitwise_and(flags, V_FIRST)

            n = T.truncdiv(cta, V // columns)
            v0 = (cta - n * (V // columns)) * columns
            hv = n
            n = T.truncdiv(n, HV)
            hv -= n * HV
            kh = T.truncdiv(hv, T.truncdiv(HV, H))
            k0 = (
                T.if_then_else(v_first == 0, lane // STATE_PIECE, lane % COLUMN_LANES) * STATE_PIECE
            )
            column = (
                T.if_then_else(v_first == 0, lane % STATE_PIECE, lane // COLUMN_LANES) * STATE_PIECE
            )
            column += warp * WARP_COLUMNS
            column += v0  # of V; within the CTA it is column - v0
            mine = (hv, k0, column, v_first)
            await_previous()
            t = 0
            if has(flags, ACCEPTED):
                t = T.max(T.min(accepted[n], num_slots), 1) - 1
            slot = known_slot(state_indices[n, t], num_h0, flags)
            first = 0  # entry of the sequence's first token
            if has(flags, ENTRIES):
                first = entry_rows[n]
                if (first < 0) | (first >= T.truncdiv(num_ht, steps)):
                    slot = -1
                first *= steps
            T.clear(r_s)
            if slot >= 0:
                move_blocks(blocks, of_lane(r_s), state_at(h0, slot, *mine), size - k0)  # 1
            row = n
            begin = 0
            length = num_tokens
            if not has(flags, DENSE):
                row = 0
                # tokens of no sequence, shared out
                t = inside(cu_seqlens[num_sequences], num_tokens) + n
                clear_rows(
                    o, r_o, 0, t, num_sequences,
                    T.truncdiv(num_tokens - t + num_sequences - 1, num_sequences),
                    hv, k0, column,
                )  # fmt: skip
                sequence_span(cu_seqlens, n, num_tokens, begin, length)

            if slot < 0:
                clear_rows(o, r_o, row, begin, 1, length, hv, k0, column)
            else:
                for tile in rolled(T.ceildiv(length, TOKEN_WARPS)):
                    if tile > 0:
                        T.sync_threads()
                    if tile * TOKEN_WARPS + warp < length:
                        t = begin + tile * TOKEN_WARPS + warp
                        prepare(
                            q, k, v, g, beta, A_log, dt_bias, sizes, variant.dtype, s, warp,
                            row, t, kh, hv, v0, scale, beta_range, flags,
                        )  # fmt: skip
                    T.sync_threads()
                    for i in rolled(T.min(TOKEN_WARPS, length - tile * TOKEN_WARPS)):
                        t = tile * TOKEN_WARPS + i  # within the sequence
                        if has(flags, TREE):
                            if (t > 0) & (t < parents.shape[1]):
                                parent = parents[n, t]
                                if (parent < t) & (parent != t - 1):  # 3
                                    if parent < 0:
                                        move_blocks(
                                            blocks,
                                            of_lane(r_s),
                                            state_at(h0, slot, *mine),
                                            size - k0,
                                        )
                                    else:
                                        move_blocks(
                                            blocks,
                                            of_lane(r_s),
                                            state_at(ht, first + parent, *mine),
                                            size - k0,
                                        )
                        if v_first == 0:
                            step(r_s, r_o, s, i, k0, column - v0, False)
                        else:
                            step(r_s, r_o, s, i, k0, column - v0, True)
                        if k0 == 0:
                            move_four(o[row, begin + t, hv, column], r_o[0])
                        if t < steps:
                            place = -1
                            if has(flags, ENTRIES):
                                place = first + t
                            if has(flags, SLOTS):
                                place = known_slot(state_indices[n, t], num_ht, flags)
                            if place >= 0:
                                move_blocks(  # 5
                                    blocks, state_at(ht, place, *mine), of_lane(r_s), size - k0
                                )

    return verify
