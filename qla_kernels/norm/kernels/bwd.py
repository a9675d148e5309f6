"""bwd -- the gradients of the gated norm's input and gate, and sums for those of its weight.

Per row (one head of one token), with r = (mean x^2 + eps)^-1/2 and u = dy act(gate):
    dx    = r u w - r^3 mean(u w x) x                                                     [V]
    dgate = dy act'(gate) w x r                                                           [V]
and per CTA, over its rows:
    sums  = sum u x r                                                                     [V]
Rows of tokens behind the last sequence get dx = 0 and dgate = 0, and add nothing.

Steps (numbers appear again in the role), for the threads of a row:
    1 grad   load the pieces of the rows that the thread takes next
    2 grad   the factors of r, and both sums in fp32, over the row's threads
    3 grad   dx and dgate, rounded once, out; add to the thread's sums
    4 grad   sums over the rows of a warp, then over the warps, through shared memory

Bounded by memory: x, gate and dy are read once, dx and dgate written once.
Why this shape: as fwd. The forward saves no r: x is read anyway, and its squares are summed beside
the other sum. Sums of weights stay in registers until the CTA has no more rows; their order is
fixed by the number of CTAs, and needs no atomics.
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
    dtype: str  # of x, gate, dy, dx and dgate
    V: int  # the most columns of a row


VARIANTS = tuple(Variant(dtype, V) for V in COLUMNS for dtype in ("bfloat16", "float16"))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # written out: once, before the warps' sums are added
    "tl.disable_safe_memory_legalize": True,  # rows and pieces past the last are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("grad", warps=WARPS, regs=128, computes="dx, dgate, sums"),),
        smem_bytes=WARPS * variant.V * 4,
        ctas_per_sm=2,  # with 96 bytes in flight a thread
    )


@T.macro
def grad(
    x, gate, dy, dx, dgate, weight, weight_dtype, r_total, place, dtype, first, step, num_steps,
    num_rows, inverse_size, eps, silu,
):  # fmt: skip
    r_x, r_gate, r_dy, r_dx, r_dgate = (T.alloc_local((SPANS, PIECE), dtype) for _ in range(5))
    r_w, r_wide, r_u, r_p = (T.alloc_local((SPANS, PIECE), "float32") for _ in range(4))
    r_square, r_dot = T.alloc_local((1,), "float32"), T.alloc_local((1,), "float32")
    row = T.alloc_var("int32")
    row = first
    load_row(x, r_x, place, row)
    load_row(gate, r_gate, place, row)
    load_row(dy, r_dy, place, row)
    load_weights(weight, r_w, place, weight_dtype)
    for _ in rolled(num_steps):
        r_square[0] = 0
        r_dot[0] = 0
        for span in T.unroll(SPANS):
            for e in T.unroll(PIECE):
                r_wide[span, e] = r_x[span, e]
                r_u[span, e] = r_dy[span, e]
                r_p[span, e] = r_gate[span, e]
        load_row(x, r_x, place, row + step)  # 1
        load_row(gate, r_gate, place, row + step)
        load_row(dy, r_dy, place, row + step)
        for span in T.unroll(SPANS):
            for e in T.unroll(PIECE):
                factors(r_wide[span, e], r_w[span, e], r_u, r_p, span, e, silu)  # 2
                r_square[0] += r_wide[span, e] * r_wide[span, e]
                r_dot[0] += r_wide[span, e] * r_w[span, e] * r_u[span, e]
        add_threads(r_square, 0, (place.threads - 1).bit_length())
        add_threads(r_dot, 0, (place.threads - 1).bit_length())
        r_square[0] = T.rsqrt(r_square[0] * inverse_size + eps)
        if row >= place.live_rows:
            r_square[0] = 0
        r_dot[0] = r_dot[0] * inverse_size * r_square[0] * r_square[0] * r_square[0]
        for span in T.unroll(SPANS):
            for e in T.unroll(PIECE):
                r_u[span, e] *= r_square[0]
                r_total[span, e] += r_u[span, e] * r_wide[span, e]
                r_dx[span, e] = r_u[span, e] * r_w[span, e] - r_dot[0] * r_wide[span, e]
                r_dgate[span, e] = r_p[span, e] * r_square[0]
        put_row(dx, r_dx, place, row, num_rows)  # 3
        put_row(dgate, r_dgate, place, row, num_rows)
        row += step


@T.macro
def factors(x, w, r_u, r_p, span, e, silu):
    """Makes dy act(z) of the dy in r_u, and dy act'(z) w x of the gate z in r_p."""
    s, act, slope = (T.alloc_var("float32") for _ in range(3))
    s = logistic(r_p[span, e])
    act = s * T.if_then_else(silu != 0, r_p[span, e], 1)
    slope = act - act * s + T.if_then_else(silu != 0, s, 0)
    r_p[span, e] = r_u[span, e] * slope * w * x
    r_u[span, e] = r_u[span, e] * act


