// What chunk_grads does to wgmma accumulators, by one warpgroup: scaling, dots and sums along rows
// and columns, and the 64x64 gradients of scores and system. Needs gated_tiles.cuh.
//
// Accumulators are those of a 64-column product: register 4j + 2h + e of lane 4g + t in warp W is
// row 16W + 8h + g, column 8j + 2t + e. Tiles of shared memory are 64x64 panels, swizzled as TMA and
// wgmma have them; a wider tile is panels one after the other. `gates` holds the rows of
// chunk_grads.Gate, 64 numbers each. Row and column sums are formed in a fixed order.
#pragma once

namespace qla {

constexpr int kPanel = 64 * 64;

__device__ __forceinline__ float2 widened(const bfloat16_t *, unsigned pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ float2 widened(const half_t *, unsigned pair) {
  return __half22float2(*reinterpret_cast<const __half2 *>(&pair));
}

// Where this lane's row of 8 elements lies for an instruction on the blocks of its warp's rows, as
// quarter_row<true> has it, but as one address for all four blocks: tiles begin at multiples of 1 KB,
// so a block's two pieces of 16 bytes are found by changing bits. `w` comes from warp_in_group, here
// and below, which no compiler moves: addresses kept over the loops would take accumulators' registers.
template <class T> __device__ __forceinline__ T *lane_row(T *tile, int w) {
  return quarter_row<true>(tile, w, 0);
}

template <class T> __device__ __forceinline__ T *block_of(T *row, int column) {
  return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(row) ^ (32 * column));
}

template <class T> __device__ __forceinline__ Block get_block(T *row, int column) {
  Operand p;
  tl::ptx_ldmatrix_x4(block_of(row, column), p.r);
  Block x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = widened(row, p.r[i]);
    x.c[2 * i] = pair.x;
    x.c[2 * i + 1] = pair.y;
  }
  return x;
}

template <class T>
__device__ __forceinline__ void put_block(T *row, int column, const Block &x) {
  const Operand p = rounded<T>(x);
  tl::ptx_stmatrix_m8n8_x4(block_of(row, column), p.r[0], p.r[1], p.r[2], p.r[3]);
}

// The entries of a row of `gates` that belong to this thread's two rows.
__device__ __forceinline__ float2 of_rows(const float *per_row, int w) {
  const int first = 16 * w + ((threadIdx.x & 31) >> 2);
  return make_float2(per_row[first], per_row[first + 8]);
}

// Sums over each row of the numbers that its four lanes hold, x[0] and x[1] for the thread's two.
__device__ __forceinline__ void put_row_sums(const float *x, float *out) {
  const int lane = threadIdx.x & 31, first = 16 * warp_in_group() + (lane >> 2);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = x[h] + __shfl_xor_sync(~0u, x[h], 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if ((lane & 3) == 0) out[first + 8 * h] = sum;
  }
}

// Sums over each column of a block. Lanes halve what they hold with each exchange.
__device__ __forceinline__ void put_column_sums(float *out, const Block &x) {
  const int lane = threadIdx.x & 31, n = lane >> 4, e = lane >> 3 & 1;
  float pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float low = x.c[i] + x.c[2 + i], high = x.c[4 + i] + x.c[6 + i];
    pair[i] = (n ? high : low) + __shfl_xor_sync(~0u, n ? low : high, 16);
  }
  float sum = (e ? pair[1] : pair[0]) + __shfl_xor_sync(~0u, e ? pair[0] : pair[1], 8);
  sum += __shfl_xor_sync(~0u, sum, 4);
  if ((lane & 4) == 0) out[8 * n + 2 * (lane & 3) + e] = sum;
}

// An accumulator, rounded, as a tile.
template <int kPanels, class T> __device__ __forceinline__ void put_tile(const float *x, T *tile) {
  T *row = lane_row(tile, warp_in_group());
#pragma unroll
  for (int b = 0; b < 4 * kPanels; ++b)
    put_block(row + b / 4 * kPanel, b % 4, *reinterpret_cast<const Block *>(x + 8 * b));
}

