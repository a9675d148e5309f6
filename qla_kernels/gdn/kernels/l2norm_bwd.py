"""l2norm_bwd -- the gradient of l2norm's input, q or k, from the gradient of its output.

Per row (one head of one token), with r = (sum x^2 + 1e-6)^-1/2:
    dx = r dy - r^3 <dy, x> x                                                         [K]

Steps (numbers appear again in the role), for 8 threads a row:
    1 norm   8 elements of each 64 of both rows, as far as they have them, into every thread
    2 norm   both sums in fp32, over the row's threads
    3 norm   dx, rounded once, out; 0 for a token of no sequence, whose x may be NaN

Bounded by memory: x and dy are read once and dx written once, 16 bytes a thread at a time.
Why this shape: as l2norm. The forward saves no norm for this kernel, because summing it again costs
less than reading it. x and dy may have different strides.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.l2norm import (
    PIECE,
    ROW_STEPS,
    ROW_THREADS,
    SOURCE,
    load_row,
)
from qla_kernels.gdn.kernels.tables import inside
from qla_kernels.gdn.shapes import L2NORM_EPSILON
from qla_kernels.tile.schedule import Role, Schedule
from qla_kernels.tile.strided import strided


class Variant(NamedTuple):
    dtype: str  # of x, dy and dx
    wide: bool = False  # as in l2norm

    @property
    def spans(self) -> int:
        """The most spans of a row."""
        return 4 if self.wide else 2


VARIANTS = tuple(
    Variant(dtype, wide) for wide in (False, True) for dtype in ("bfloat16", "float16")
)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_safe_memory_legalize": True,  # rows and pieces past the last are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("norm", warps=8, regs=64 if variant.wide else 40, computes="dx"),),
        # fewer threads than an SM holds: two rows need more registers than one
        ctas_per_sm=4 if variant.wide else 6,
    )


@T.macro
def norm(variant, x, dy, dx, row, num_live, piece):
    most, dtype, num_rows, num_pieces = variant.spans, variant.dtype, *dx.shape[:2]
    r_x = T.alloc_local((most, PIECE), dtype)
    r_dy = T.alloc_local((most, PIECE), dtype)
    r_dx = T.alloc_local((PIECE,), dtype)
    square, dot = T.alloc_var("float32"), T.alloc_var("float32")
    square = 0.0
    dot = 0.0
    if row < num_live:
        load_row(x, r_x, row, piece)  # 1
        load_row(dy, r_dy, row, piece)
        for span in T.unroll(most):
            if span * ROW_THREADS + piece < num_pieces:
                for e in T.unroll(PIECE):
                    square += T.cast(r_x[span, e], "float32") * T.cast(r_x[span, e], "float32")
                    dot += T.cast(r_dy[span, e], "float32") * T.cast(r_x[span, e], "float32")
    for step in T.unroll(ROW_STEPS):  # 2
        square += T.shfl_xor(square, 1 << step)
        dot += T.shfl_xor(dot, 1 << step)
    square = T.rsqrt(square + L2NORM_EPSILON)
    dot *= square * square * square
    if row < num_rows:
        for span in T.unroll(most):
            if span * ROW_THREADS + piece < num_pieces:
                for e in T.unroll(PIECE):
                    r_dx[e] = 0
                    if row < num_live:
                        r_dx[e] = (
                            T.cast(r_dy[span, e], "float32") * square
                            - T.cast(r_x[span, e], "float32") * dot
                        )
                for e in T.vectorized(PIECE):  # 3
                    dx[row, span * ROW_THREADS + piece, e] = r_dx[e]


def build(variant: Variant):
    plan = schedule(variant)
    rows = plan.threads // ROW_THREADS  # a CTA
    batch, num_tokens, num_heads, num_pieces = T.dynamic("batch, num_tokens, num_heads, num_pieces")
    num_rows = T.dynamic("num_rows")
    shape = (batch, num_tokens, num_heads, num_pieces, PIECE)

    @T.prim_func
    def l2norm_bwd(
        x: strided("x", "batch token head", shape, variant.dtype),
        dy: strided("dy", "batch token head", shape, variant.dtype),
        dx: T.Tensor((num_rows, num_pieces, PIECE), variant.dtype),
        end: T.Tensor((1,), "int32"),  # tokens that belong to a sequence, if `packed`
        packed: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_rows, rows), threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            tx = T.get_thread_binding()
            row = block * rows + tx // ROW_THREADS
            piece = tx % ROW_THREADS
            num_live = T.alloc_var("int32")
            num_live = num_rows
            if packed != 0:
                num_live = inside(end[0], num_tokens) * num_heads
            norm(variant, x, dy, dx, row, num_live, piece)

    return l2norm_bwd
