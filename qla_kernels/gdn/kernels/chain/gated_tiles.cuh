// One warpgroup makes the two 64x64 tiles that a chunk of the gated delta rule needs:
//
//   A = (I + L)^-1,  L_ij = beta_i 2^(gamma_i - gamma_j) <k_i, k_j>   for i > j
//   P_ij = scale 2^(gamma_i - gamma_j) <q_i, k_j>                     for i >= j
//
// The inputs are wgmma accumulators of K K^T and Q K^T (register 4j + 2h + e of lane 4g + t in warp
// W is row 16W + 8h + g, column 8j + 2t + e), and `gates`, three rows of 64 numbers: gamma,
// cumulative and in base 2; beta; and fall_j = 2^(gamma_r - gamma_j), the decay to the block's end,
// where r is the last token of j's block of 16. This file needs triangular.cuh.
#pragma once
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/intrin.h>

namespace qla {

// Returns the diagonal block of a warp's rows. It is selected, not indexed: x is in registers.
__device__ __forceinline__ Block diagonal_block(const float *x, int w) {
  Block y;
#pragma unroll
  for (int b = 0; b < 4; ++b)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (b == 0 || b == w) y.c[i] = x[8 * b + i];
  return y;
}

// Returns 2^(gamma_i - gamma_j) for a diagonal block, given its 16 gammas.
__device__ __forceinline__ Block diagonal_decay(const float *gamma) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const float row[2] = {gamma[g], gamma[8 + g]};
  Block decay;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 column = *reinterpret_cast<const float2 *>(gamma + 8 * n + 2 * t);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      decay.c[4 * n + 2 * h] = exp2f(row[h] - column.x);
      decay.c[4 * n + 2 * h + 1] = exp2f(row[h] - column.y);
    }
  }
  return decay;
}

// Returns x_ij row_i fall_j for a block below the diagonal. The decay is a product of two factors:
// one up to the end of the column's block, and one from there to the row. Both are at most 1, and a
// thread needs 2 exponentials a block instead of 8.
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

// Writes the blocks of a warp's rows left of the diagonal: x_ij factor_i 2^(gamma_i - gamma_j).
template <class T>
__device__ __forceinline__ void put_left(const float *x, const float *gates, T *tile, int w,
                                         float factor0, float factor1) {
  const int g = (threadIdx.x & 31) >> 2;
  const float *gamma = gates, *fall = gates + 128;
  const float gamma0 = gamma[16 * w + g], gamma1 = gamma[16 * w + 8 + g];
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    if (b >= w) break;
    const float end = gamma[16 * b + 15];
    put_block<false>(tile, w, b,
                     scaled(x + 8 * b, fall + 16 * b, factor0 * exp2f(gamma0 - end),
                            factor1 * exp2f(gamma1 - end)));
  }
}

// Writes a warp's rows of L to the scratch.
__device__ __forceinline__ void put_lower(const float *kk, const float *gates, Scratch *s, int w) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const float *beta = gates + 64 + 16 * w;
  const float row_beta[2] = {beta[g], beta[8 + g]};
  Block l = diagonal_decay(gates + 16 * w);
  const Block x = diagonal_block(kk, w);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 4 * n + 2 * h + e;
        l.c[i] = 8 * n + 2 * t + e < 8 * h + g ? row_beta[h] * l.c[i] * x.c[i] : 0.f;
      }
  store_block(s->diagonal[w], l);
  put_left(kk, gates, s->tile, w, -row_beta[0], -row_beta[1]);
}

// Writes a warp's rows of P to the tile p.
template <class T>
__device__ __forceinline__ void put_scores(const float *qk, const float *gates, T *p, float scale,
                                           int w) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  Block score = diagonal_decay(gates + 16 * w);
  const Block x = diagonal_block(qk, w);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 4 * n + 2 * h + e;
        score.c[i] = 8 * n + 2 * t + e <= 8 * h + g ? scale * score.c[i] * x.c[i] : 0.f;
      }
  put_block<false>(p, w, w, score);
  put_left(qk, gates, p, w, scale, scale);
}

// Clears rows of K K^T past the end of a tail: they may be NaN or inf, and zero times that is NaN.
__device__ __forceinline__ void clear_rows(float *kk, int rows) {
  const int first = 16 * (threadIdx.x >> 5 & 3) + ((threadIdx.x & 31) >> 2);
#pragma unroll
  for (int i = 0; i < 32; ++i)
    if (first + 8 * (i >> 1 & 1) >= rows) kk[i] = 0.f;
}

__device__ __forceinline__ int warp_in_group() {
  return __shfl_sync(~0u, threadIdx.x >> 5 & 3, 0);  // in every lane the same, and known so
}

// A warpgroup makes A in three steps: gated_lower; the inverses of the diagonal blocks, by this
// warpgroup or by another warp; solve_below. The scratch and the tile must not be used for anything
// else in between.

// Writes L to the scratch, from K K^T.
__device__ __forceinline__ void gated_lower(const float *kk, const float *gates, void *scratch) {
  put_lower(kk, gates, static_cast<Scratch *>(scratch), warp_in_group());
}