// W = v - e U in place of U, and beta W in place of v.
template <int kPanels, class T>
__device__ __forceinline__ void correct_values(float *u, T *v, const float *e, const float *beta) {
  const int w = warp_in_group();
  T *row = lane_row(v, w);
  const float2 row_e = of_rows(e, w), row_beta = of_rows(beta, w);
#pragma unroll
  for (int b = 0; b < 4 * kPanels; ++b) {
    Block x = get_block(row + b / 4 * kPanel, b % 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x.c[i] -= (i & 2 ? row_e.y : row_e.x) * u[8 * b + i];
      u[8 * b + i] = x.c[i];
      x.c[i] *= i & 2 ? row_beta.y : row_beta.x;
    }
    put_block(row + b / 4 * kPanel, b % 4, x);
  }
}

// Y and dV = beta Y, rounded; <Y, W> of each row.
template <int kPanels, class T>
__device__ __forceinline__ void finish_values(const float *y, const float *w_fp32, T *s_y, T *s_dv,
                                              const float *beta, float *sums) {
  const int w = warp_in_group();
  T *row_y = lane_row(s_y, w), *row_dv = lane_row(s_dv, w);
  const float2 row_beta = of_rows(beta, w);
  float dot[2] = {};
#pragma unroll
  for (int b = 0; b < 4 * kPanels; ++b) {
    Block x = *reinterpret_cast<const Block *>(y + 8 * b);
    put_block(row_y + b / 4 * kPanel, b % 4, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      dot[i >> 1 & 1] += x.c[i] * w_fp32[8 * b + i];
      x.c[i] *= i & 2 ? row_beta.y : row_beta.x;
    }
    put_block(row_dv + b / 4 * kPanel, b % 4, x);
  }
  put_row_sums(dot, sums);
}

// <a, b> of two tiles with the same layout, times `factor`: one number a warp.
template <int kElements, class T>
__device__ __forceinline__ void put_tile_dot(const T *a, const T *b, float factor, float *sums) {
  const int thread = threadIdx.x & 127;
  float dot = 0.f;
#pragma unroll 4
  for (int i = thread; i < kElements / 8; i += 128) {
    const uint4 x = reinterpret_cast<const uint4 *>(a)[i], y = reinterpret_cast<const uint4 *>(b)[i];
    const unsigned left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 p = widened(a, left[j]), q = widened(b, right[j]);
      dot += p.x * q.x + p.y * q.y;
    }
  }
#pragma unroll
  for (int d = 16; d; d /= 2) dot += __shfl_xor_sync(~0u, dot, d);
  if ((thread & 31) == 0) sums[thread >> 5] = factor * dot;
}

// Panel kAt of acc += y and dot += <y, panel> of each row, where y is x times kSign `scale` by rows.
template <int kAt, int kSign, class T>
__device__ __forceinline__ void add_scaled(float *acc, const float *x, const float *scale, T *panel,
                                           float *dot) {
  const int w = warp_in_group();
  T *row = lane_row(panel, w);
  const float2 factor = of_rows(scale, w);
  const float signed_factor[2] = {kSign * factor.x, kSign * factor.y};
  float sum[2] = {};
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const Block other = get_block(row, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int h = i >> 1 & 1;
      acc[32 * kAt + 8 * b + i] += signed_factor[h] * x[8 * b + i];
      sum[h] += x[8 * b + i] * other.c[i];
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) dot[h] += signed_factor[h] * sum[h];
}

// y_ij = row_i G_ij x_ij in place below the diagonal and, where kDiagonal, on it; 0 above.
template <bool kDiagonal>
__device__ __forceinline__ void decay(float *x, const float *gates, float2 row, int w) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const float *gamma = gates, *fall = gates + 128;
  const float2 row_gamma = of_rows(gamma, w);
  Block y = diagonal_block(x, w);
  const Block diagonal = diagonal_decay(gamma + 16 * w);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int column = 8 * (i >> 2) + 2 * t + (i & 1), at = 8 * (i >> 1 & 1) + g;
    y.c[i] = column < at + kDiagonal ? (i & 2 ? row.y : row.x) * diagonal.c[i] * y.c[i] : 0.f;
  }
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    Block &block = *reinterpret_cast<Block *>(x + 8 * b);
    if (b < w) {
      const float end = gamma[16 * b + 15];
      block = scaled(x + 8 * b, fall + 16 * b, row.x * exp2f(row_gamma.x - end),
                     row.y * exp2f(row_gamma.y - end));
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) block.c[i] = b == w ? y.c[i] : 0.f;
    }
  }
}

