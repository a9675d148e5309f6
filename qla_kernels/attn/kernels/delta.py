"""delta -- the row statistics of an attention's backward: delta, and LSE in base 2.

Per row (one head of one token):
    delta = sum_d dO O - dLSE        then dS = P (dP - delta) includes the gradient of LSE
    lse2  = LSE in base 2            then P = exp2(scale log2(e) S - lse2)
A row that saw no key (LSE = -inf) gets lse2 = +inf, hence P = 0; so do the rows of padding.

Steps (numbers appear again in the role), for 8 threads a row:
    1 rows   8 elements out of each 64 of O's and dO's row into every thread
    2 rows   the sum in fp32, over the row's threads
    3 rows   lse2 and delta out

Bounded by memory: O and dO are read once, 16 bytes a thread at a time; 8 bytes a row are written.
Why this shape: as in gdn.l2norm_bwd, 8 threads read two tensors' rows of one token and head. In
`stats` a head's tokens are adjacent, so that one TMA box reads lse2 and delta of consecutive
queries; its rows are padded to multiples of 16 bytes, which TMA needs. All other tensors may have
any strides between rows.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.tile.schedule import Role, Schedule
from qla_kernels.tile.strided import strided

PIECE = 8  # elements of 16 bits in a 16-byte access
SPAN = 64  # elements of a row that its threads cover at a time
ROW_THREADS = SPAN // PIECE
ROW_STEPS = 3  # log2(ROW_THREADS): a sum over a row's threads

LSE2, DELTA = 0, 1  # rows of `stats`

SOURCE = """
namespace qla {
template <class T>
__device__ __forceinline__ void load_16_bytes(T *to, const T *from) {
  *reinterpret_cast<uint4 *>(to) = __ldg(reinterpret_cast<const uint4 *>(from));
}
}  // namespace qla
"""


class Variant(NamedTuple):
    dtype: str  # of o and do
    wide: bool = False  # D is up to 256; else up to 128


VARIANTS = tuple(
    Variant(dtype, wide) for wide in (False, True) for dtype in ("bfloat16", "float16")
)


def most_spans(variant: Variant) -> int:
    """Returns the largest number of spans of a row."""
    return 4 if variant.wide else 2


PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_safe_memory_legalize": True,  # rows and spans past the last are guarded
}


def schedule(variant: Variant) -> Schedule:
    # three quarters of an SM's threads, or half of them: two rows need their registers
    regs, ctas_per_sm = (64, 4) if variant.wide else (40, 6)
    return Schedule(
        roles=(Role("rows", warps=8, regs=regs, computes="lse2, delta"),), ctas_per_sm=ctas_per_sm
    )


@T.macro
def rows(o, do, lse, dlse, stats, variant, row, lse_factor, with_dlse, column):
    dtype, most = variant.dtype, most_spans(variant)
    num_tokens, num_spans = o.shape[1], o.shape[3]
    batch, num_heads, num_padded = stats.shape[0], stats.shape[1], stats.shape[3]
    r_o = T.alloc_local((most, PIECE), dtype)
    r_do = T.alloc_local((most, PIECE), dtype)
    total, row_lse = T.alloc_var("float32"), T.alloc_var("float32")
    # held in 32-bit variables, so that each division is 32-bit and done once
    b, token, head = (T.alloc_var("int32") for _ in range(3))
    token = T.truncdiv(row, num_heads)
    head = row - token * num_heads
    b = T.truncdiv(token, num_padded)
    token = token - b * num_padded
    total = 0.0
    row_lse = -T.infinity("float32")
    if (b < batch) & (token < num_tokens):
        for span in T.unroll(most):  # 1
            if span < num_spans:
                for x, r_x in ((o, r_o), (do, r_do)):
                    T.call_extern(
                        "handle",
                        "qla::load_16_bytes",
                        T.access_ptr(r_x[span, 0], "w", PIECE),
                        T.access_ptr(x[b, token, head, span, column], "r", PIECE),
                    )
        row_lse = lse[b, head, token] * lse_factor
        if (with_dlse != 0) & (column == 0):
            total = -dlse[b, head, token]
        for span in T.unroll(most):
            if span < num_spans:
                for e in T.unroll(PIECE):
                    total += T.cast(r_o[span, e], "float32") * T.cast(r_do[span, e], "float32")
    for step in T.unroll(ROW_STEPS):  # 2
        total += T.shfl_xor(total, 1 << step)
    if (b < batch) & (column == 0):  # 3
        if row_lse == -T.infinity("float32"):
            row_lse = T.infinity("float32")
        stats[b, head, LSE2, token] = row_lse
        stats[b, head, DELTA, token] = total


def build(variant: Variant):
    plan = schedule(variant)
    block_rows = plan.threads // ROW_THREADS
    batch, num_tokens, num_heads, num_spans = T.dynamic("batch, num_tokens, num_heads, num_spans")
    num_padded = T.dynamic("num_padded")
    row_shape = (batch, num_tokens, num_heads, num_spans, SPAN)
    row_axes = f"batch token head {SPAN}"
    lse_shape, lse_axes = (batch, num_heads, num_tokens), "batch head token"

    @T.prim_func
    def delta(
        o: strided("o", row_axes, row_shape, variant.dtype),
        do: strided("do", row_axes, row_shape, variant.dtype),
        lse: strided("lse", lse_axes, lse_shape, "float32"),
        dlse: strided("dlse", lse_axes, lse_shape, "float32"),
        stats: T.Tensor((batch, num_heads, 2, num_padded), "float32"),
        lse_factor: T.float32,  # log2(e) if lse is natural, 1 if it is in base 2
        with_dlse: T.int32,  # 0: dlse is not read
    ):
        num_rows = batch * num_padded * num_heads
        with T.Kernel(T.ceildiv(num_rows, block_rows), threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            tx = T.get_thread_binding()
            row = block * block_rows + tx // ROW_THREADS
            column = tx % ROW_THREADS * PIECE
            rows(o, do, lse, dlse, stats, variant, row, lse_factor, with_dlse, column)

    return delta