// Solves the blocks below the diagonal. Column 0 takes longest, and column 3 takes no work. Warps
// with the same number mod 4 share a quarter of the SM, so `turn` changes the assignment of columns
// to warps at each call.
template <class T> __device__ __forceinline__ void solve_below(void *scratch, T *a, int turn) {
  solve_column(static_cast<Scratch *>(scratch)->tile, a, warp_in_group() + turn & 3);
}

// Inverts the diagonal blocks: each warp inverts the block that it wrote.
template <class T>
__device__ __forceinline__ void invert_own_diagonal(void *scratch, T *a) {
  const int w = warp_in_group();
  Scratch *s = static_cast<Scratch *>(scratch);
  __syncwarp();
  substitute<1>({s->diagonal[w]}, (threadIdx.x & 16) == 0);
  put_inverse(s, a, w);
}

// Makes all of A; rows of k from `rows` on lie past a tail's end and do not contribute.
template <class T>
__device__ __forceinline__ void gated_inverse(float *kk, const float *gates, void *scratch, T *a,
                                              int rows, int barrier, int turn) {
  if (rows < 64) clear_rows(kk, rows);
  tl::__sync_thread_partial(barrier, 128);  // the previous call's columns have been read
  gated_lower(kk, gates, scratch);
  invert_own_diagonal(scratch, a);
  tl::__sync_thread_partial(barrier, 128);
  solve_below(scratch, a, turn);
}

// Makes P, by all 128 threads of a warpgroup. P is complete when all of them have returned.
template <class T>
__device__ __forceinline__ void gated_scores(const float *qk, const float *gates, T *p,
                                             float scale) {
  put_scores(qk, gates, p, scale, warp_in_group());
}

template <class T> struct Kind;
template <> struct Kind<bfloat16_t> {
  static constexpr tl::DataType value = tl::DataType::kBFloat16;
};
template <> struct Kind<half_t> {
  static constexpr tl::DataType value = tl::DataType::kFloat16;
};

// Starts c = a b^T, for two [64][K] tiles in 128-byte swizzled panels of 64 columns.
template <int K, class T>
__device__ __forceinline__ void start_product(float *c, const T *a, const T *b) {
  tl::GmmaDescriptor at, bt;
  tl::initialize_wgmma_descriptor<1, 1, 64>(at, const_cast<T *>(a));
  tl::initialize_wgmma_descriptor<1, 1, 64>(bt, const_cast<T *>(b));
  tl::warpgroup_fence_operand(c, 32);
  tl::warpgroup_arrive();
#pragma unroll
  for (int i = 0; i < K / 16; ++i) {
    const int step = (i / 4 * 64 * 128 + i % 4 * 32) >> 4;  // in the descriptor's 16-byte units
    tl::wgmma_ss<Kind<T>::value, Kind<T>::value, tl::DataType::kFloat32, 64, 64, 16, false, false,
                 1, 1>(uint64_t(at + step), uint64_t(bt + step),
                       reinterpret_cast<uint32_t *>(c), i > 0);
  }
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(c, 32);
}

__device__ __forceinline__ void finish_product(float *c) {
  tl::wait_wgmma<0>();
  tl::warpgroup_fence_operand(c, 32);
}

// Writes the transpose of a [64][64] accumulator, already rounded, to a swizzled tile.
template <class T> __device__ __forceinline__ void stage_transposed(const T *x, T *tile) {
  const int *pairs = reinterpret_cast<const int *>(x), w = threadIdx.x >> 5 & 3;
#pragma unroll
  for (int b = 0; b < 4; ++b)
    tl::ptx_stmatrix_m8n8_x4_trans(quarter_row<false>(tile, b, w), pairs[4 * b], pairs[4 * b + 1],
                                   pairs[4 * b + 2], pairs[4 * b + 3]);
}

// A state is [K][V] in fp32, with any strides. A warpgroup has 64 columns of V, transposed, in the
// registers of a [64][K] accumulator. Returns the offset of this thread's first element.
__device__ __forceinline__ int64_t first_of_state(int64_t k_stride, int64_t v_stride) {
  const int lane = threadIdx.x & 31;
  return (16 * (threadIdx.x >> 5 & 3) + (lane >> 2)) * v_stride + 2 * (lane & 3) * k_stride;
}

template <int K>
__device__ __forceinline__ void load_state(float *s, const float *at, int64_t k_stride,
                                           int64_t v_stride) {
  at += first_of_state(k_stride, v_stride);
#pragma unroll
  for (int j = 0; j < K / 8; ++j, at += 8 * k_stride)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[4 * j + i] = at[i / 2 * 8 * v_stride + i % 2 * k_stride];
}

template <int K>
__device__ __forceinline__ void store_state(const float *s, float *at, int64_t k_stride,
                                            int64_t v_stride) {
  at += first_of_state(k_stride, v_stride);
#pragma unroll
  for (int j = 0; j < K / 8; ++j, at += 8 * k_stride)
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i / 2 * 8 * v_stride + i % 2 * k_stride] = s[4 * j + i];
}

}  // namespace qla
