// Rows of P for the few new tokens of a chunk, and the rows of A that there are, with the arithmetic
// of gated_tiles.cuh, which this file needs. K Q^T replaces Q K^T, with 8 columns, one for each new token: an element is a sum of
// the same products in the same steps, so it has the same bits.
#pragma once

namespace qla {

// Starts kk = k k^T and kq = k q^T, for tiles k [64][K] and q [8][K] in 128-byte swizzled panels of
// 64 columns. Register 2h + e of kq in lane 4g + t of warp W is row 16W + 8h + g, column 2t + e.
template <int K, class T>
__device__ __forceinline__ void start_row_products(float *kk, float *kq, const T *k, const T *q) {
  tl::GmmaDescriptor kt, qt;
  tl::initialize_wgmma_descriptor<1, 1, 64>(kt, const_cast<T *>(k));
  tl::initialize_wgmma_descriptor<1, 1, 64>(qt, const_cast<T *>(q));
  tl::warpgroup_fence_operand(kk, 32);
  tl::warpgroup_fence_operand(kq, 4);
  tl::warpgroup_arrive();
#pragma unroll
  for (int i = 0; i < K / 16; ++i) {
    const int step = (i / 4 * 64 * 128 + i % 4 * 32) >> 4;  // in the descriptor's 16-byte units
    tl::wgmma_ss<Kind<T>::value, Kind<T>::value, tl::DataType::kFloat32, 64, 64, 16, false, false,
                 1, 1>(uint64_t(kt + step), uint64_t(kt + step),
                       reinterpret_cast<uint32_t *>(kk), i > 0);
  }
#pragma unroll
  for (int i = 0; i < K / 16; ++i) {
    const int left = (i / 4 * 64 * 128 + i % 4 * 32) >> 4;
    const int right = (i / 4 * 8 * 128 + i % 4 * 32) >> 4;
    tl::wgmma_ss<Kind<T>::value, Kind<T>::value, tl::DataType::kFloat32, 64, 8, 16, false, false,
                 1, 1>(uint64_t(kt + left), uint64_t(qt + right),
                       reinterpret_cast<uint32_t *>(kq), i > 0);
  }
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(kk, 32);
  tl::warpgroup_fence_operand(kq, 4);
}

__device__ __forceinline__ void finish_row_products(float *kk, float *kq) {
  tl::wait_wgmma<0>();
  tl::warpgroup_fence_operand(kk, 32);
  tl::warpgroup_fence_operand(kq, 4);
}

// Writes P's rows `first` to first + count - 1 to rows 0 to count - 1 of a swizzled tile [8][64],
// and zeros to rows that are not in this chunk.
template <class T>
__device__ __forceinline__ void put_new_scores(const float *kq, const float *gates, T *p,
                                               float scale, int first, int count) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, w = warp_in_group();
  const float *gamma = gates, *fall = gates + 128;
  const float end = gamma[16 * w + 15];
  unsigned short *out = reinterpret_cast<unsigned short *>(p);
  const T *kind = nullptr;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int c = 2 * t + e, row = first + c;
    const bool here = c < count && row >= 0 && row < 64;
    const float of_row = gamma[here ? row : 0];
    const float factor = scale * exp2f(of_row - end);  // for blocks left of the row's own
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int j = 16 * w + 8 * h + g;
      const float x = kq[2 * h + e];
      const float within = scale * exp2f(of_row - gamma[j]) * x, left = x * fall[j] * factor;
      const float score = here && j <= row ? (row >> 4 == w ? within : left) : 0.f;
      out[64 * c + 8 * (j >> 3 ^ c) + (j & 7)] = round_pair(kind, score, 0.f) & 0xffffu;
    }
  }
}

// Clears columns from `rows` on of a rounded [64][64] accumulator, in which a register holds columns
// c and c + 1 of a row.
template <class T> __device__ __forceinline__ void clear_columns(T *x, int rows) {
  unsigned *pairs = reinterpret_cast<unsigned *>(x);
  const int left = rows - 2 * (threadIdx.x & 3);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const unsigned kept = left > 8 * j + 1 ? ~0u : left > 8 * j ? 0xffffu : 0u;
    pairs[2 * j] &= kept;
    pairs[2 * j + 1] &= kept;
  }
}

// Solves one block column of A down to block row `last`, as solve_column does to the end.
template <class T>
__device__ __forceinline__ void solve_column_to(half_t *s, T *tile, int column, int last) {
  if (column >= last) return;
  Operand x[3];  // X_kj^T, from the diagonal down
  tl::ptx_ldmatrix_x4_trans(quarter_row<false>(s, column, column), x[0].r);
#pragma unroll
  for (int below = 1; below < 4; ++below) {
    const int row = column + below;
    if (row > last) return;
    Block sum = {}, y = {};
#pragma unroll
    for (int k = 0; k < below; ++k) multiply_add(sum, x[k], s, row, column + k);
    multiply_add(y, rounded<half_t>(sum), s, row, row);
    put_block<true>(tile, row, column, y);
    if (below < 3) x[below] = rounded<half_t>(y);
  }
}

// Makes the first `rows` rows of A as gated_inverse does. Blocks of 16 rows past them are not
// written, and may hold what an earlier call left there.
template <class T>
__device__ __forceinline__ void gated_inverse_of_rows(float *kk, const float *gates, void *scratch,
                                                      T *a, int rows, int barrier, int turn) {
  const int w = warp_in_group(), last = (rows - 1) >> 4;
  if (rows < 64) clear_rows(kk, rows);
  tl::__sync_thread_partial(barrier, 128);  // the previous call's columns have been read
  if (w <= last) {
    gated_lower(kk, gates, scratch);
    invert_own_diagonal(scratch, a);
  }
  tl::__sync_thread_partial(barrier, 128);
  solve_column_to(static_cast<Scratch *>(scratch)->tile, a, w + turn & 3, last);
}

}  // namespace qla
