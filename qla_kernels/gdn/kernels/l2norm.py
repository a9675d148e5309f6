"""l2norm -- q or k with each head's vector divided by its L2 norm.

Per row (one head of one token): y = x (sum x^2 + 1e-6)^-1/2                         [K]

Steps (numbers appear again in the role), for 8 threads a row:
    1 norm   8 elements of each 64 of the row, as far as it has them, into every thread
    2 norm   sum of squares in fp32, over the row's threads
    3 norm   scaled, rounded once, out

Bounded by memory: x is read once and y written once, 16 bytes a thread at a time.
Why this shape: a row's sum stays in a warp, and the number of pieces of 8 is a runtime value, so
one compiled kernel serves all head sizes up to 128; more, whose threads need twice the registers,
have a variant of their own. x may have any strides that are multiples of 16 bytes.
The compiler cannot know that they are, hence the hand-written load.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.shapes import L2NORM_EPSILON
from qla_kernels.tile.schedule import Role, Schedule
from qla_kernels.tile.strided import strided

PIECE = 8  # elements of 16 bits in a 16-byte access
SPAN = 64  # elements of a row that its threads cover at a time
ROW_THREADS = SPAN // PIECE
ROW_STEPS = 3  # log2(ROW_THREADS): a sum over a row's threads

SOURCE = """
namespace qla {
template <class T>
__device__ __forceinline__ void load_16_bytes(T *to, const T *from) {
  *reinterpret_cast<uint4 *>(to) = __ldg(reinterpret_cast<const uint4 *>(from));
}
}  // namespace qla
"""


class Variant(NamedTuple):
    dtype: str  # of x and y
    wide: bool = False  # K up to 256, not 128

    @property
    def spans(self) -> int:
        """The most spans of a row."""
        return 4 if self.wide else 2

    @property
    def ctas_per_sm(self) -> int:
        return 6 if self.wide else 8  # 8: all the threads an SM holds, which hide memory's latency


VARIANTS = tuple(
    Variant(dtype, wide) for wide in (False, True) for dtype in ("bfloat16", "float16")
)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_safe_memory_legalize": True,  # rows and pieces past the last are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("norm", warps=8, regs=40 if variant.wide else 32, computes="y"),),
        ctas_per_sm=variant.ctas_per_sm,
    )


@T.macro
def load_row(x, r_x, row, piece):
    """Loads a thread's pieces of one row, a head of a token of x [B, T, H, pieces, 8], to r_x.

    They are number `piece` and every eighth one after it.
    """
    num_tokens, num_heads, num_pieces = x.shape[1:4]
    # variables, so that they are divided as 32-bit numbers, and once
    i_batch, i_token, head = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    i_token = T.truncdiv(row, num_heads)
    head = row - i_token * num_heads
    i_batch = T.truncdiv(i_token, num_tokens)
    i_token = i_token - i_batch * num_tokens
    for span in T.unroll(r_x.shape[0]):
        if span * ROW_THREADS + piece < num_pieces:
            T.call_extern(
                "handle",
                "qla::load_16_bytes",
                T.access_ptr(r_x[span, 0], "w", PIECE),
                T.access_ptr(x[i_batch, i_token, head, span * ROW_THREADS + piece, 0], "r", PIECE),
            )


@T.macro
def norm(variant, x, y, row, piece):
    most, dtype, num_rows, num_pieces = variant.spans, variant.dtype, *y.shape[:2]
    r_x = T.alloc_local((most, PIECE), dtype)
    r_y = T.alloc_local((PIECE,), dtype)
    total = T.alloc_var("float32")
    total = 0.0
    if row < num_rows:
        load_row(x, r_x, row, piece)  # 1
        for span in T.unroll(most):
            if span * ROW_THREADS + piece < num_pieces:
                for e in T.unroll(PIECE):
                    total += T.cast(r_x[span, e], "float32") * T.cast(r_x[span, e], "float32")
    for step in T.unroll(ROW_STEPS):  # 2
        total += T.shfl_xor(total, 1 << step)
    total = T.rsqrt(total + L2NORM_EPSILON)
    if row < num_rows:
        for span in T.unroll(most):
            if span * ROW_THREADS + piece < num_pieces:
                for e in T.unroll(PIECE):
                    r_y[e] = T.cast(r_x[span, e], "float32") * total
                for e in T.vectorized(PIECE):  # 3
                    y[row, span * ROW_THREADS + piece, e] = r_y[e]


def build(variant: Variant):
    plan = schedule(variant)
    rows = plan.threads // ROW_THREADS  # a CTA
    batch, num_tokens, num_heads, num_pieces = T.dynamic("batch, num_tokens, num_heads, num_pieces")
    num_rows = T.dynamic("num_rows")
    shape = (batch, num_tokens, num_heads, num_pieces, PIECE)

    @T.prim_func
    def l2norm(
        x: strided("x", "batch token head", shape, variant.dtype),
        y: T.Tensor((num_rows, num_pieces, PIECE), variant.dtype),
    ):
        with T.Kernel(T.ceildiv(num_rows, rows), threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            tx = T.get_thread_binding()
            row = block * rows + tx // ROW_THREADS
            piece = tx % ROW_THREADS
            norm(variant, x, y, row, piece)

    return l2norm
