"""Writes the forward's results: o from shared memory or from registers, and lse2.

A partial tile of o goes out by rows, as the rows behind it are another node's.
"""

import qla_kernels.tile.language as T
from qla_kernels.dualkv.kernels.items import BOX, HEAD_SLOT, PANEL, head_of
from qla_kernels.dualkv.shapes import TOK0, TOKENS
from qla_kernels.tile.loops import rolled

# In registers a thread has two rows of o; lanes of a quad have neighbouring pairs of columns. They
# exchange them, 4 x 4 numbers of 32 bits, so that each has 16 bytes of a row to write.
PUT_ROW = """
namespace qla {
template <int kD>
__device__ __forceinline__ void put_row(void *row, bool has_token, const void *r_o16, int h) {
  const unsigned *o = static_cast<const unsigned *>(r_o16) + h;
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kD / 32; ++n) {
    unsigned x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = o[8 * n + 2 * i];
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & bit) continue;
        const unsigned got = __shfl_xor_sync(~0u, lane & bit ? x[i] : x[i | bit], bit);
        x[i] = lane & bit ? got : x[i];
        x[i | bit] = lane & bit ? x[i | bit] : got;
      }
    }
    if (has_token) static_cast<uint4 *>(row)[4 * n + lane] = make_uint4(x[0], x[1], x[2], x[3]);
  }
}
}  // namespace qla
"""


@T.macro
def put_rows(o, r_o16, w, token, rows, slot, tile_log2):
    """Writes a warpgroup's rows of o from registers to global memory, for rows with a token."""
    thread = T.get_thread_binding()
    for h in T.unroll(2):
        row = w * 64 + thread // 32 * 16 + h * 8 + thread % 32 // 4
        tok = row & (1 << tile_log2) - 1
        T.call_extern(
            "handle",
            f"qla::put_row<{r_o16.shape[1]}>",
            T.access_ptr(o[token + tok, head_of(slot, row, tile_log2), 0], "w", r_o16.shape[1]),
            tok < rows,
            r_o16.data,
            h,
        )


@T.macro
def put_lse2(lse2, r_lse2, w, token, rows, slot, tile_log2):
    """Writes lse2 of a warpgroup's rows from registers to global memory, for rows with a token.

    The four threads of a quad hold the same two rows; the first one writes both.
    """
    thread = T.get_thread_binding()
    for h in T.unroll(2):
        row = w * 64 + thread // 32 * 16 + h * 8 + thread % 32 // 4
        tok = row & (1 << tile_log2) - 1
        if (thread % 4 == 0) & (tok < rows):
            lse2[head_of(slot, row, tile_log2), token + tok] = r_lse2[h]


@T.macro
def store(o, s, ring, tile_log2, q_shift):
    work = ring.work
    j, token, rows, slot = (T.alloc_var("int32") for _ in range(4))
    j = 0
    work.wait(0)
    slot = s.work[0, HEAD_SLOT]
    while slot >= 0:
        token = s.work[work.slot(j), TOK0] - q_shift
        rows = s.work[work.slot(j), TOKENS]
        work.release(j)
        for w in rolled(2):
            ring.o.wait(2 * j + w)
            if rows == 1 << tile_log2:  # 6
                for b in rolled(64 // BOX):
                    row = w * 64 + b * BOX
                    tok = token + (row & (1 << tile_log2) - 1)
                    for c in T.unroll(o.shape[2] // PANEL):
                        T.tma_copy(
                            s.o[w, b * BOX : b * BOX + BOX, c * PANEL : c * PANEL + PANEL],
                            o[
                                tok : tok + BOX,
                                head_of(slot, row, tile_log2),
                                c * PANEL : c * PANEL + PANEL,
                            ],
                        )
                T.tma_store_wait(0)
            else:
                store_rows(o, s.o, w, slot, token, rows, tile_log2)
            ring.o.release(2 * j + w)
        j += 1
        work.wait(j)
        slot = s.work[work.slot(j), HEAD_SLOT]


@T.macro
def store_rows(o, s_o, w, slot, token, rows, tile_log2):
    pieces = o.shape[2] // 8  # of 16 bytes, in a row
    lane = T.get_thread_binding() % 32
    for b in rolled(64 * pieces // 32):
        r = (b * 32 + lane) // pieces
        tok = w * 64 + r & (1 << tile_log2) - 1
        if tok < rows:
            for e in T.vectorized(8):
                o[token + tok, head_of(slot, w * 64 + r, tile_log2), lane % pieces * 8 + e] = s_o[
                    w, r, lane % pieces * 8 + e
                ]
