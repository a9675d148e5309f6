// The two 64x64 tiles that a chunk of the gated delta rule needs, by one warpgroup:
//
//   A = (I + L)^-1,  L_ij = beta_i 2^(gamma_i - gamma_j) <k_i, k_j>   for i > j
//   P_ij = scale 2^(gamma_i - gamma_j) <q_i, k_j>                     for i >= j
//
// from the wgmma accumulators of K K^T and Q K^T (register 4j + 2h + e of lane 4g + t in warp W is
// row 16W + 8h + g, column 8j + 2t + e). `gates` holds three rows of 64: gamma, cumulative and in
// base 2; beta; and fall_j = 2^(gamma_r - gamma_j), r the last token of j's block of 16. Needs
// triangular.cuh.
#pragma once

namespace qla {

// 2^(gamma_i - gamma_j) of a diagonal block.
template <int W>
__device__ __forceinline__ Block diagonal_decay(const float *gamma) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const float row[2] = {gamma[16 * W + g], gamma[16 * W + 8 + g]};
  Block decay;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 column = *reinterpret_cast<const float2 *>(gamma + 16 * W + 8 * n + 2 * t);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      decay.c[4 * n + 2 * h] = exp2f(row[h] - column.x);
      decay.c[4 * n + 2 * h + 1] = exp2f(row[h] - column.y);
    }
  }
  return decay;
}

// A block below the diagonal: x_ij row_i fall_j. With decay as a product of two falls, one up to the
// end of the column's block and one from there on, both factors are at most 1 as the decay is, and
// a thread needs 2 exponentials a block instead of 8.
__device__ __forceinline__ Block scaled(const float *x, const float *fall, float row0, float row1) {
  const int t = threadIdx.x & 3;
  Block y;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 f = *reinterpret_cast<const float2 *>(fall + 8 * n + 2 * t);
    y.c[4 * n] = x[4 * n] * f.x * row0;
    y.c[4 * n + 1] = x[4 * n + 1] * f.y * row0;
    y.c[4 * n + 2] = x[4 * n + 2] * f.x * row1;
    y.c[4 * n + 3] = x[4 * n + 3] * f.y * row1;
  }
  return y;
}

// Warp W's rows of L into the scratch.
template <int W>
__device__ __forceinline__ void put_lower(const float *kk, const float *gates, Scratch *s) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const float *gamma = gates, *beta = gates + 64, *fall = gates + 128;
  const float row_beta[2] = {beta[16 * W + g], beta[16 * W + 8 + g]};
  Block l = diagonal_decay<W>(gamma);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 4 * n + 2 * h + e;
        l.c[i] = 8 * n + 2 * t + e < 8 * h + g ? row_beta[h] * l.c[i] * kk[8 * W + i] : 0.f;
      }
  store_block(s->diagonal[W], l);
#pragma unroll
  for (int b = 0; b < W; ++b) {
    const float end = gamma[16 * b + 15];
    put_block<false>(s->tile, W, b,
                     scaled(kk + 8 * b, fall + 16 * b,
                            -row_beta[0] * exp2f(gamma[16 * W + g] - end),
                            -row_beta[1] * exp2f(gamma[16 * W + 8 + g] - end)));
  }
}

// Warp W's rows of P into its tile.
template <int W, class T>
__device__ __forceinline__ void put_scores(const float *qk, const float *gates, T *p, float scale) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const float *gamma = gates, *fall = gates + 128;
#pragma unroll
  for (int b = 0; b < W; ++b) {
    const float end = gamma[16 * b + 15];
    put_block<false>(p, W, b,
                     scaled(qk + 8 * b, fall + 16 * b, scale * exp2f(gamma[16 * W + g] - end),
                            scale * exp2f(gamma[16 * W + 8 + g] - end)));
  }
  Block score = diagonal_decay<W>(gamma);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 4 * n + 2 * h + e;
        score.c[i] = 8 * n + 2 * t + e <= 8 * h + g ? scale * score.c[i] * qk[8 * W + i] : 0.f;
      }
  put_block<false>(p, W, W, score);
}

// Rows of K past the end of a tail may hold anything; zero times that need not be zero.
__device__ __forceinline__ void clear_rows(float *kk, int rows) {
  const int first = 16 * (threadIdx.x >> 5 & 3) + ((threadIdx.x & 31) >> 2);
#pragma unroll
  for (int i = 0; i < 32; ++i)
    if (first + 8 * (i >> 1 & 1) >= rows) kk[i] = 0.f;
}

template <int W, class T>
__device__ __forceinline__ void put_diagonal(const float *kk, const float *gates, Scratch *s, T *a) {
  put_lower<W>(kk, gates, s);
  __syncwarp();
  const Block dt = invert_diagonal(s->diagonal[W]);
  put_block<true>(s->tile, W, W, dt);
  put_block<true>(a, W, W, dt);
}

// A. All 128 threads of a warpgroup; the named barrier is this warpgroup's own. The tile is complete
// once all threads have returned. Column 0 is the longest to solve and column 3 takes no work; warps
// of one number share a quarter of the SM, so `turn` deals columns out anew at each call.
template <class T>
__device__ __forceinline__ void gated_inverse(float *kk, const float *gates, void *scratch, T *a,
                                              int rows, int barrier, int turn) {
  const int w = __shfl_sync(~0u, threadIdx.x >> 5 & 3, 0);  // in every lane the same, and known so
  Scratch *s = static_cast<Scratch *>(scratch);
  if (rows < 64) clear_rows(kk, rows);
  tl::__sync_thread_partial(barrier, 128);  // the columns solved before have left the scratch
  if (w == 0) put_diagonal<0>(kk, gates, s, a);
  else if (w == 1) put_diagonal<1>(kk, gates, s, a);
  else if (w == 2) put_diagonal<2>(kk, gates, s, a);
  else put_diagonal<3>(kk, gates, s, a);
  tl::__sync_thread_partial(barrier, 128);
  solve_columns(s->tile, a, (w + turn) & 3);
}

// P. All 128 threads of a warpgroup; complete once all have returned.
template <class T>
__device__ __forceinline__ void gated_scores(const float *qk, const float *gates, T *p,
                                             float scale) {
  const int w = __shfl_sync(~0u, threadIdx.x >> 5 & 3, 0);
  if (w == 0) put_scores<0>(qk, gates, p, scale);
  else if (w == 1) put_scores<1>(qk, gates, p, scale);
  else if (w == 2) put_scores<2>(qk, gates, p, scale);
  else put_scores<3>(qk, gates, p, scale);
}

}  // namespace qla