@T.macro
def add_warps(sums, s_sum, r_total, place, block):
    """Adds r_total over the rows of a warp, then over the warps in their order: step 4."""
    tx, r_one = T.get_thread_binding(), T.alloc_local((1,), "float32")
    num_warps, most = s_sum.shape
    column = T.alloc_var("int32")
    for span in T.unroll(SPANS):
        for e in T.unroll(PIECE):
            r_one[0] = r_total[span, e]
            add_threads(r_one, (place.threads - 1).bit_length(), 5)
            r_total[span, e] = r_one[0]
        if tx % 32 < place.threads:
            for e in T.vectorized(PIECE):
                s_sum[tx // 32, place.piece(span) * PIECE + e] = r_total[span, e]
    T.sync_threads()
    for i in T.unroll(-(-most // (32 * num_warps))):
        column = i * 32 * num_warps + tx
        if column < sums.shape[1]:
            r_one[0] = 0
            for warp in T.unroll(num_warps):
                r_one[0] += s_sum[warp, column]
            sums[block, column] = r_one[0]


def build(variant: Variant):
    plan = schedule(variant)
    threads, rows = row_threads(variant.V), pass_rows(variant.V)
    num_tokens, num_heads, num_pieces = T.dynamic("num_tokens, num_heads, num_pieces")
    x_token, x_head, gate_token, gate_head = T.dynamic("x_token, x_head, gate_token, gate_head")
    dy_token, dy_head, num_rows, weight_bytes = T.dynamic(
        "dy_token, dy_head, num_rows, weight_bytes"
    )
    blocks, num_columns = T.dynamic("blocks, num_columns")

    @T.prim_func
    def bwd(
        dy: T.StridedTensor(
            (num_tokens, num_heads, num_pieces, PIECE), (dy_token, dy_head, PIECE, 1), variant.dtype
        ),
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
        dx: T.Tensor((num_rows, num_pieces, PIECE), variant.dtype),
        dgate: T.Tensor((num_rows, num_pieces, PIECE), variant.dtype),
        sums: T.Tensor((blocks, num_columns), "float32"),
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
            s_sum = T.alloc_shared((WARPS, variant.V), "float32")
            r_total = T.alloc_local((SPANS, PIECE), "float32")
            live, num_steps = T.alloc_var("int32"), T.alloc_var("int32")
            num_steps = T.truncdiv(num_rows - block * rows + blocks * rows - 1, blocks * rows)
            live = live_rows(end[0], num_tokens, num_heads, packed)
            place = Place(threads, tx % threads, live, num_heads, num_pieces)
            T.clear(r_total)
            grad(
                x, gate, dy, dx, dgate, weight, weight_dtype, r_total, place, variant.dtype,
                block * rows + tx // threads, blocks * rows,
                num_steps, num_rows, inverse_size, eps, silu,
            )  # fmt: skip
            add_warps(sums, s_sum, r_total, place, block)

    return bwd
