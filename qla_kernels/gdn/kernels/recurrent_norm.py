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
and is a factor of each column by the time that o is there. With `STATES_AHEAD`, S is loaded while
the kernel before runs, which must write neither states nor indices, and must itself have waited for
all earlier ones: a step's convolution, whose time disappears behind that of the loads.
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
    Token,
    has,
    known_slot,
    move_blocks,
    move_four,
    number,
    prepare,
    step,
)
from qla_kernels.gdn.shapes import STATE_PIECE
from qla_kernels.tile.constants import LOG2E
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.schedule import Role, Schedule

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
        smem_bytes=(2 * variant.K + 3 * variant.V + 4 + warps) * 4,  # the two scalars have 16 bytes
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
    plan = schedule(variant)
    blocks = variant.K // KEY_SPAN  # a lane
    warps = variant.V // WARP_COLUMNS
    B, H, HV, num_indices, num_slots = T.dynamic("B, H, HV, num_indices, num_slots")
    sizes = g_size, beta_size, A_size, dt_size = T.dynamic("g_size, beta_size, A_size, dt_size")
    weight_size, weight_v = T.dynamic("weight_size, weight_v")
    q_b, q_t, q_h, k_b, k_t, k_h = T.dynamic("q_b, q_t, q_h, k_b, k_t, k_h")
    v_b, v_t, v_h, g_b, g_t, g_h = T.dynamic("v_b, v_t, v_h, g_b, g_t, g_h")
    beta_b, beta_t, beta_h, beta_v = T.dynamic("beta_b, beta_t, beta_h, beta_v")
    A_h, dt_h, index, z_b, z_h = T.dynamic("A_h, dt_h, index, z_b, z_h")
    state_n, state_h, state_k, state_v = T.dynamic("state_n, state_h, state_k, state_v")

    @T.prim_func
    def recurrent_norm(
        q: T.StridedTensor((B, 1, H, variant.K), (q_b, q_t, q_h, 1), variant.dtype),
        k: T.StridedTensor((B, 1, H, variant.K), (k_b, k_t, k_h, 1), variant.dtype),
        v: T.StridedTensor((B, 1, HV, variant.V), (v_b, v_t, v_h, 1), variant.dtype),
        # as bytes: fp32, or the dtype of q
        g: T.StridedTensor((B, 1, HV, g_size), (g_b, g_t, g_h, 1), "uint8"),
        beta: T.StridedTensor(
            (B, 1, HV, variant.V, beta_size), (beta_b, beta_t, beta_h, beta_v, 1), "uint8"
        ),
        A_log: T.StridedTensor((HV, A_size), (A_h, 1), "uint8"),
        dt_bias: T.StridedTensor((HV, dt_size), (dt_h, 1), "uint8"),
        z: T.StridedTensor((B, HV, variant.V), (z_b, z_h, 1), variant.dtype),
        weight: T.StridedTensor((variant.V, weight_size), (weight_v, 1), "uint8"),
        state_indices: T.StridedTensor((num_indices,), (index,), "int32"),
        states: T.StridedTensor(
            (num_slots, HV, variant.K, variant.V),
            (state_n, state_h, state_k, state_v),
            variant.state,
        ),
        y: T.Tensor((B, HV, variant.V), variant.dtype),
        scale: T.float32,
        beta_range: T.float32,  # 1 or 2 where beta goes through a sigmoid, else 0
        eps: T.float32,
        flags: T.int32,
    ):
        with T.Kernel(B * HV, threads=plan.threads) as cta:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            s_q = T.alloc_shared((1, variant.K), "float32")
            s_k = T.alloc_shared((1, variant.K), "float32")
            s_v = T.alloc_shared((1, variant.V), "float32")
            s_beta = T.alloc_shared((1, variant.V), "float32")
            s_scalars = T.alloc_shared((1, 2), "float32")
            s_gate = T.alloc_shared((variant.V,), "float32")
            s_squares = T.alloc_shared((warps,), "float32")
            s = Token(s_q, s_k, s_v, s_beta, s_scalars)
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
            k0 = (
                T.if_then_else(v_first == 0, lane // STATE_PIECE, lane % COLUMN_LANES) * STATE_PIECE
            )
            column = (
                T.if_then_else(v_first == 0, lane % STATE_PIECE, lane // COLUMN_LANES) * STATE_PIECE
            )
            column += warp * WARP_COLUMNS
            if not has(flags, STATES_AHEAD):
                await_previous()
            slot = known_slot(state_indices[n], num_slots, flags)
            across = T.if_then_else(v_first == 0, state_k, state_v)
            if slot >= 0:
                move_blocks(  # 1
                    blocks,
                    (r_in[0, 0, 0], STATE_PIECE * STATE_PIECE, STATE_PIECE),
                    (states[slot, hv, k0, column], KEY_SPAN * state_k, across),
                )
                if warp == 1:
                    gate_columns(z, weight, weight_size, variant.dtype, s_gate, n, hv, flags)
            if has(flags, STATES_AHEAD):
                await_previous()
            if slot >= 0:
                if warp == 0:
                    prepare(  # 3
                        q, k, v, g, beta, A_log, dt_bias, sizes, variant.dtype, s, 0,
                        n, 0, kh, hv, 0, scale, beta_range, flags,
                    )  # fmt: skip
                T.sync_threads()
                widen(r_s, r_in)
                if v_first == 0:
                    step(r_s, r_o, s, 0, k0, column, False)  # 4
                else:
                    step(r_s, r_o, s, 0, k0, column, True)
                sum_squares(r_o, s_squares)
                move_blocks(  # 5
                    blocks,
                    (states[slot, hv, k0, column], KEY_SPAN * state_k, across),
                    (r_s[0, 0, 0], STATE_PIECE * STATE_PIECE, STATE_PIECE),
                )
                T.sync_threads()
                norm(r_o, s_gate, s_squares, eps, column)
            else:
                T.clear(r_o)
            if k0 == 0:
                move_four(y[n, hv, column], r_o[0])

    return recurrent_norm
