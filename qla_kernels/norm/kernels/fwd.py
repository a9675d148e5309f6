"""fwd -- RMSNorm of each head, times a weight and an output gate.

Per row (one head of one token), with r = (mean x^2 + eps)^-1/2:
    y = x r w act(gate)            act(z) = z / (1 + e^-z), or 1 / (1 + e^-z)            [V]
Rows of tokens behind the last sequence get y = 0.

Steps (numbers appear again in the role), for the threads of a row:
    1 norm   load the pieces of the row that the thread takes next
    2 norm   sum of squares in fp32, over the row's threads
    3 norm   y, rounded once, out

Bounded by memory: x and gate are read once and y written once, 16 bytes a thread at a time.
Why this shape: as many CTAs as fit walk all rows, so weights are loaded once a thread, and each
thread always has its pieces of the next row in flight, 64 bytes. A thread has two pieces of a row,
whatever V: few registers, and few shuffles for a small V. V, the activation, strides and the
weight's dtype are run-time values.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.norm.kernels.rows import (
    SOURCE,
    Place,
    add_threads,
    live_rows,
    load_row,
    load_weights,
    logistic,
    put_row,
)
from qla_kernels.norm.shapes import COLUMNS, PIECE, SPANS, WARPS, pass_rows, row_threads
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule


class Variant(NamedTuple):
    dtype: str  # of x, gate and y
    V: int  # the most columns of a row


VARIANTS = tuple(Variant(dtype, V) for V in COLUMNS for dtype in ("bfloat16", "float16"))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_safe_memory_legalize": True,  # rows and pieces past the last are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("norm", warps=WARPS, regs=80, computes="y"),),
        ctas_per_sm=3,  # with 64 bytes in flight a thread
    )


@T.macro
def norm(
    x, gate, y, weight, weight_dtype, place, dtype, first, step, num_steps, num_rows, inverse_size,
    eps, silu,
):  # fmt: skip
    r_x, r_gate = T.alloc_local((SPANS, PIECE), dtype), T.alloc_local((SPANS, PIECE), dtype)
    r_y = T.alloc_local((SPANS, PIECE), dtype)
    r_w, r_wide, r_z = (T.alloc_local((SPANS, PIECE), "float32") for _ in range(3))
    r_sum = T.alloc_local((1,), "float32")
    row = T.alloc_var("int32")
    row = first
    load_row(x, r_x, place, row)
    load_row(gate, r_gate, place, row)
    load_weights(weight, r_w, place, weight_dtype)
    for _ in rolled(num_steps):
        r_sum[0] = 0
        for span in T.unroll(SPANS):
            for e in T.unroll(PIECE):
                r_wide[span, e] = r_x[span, e]
                r_z[span, e] = r_gate[span, e]
                r_sum[0] += r_wide[span, e] * r_wide[span, e]
        load_row(x, r_x, place, row + step)  # 1
        load_row(gate, r_gate, place, row + step)
        add_threads(r_sum, 0, (place.threads - 1).bit_length())  # 2
        r_sum[0] = T.rsqrt(r_sum[0] * inverse_size + eps)
        if row >= place.live_rows:
            r_sum[0] = 0
        for span in T.unroll(SPANS):
            for e in T.unroll(PIECE):
                r_y[span, e] = (
                    r_wide[span, e]
                    * r_sum[0]
                    * r_w[span, e]
                    * logistic(r_z[span, e])
                    * T.if_then_else(silu != 0, r_z[span, e], 1)
                )
        put_row(y, r_y, place, row, num_rows)  # 3
        row += step


def build(variant: Variant):
    plan = schedule(variant)
    threads, rows = row_threads(variant.V), pass_rows(variant.V)
    num_tokens, num_heads, num_pieces = T.dynamic("num_tokens, num_heads, num_pieces")
    x_token, x_head, gate_token, gate_head = T.dynamic("x_token, x_head, gate_token, gate_head")
    num_rows, weight_bytes = T.dynamic("num_rows, weight_bytes")

    @T.prim_func
    def fwd(
        x: T.StridedTensor(
            (num_tokens, num_heads, num_pieces, PIECE), (x_token, x_head, PIECE, 1), variant.dtype
        ),
        gate: T.StridedTensor(
            (num_tokens, num_heads, num_pieces, PIECE),
            (gate_token, gate_head, PIECE, 1),
            variant.dtype,
        ),
        weight: T.Tensor((weight_bytes,), "uint8"),  # as bytes of any float dtype
        end: T.Tensor((1,), "int32"),  # tokens that belong to a sequence, if `packed`
        y: T.Tensor((num_rows, num_pieces, PIECE), variant.dtype),
        blocks: T.int32,
        weight_dtype: T.int32,
        packed: T.int32,
        silu: T.int32,  # 0: the gate's activation is the logistic function
        inverse_size: T.float32,  # 1 / V
        eps: T.float32,
    ):
        with T.Kernel(blocks, threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            tx = T.get_thread_binding()
            live, num_steps = T.alloc_var("int32"), T.alloc_var("int32")
            num_steps = T.truncdiv(num_rows - block * rows + blocks * rows - 1, blocks * rows)
            live = live_rows(end[0], num_tokens, num_heads, packed)
            place = Place(threads, tx % threads, live, num_heads, num_pieces)
            norm(
                x, gate, y, weight, weight_dtype, place, variant.dtype,
                block * rows + tx // threads, blocks * rows, num_steps, num_rows, inverse_size,
                eps, silu,
            )  # fmt: skip

    return fwd
