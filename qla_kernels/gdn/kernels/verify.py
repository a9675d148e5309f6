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
    DENSE,
    KEY_SPAN,
    PASS_CONFIGS,
    SOURCE,
    TOKEN_WARPS,
    V_FIRST,
    WARP_COLUMNS,
    Tokens,
    clear_rows,
    has,
    known_slot,
    lane_columns,
    lane_rows,
    move_blocks,
    move_four,
    of_lane,
    of_state,
    prepare,
    step,
    steps_across,
    token_tiles,
    token_types,
)
from qla_kernels.gdn.kernels.tables import inside, sequence_span
from qla_kernels.gdn.shapes import STATE_PIECE
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.record import Variables
from qla_kernels.tile.schedule import Role, Schedule
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

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
        tiles=token_tiles(TOKEN_WARPS, variant.K, TOKEN_WARPS * WARP_COLUMNS),
        ctas_per_sm=resident,
    )


def state_at(states, at, hv, k0, column, v_first):
    """Returns a lane's part of a state in memory, as an argument of `move_blocks`."""
    return of_state(states[at, hv, k0, column], states, steps_across(states, v_first))


def build(variant: Variant):
    plan, dtype = schedule(variant), variant.dtype
    blocks = variant.K // KEY_SPAN  # a lane
    columns = TOKEN_WARPS * WARP_COLUMNS  # a CTA
    B, num_tokens, H, HV, V, size = T.dynamic("B, num_tokens, H, HV, V, size")
    num_bounds, num_h0, num_ht = T.dynamic("num_bounds, num_h0, num_ht")
    rows, num_slots, num_accepted = T.dynamic("rows, num_slots, num_accepted")
    num_entries, num_parents = T.dynamic("num_entries, num_parents")
    bound, index, index_t = T.dynamic("bound, index, index_t")
    entry, parent_rows = T.dynamic("entry, parent_rows")
    x = token_types((B, num_tokens, H, HV), size, V, dtype)

    @T.prim_func
    def verify(
        q: x.q,
        k: x.k,
        v: x.v,
        g: x.g,
        beta: x.beta,
        A_log: x.A_log,
        dt_bias: x.dt_bias,
        cu_seqlens: T.StridedTensor((num_bounds,), (bound,), "int32"),
        state_indices: T.StridedTensor((rows, num_slots), (index, index_t), "int32"),
        accepted: strided("accepted", "n", (num_accepted,), "int32"),
        entry_rows: T.StridedTensor((num_entries,), (entry,), "int32"),
        parents: strided("parent", "n t", (parent_rows, num_parents), "int32"),
        h0: strided("h0", "n h k v", (num_h0, HV, size, V), variant.state),
        ht: strided("ht", "n h k v", (num_ht, HV, size, V), variant.state),
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
            s = tiles(plan)
            r_s = T.alloc_local((blocks, STATE_PIECE, STATE_PIECE), "float32")
            r_o = T.alloc_local((STATE_PIECE,), "float32")
            # variables, so that they are divided as 32-bit numbers, and once
            inputs = Tokens(q, k, v, g, beta, A_log, dt_bias)
            at = Variables("n hv kh slot row k0 column v0 begin length t first place")
            lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() // 32
            v_first = T.bitwise_and(flags, V_FIRST)

            at["n"] = T.truncdiv(cta, V // columns)
            at["v0"] = (cta - at.n * (V // columns)) * columns
            at["hv"] = at.n
            at["n"] = T.truncdiv(at.n, HV)
            at["hv"] -= at.n * HV
            at["kh"] = T.truncdiv(at.hv, T.truncdiv(HV, H))
            at["k0"] = lane_rows(lane, v_first)
            at["column"] = lane_columns(lane, v_first)
            at["column"] += warp * WARP_COLUMNS
            at["column"] += at.v0  # of V; within the CTA it is column - v0
            mine = (at.hv, at.k0, at.column, v_first)
            await_previous()
            at["t"] = 0
            if has(flags, ACCEPTED):
                at["t"] = T.max(T.min(accepted[at.n], num_slots), 1) - 1
            at["slot"] = known_slot(state_indices[at.n, at.t], num_h0, flags)
            at["first"] = 0  # entry of the sequence's first token
            if has(flags, ENTRIES):
                at["first"] = entry_rows[at.n]
                if (at.first < 0) | (at.first >= T.truncdiv(num_ht, steps)):
                    at["slot"] = -1
                at["first"] *= steps
            T.clear(r_s)
            if at.slot >= 0:
                move_blocks(blocks, of_lane(r_s), state_at(h0, at.slot, *mine), size - at.k0)  # 1
            at["row"] = at.n
            at["begin"] = 0
            at["length"] = num_tokens
            if not has(flags, DENSE):
                at["row"] = 0
                # tokens of no sequence, shared out
                at["t"] = inside(cu_seqlens[num_sequences], num_tokens) + at.n
                clear_rows(
                    o, r_o, 0, at.t, num_sequences,
                    T.truncdiv(num_tokens - at.t + num_sequences - 1, num_sequences),
                    at.hv, at.k0, at.column,
                )  # fmt: skip
                sequence_span(cu_seqlens, at.n, num_tokens, at.begin, at.length)

            if at.slot < 0:
                clear_rows(o, r_o, at.row, at.begin, 1, at.length, at.hv, at.k0, at.column)
            else:
                for tile in rolled(T.ceildiv(at.length, TOKEN_WARPS)):
                    if tile > 0:
                        T.sync_threads()
                    if tile * TOKEN_WARPS + warp < at.length:
                        at["t"] = at.begin + tile * TOKEN_WARPS + warp
                        prepare(inputs, dtype, s, warp, at, scale, beta_range, flags)
                    T.sync_threads()
                    for i in rolled(T.min(TOKEN_WARPS, at.length - tile * TOKEN_WARPS)):
                        at["t"] = tile * TOKEN_WARPS + i  # within the sequence
                        if has(flags, TREE):
                            if (at.t > 0) & (at.t < parents.shape[1]):
                                parent = parents[at.n, at.t]
                                if (parent < at.t) & (parent != at.t - 1):  # 3
                                    if parent < 0:
                                        here = state_at(h0, at.slot, *mine)
                                        move_blocks(blocks, of_lane(r_s), here, size - at.k0)
                                    else:
                                        here = state_at(ht, at.first + parent, *mine)
                                        move_blocks(blocks, of_lane(r_s), here, size - at.k0)
                        if v_first == 0:
                            step(r_s, r_o, s, i, at.k0, at.column - at.v0, False)
                        else:
                            step(r_s, r_o, s, i, at.k0, at.column - at.v0, True)
                        if at.k0 == 0:
                            move_four(o[at.row, at.begin + at.t, at.hv, at.column], r_o[0])
                        if at.t < steps:
                            at["place"] = -1
                            if has(flags, ENTRIES):
                                at["place"] = at.first + at.t
                            if has(flags, SLOTS):
                                at["place"] = known_slot(state_indices[at.n, at.t], num_ht, flags)
                            if at.place >= 0:
                                move_blocks(  # 5
                                    blocks,
                                    state_at(ht, at.place, *mine),
                                    of_lane(r_s),
                                    size - at.k0,
                                )

    return verify
