"""recurrent_norm -- one token of the gated delta rule, then RMSNorm and the output gate.

Per sequence and value head, with u, o and S of recurrent.py:
    y = o rsqrt(mean o^2 + eps) w act(z)          [V], rounded once; act is silu or the sigmoid
A sequence of padding gets y = 0, and nothing of it is written.

Steps (numbers appear again in the code); a CTA owns a head, a warp 16 columns of V:
    1 in      S of the sequence's slot
    2 gate    the second warp computes w act(z) to shared memory
    3 token   the first warp prepares the token, as step 2 of recurrent.py
    4 step    u and o; S
    5 out     write S; sum of o^2, over the warp and then over warps in their order
    6 norm    write y

Bounded by memory, as recurrent.py, whose steps it shares; o does not go through memory.
Why this shape: the mean is over all columns of a head, so that a CTA has 8 warps where recurrent
has 4, and an SM holds half as many CTAs. What the gate needs is loaded by a warp that would wait,
and is a factor of each column by the time that o is there. If the kernel before writes neither
states nor indices, and itself waited for all earlier ones, S is loaded while it runs
(`STATES_AHEAD`): it is the convolution of the step, whose time then disappears behind the loads.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.recurrent import (
    COLUMN_LANES,
    KEY_SPAN,
    NULL_ZERO,
    PASS_CONFIGS,
    SOURCE,
    V_FIRST,
    WARP_COLUMNS,
    Tokens,
    has,
    known_slot,
    lane_columns,
    lane_rows,
    move_blocks,
    move_four,
    number,
    of_lane,
    of_state,
    prepare,
    step,
    steps_across,
    token_tiles,
    token_types,
)
from qla_kernels.gdn.shapes import STATE_PIECE
from qla_kernels.tile.constants import LOG2E
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.record import Record
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

__all__ = ["NULL_ZERO", "PASS_CONFIGS", "VARIANTS", "Variant", "build", "schedule"]

# Bits of `flags` besides those of recurrent.py.
SIGMOID, STATES_AHEAD = 1 << 12, 1 << 13


class Variant(NamedTuple):
    dtype: str  # of q, k, v, z, y
    K: int
    V: int
    state: str  # dtype of S in memory


VARIANTS = tuple(
    Variant(dtype, size, size, state)
    for dtype, state in (("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16"))
    for size in (128, 64)
)


def schedule(variant: Variant) -> Schedule:
    warps = variant.V // WARP_COLUMNS
    resident, regs = {128: (2, 128), 64: (6, 80)}[variant.K]
    return Schedule(
        roles=(Role("step", warps=warps, regs=regs, computes="S and y of 16 columns a warp"),),
        tiles={
            **token_tiles(1, variant.K, variant.V),
            "gate": Tile((variant.V,), "float32"),
            "squares": Tile((warps,), "float32"),
        },
        ctas_per_sm=resident,
    )


@T.macro
def gate_columns(z, weight, weight_size, dtype, s_gate, n, hv, flags):
    """Sets s_gate to w act(z) of a head's columns, by one warp: step 2."""
    lane = T.get_thread_binding() % 32
    columns = s_gate.shape[0] // 32
    r_z = T.alloc_local((columns,), "float32")
    r_w = T.alloc_local((columns,), "float32")
    for i in T.unroll(columns):
        r_z[i] = z[n, hv, i * 32 + lane]
        r_w[i] = number(weight[i * 32 + lane, 0], weight_size, dtype)
    for i in T.unroll(columns):
        if not has(flags, SIGMOID):
            r_w[i] *= r_z[i]
        s_gate[i * 32 + lane] = r_w[i] / (1 + T.exp2(-LOG2E * r_z[i]))


@T.macro
def widen(r_s, r_in):
    for b in T.unroll(r_s.shape[0]):
        for i in T.unroll(STATE_PIECE):
            for j in T.unroll(STATE_PIECE):
                r_s[b, i, j] = r_in[b, i, j]