// From dP: dP0 = s G o dP in its place; X = strict_lower(dP0 o Q K^T), whose row sums join `dot`. Q K^T
// is the rounded tile; of P, decay would leave nothing in fp16, and in dg that little is all there is.
template <class T>
__device__ __forceinline__ void scores_backward(float *dp, const float *gates, T *s_qk, float scale,
                                                float *dot, float *columns) {
  const int w = warp_in_group(), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  T *row = lane_row(s_qk, w);
  decay<true>(dp, gates, make_float2(scale, scale), w);
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b > w) break;
    Block x = get_block(row, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = 8 * (i >> 2) + 2 * t + (i & 1), at = 8 * (i >> 1 & 1) + g;
      x.c[i] = b < w || column < at ? x.c[i] * dp[8 * b + i] : 0.f;
      dot[i >> 1 & 1] += x.c[i];
    }
    put_column_sums(columns + 64 * w + 16 * b, x);
  }
}

// From -E = Y V'^T: F = beta G o E in its place; X = F o K K^T, whose row sums join `dot`; those of
// G o K K^T o E are part of dbeta. K K^T is the rounded tile.
template <class T>
__device__ __forceinline__ void system_backward(float *e, const float *gates, T *s_kk, float *dot,
                                                float *dbeta, float *columns) {
  const int w = warp_in_group();
  T *row = lane_row(s_kk, w);
  const float2 beta = of_rows(gates + 64, w);
  float sums[2] = {};
  decay<false>(e, gates, make_float2(-1.f, -1.f), w);
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b > w) break;
    Block x = get_block(row, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float row_beta = i & 2 ? beta.y : beta.x;
      x.c[i] *= e[8 * b + i];
      sums[i >> 1 & 1] += x.c[i];
      x.c[i] *= row_beta;
      dot[i >> 1 & 1] += x.c[i];
      e[8 * b + i] *= row_beta;
    }
    put_column_sums(columns + 64 * w + 16 * b, x);
  }
  put_row_sums(sums, dbeta);
}

// F + F^T, rounded, for F strictly below the diagonal. The tile is complete once all warps are done.
template <class T> __device__ __forceinline__ void put_symmetric(const float *f, T *tile) {
  const int w = warp_in_group();
  T *row = lane_row(tile, w);
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    if (b >= w) break;
    const Block &x = *reinterpret_cast<const Block *>(f + 8 * b);
    put_block(row, b, x);
    put_block<true>(tile, b, w, x);
  }
  // The diagonal block's mirror image by way of the tile; where one of the two is not 0, the other is.
  const Block x = diagonal_block(f, w);
  put_block<true>(tile, w, w, x);
  __syncwarp();
  Operand sum = rounded<T>(x), mirrored;
  T *at = block_of(row, w);
  tl::ptx_ldmatrix_x4(at, mirrored.r);
#pragma unroll
  for (int i = 0; i < 4; ++i) sum.r[i] |= mirrored.r[i];
  tl::ptx_stmatrix_m8n8_x4(at, sum.r[0], sum.r[1], sum.r[2], sum.r[3]);
}

// The first rows of an accumulator to global memory, rounded.
template <int kPanels, class T>
__device__ __forceinline__ void store_rows(const float *x, T *out, int64_t stride, int rows) {
  const int lane = threadIdx.x & 31, first = 16 * warp_in_group() + (lane >> 2);
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (first + 8 * h < rows) {
      T *row = out + (first + 8 * h) * stride + 2 * (lane & 3);
#pragma unroll
      for (int j = 0; j < 8 * kPanels; ++j)
        *reinterpret_cast<unsigned *>(row + 8 * j) =
            round_pair(out, x[4 * j + 2 * h], x[4 * j + 2 * h + 1]);
    }
}

}  // namespace qla