@T.macro
def sum_squares(r_o, s_squares):
    """Writes the sum of a warp's o^2, each column as often as lanes share it: step 5."""
    squares = T.alloc_var("float32")
    squares = 0.0
    for j in T.unroll(STATE_PIECE):
        squares += r_o[j] * r_o[j]
    for d in T.unroll(5):
        squares += T.shfl_xor(squares, 1 << d)
    if T.get_thread_binding() % 32 == 0:
        s_squares[T.get_thread_binding() // 32] = squares


@T.macro
def norm(r_o, s_gate, s_squares, eps, column):
    """Sets a lane's columns of o to y, once the sums of all warps are there: step 6."""
    factor = T.alloc_var("float32")
    factor = 0.0
    for i in T.unroll(s_squares.shape[0]):
        factor += s_squares[i]
    factor = T.rsqrt(factor / (COLUMN_LANES * s_gate.shape[0]) + eps)
    for j in T.unroll(STATE_PIECE):
        r_o[j] = r_o[j] * factor * s_gate[column + j]


def build(variant: Variant):
    plan, dtype, K, V = schedule(variant), variant.dtype, variant.K, variant.V
    blocks = K // KEY_SPAN  # a lane
    B, H, HV, num_indices, num_slots = T.dynamic("B, H, HV, num_indices, num_slots")
    weight_size = T.dynamic("weight_size")
    x = token_types((B, 1, H, HV), K, V, dtype)

    @T.prim_func
    def recurrent_norm(
        q: x.q,
        k: x.k,
        v: x.v,
        g: x.g,
        beta: x.beta,
        A_log: x.A_log,
        dt_bias: x.dt_bias,
        z: strided("z", "b h", (B, HV, V), dtype),
        weight: strided("weight", "v", (V, weight_size), "uint8"),
        state_indices: T.StridedTensor((num_indices,), (T.dynamic("index"),), "int32"),
        states: strided("state", "n h k v", (num_slots, HV, K, V), variant.state),
        y: T.Tensor((B, HV, V), dtype),
        scale: T.float32,
        beta_range: T.float32,  # 1 or 2 where beta goes through a sigmoid, else 0
        eps: T.float32,
        flags: T.int32,
    ):
        with T.Kernel(B * HV, threads=plan.threads) as cta:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            s = tiles(plan)
            r_s = T.alloc_local((blocks, STATE_PIECE, STATE_PIECE), "float32")
            # S as it is in memory, so that nothing waits for it before step 4
            r_in = T.alloc_local((blocks, STATE_PIECE, STATE_PIECE), variant.state)
            r_o = T.alloc_local((STATE_PIECE,), "float32")
            # variables, so that they are divided as 32-bit numbers, and once
            n, hv, kh, slot, k0, column = (T.alloc_var("int32") for _ in range(6))
            lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() // 32
            v_first = T.bitwise_and(flags, V_FIRST)

            n = T.truncdiv(cta, HV)
            hv = cta - n * HV
            kh = T.truncdiv(hv, T.truncdiv(HV, H))
            k0 = lane_rows(lane, v_first)
            column = lane_columns(lane, v_first)
            column += warp * WARP_COLUMNS
            if not has(flags, STATES_AHEAD):
                await_previous()
            slot = known_slot(state_indices[n], num_slots, flags)
            across = steps_across(states, v_first)
            if slot >= 0:
                here = of_state(states[slot, hv, k0, column], states, across)
                move_blocks(blocks, of_lane(r_in), here, K)  # 1
                if warp == 1:
                    gate_columns(z, weight, weight_size, dtype, s.gate, n, hv, flags)
            if has(flags, STATES_AHEAD):
                await_previous()
            if slot >= 0:
                if warp == 0:
                    inputs = Tokens(q, k, v, g, beta, A_log, dt_bias)
                    at = Record(row=n, t=0, kh=kh, hv=hv, v0=0)
                    prepare(inputs, dtype, s, 0, at, scale, beta_range, flags)  # 3
                T.sync_threads()
                widen(r_s, r_in)
                if v_first == 0:
                    step(r_s, r_o, s, 0, k0, column, False)  # 4
                else:
                    step(r_s, r_o, s, 0, k0, column, True)
                sum_squares(r_o, s.squares)
                here = of_state(states[slot, hv, k0, column], states, across)
                move_blocks(blocks, here, of_lane(r_s), K)  # 5
                T.sync_threads()
                norm(r_o, s.gate, s.squares, eps, column)
            else:
                T.clear(r_o)
            if k0 == 0:
                move_four(y[n, hv, column], r_o[0])

    return recurrent_norm
