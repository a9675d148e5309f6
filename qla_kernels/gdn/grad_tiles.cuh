// What chunk_grads does to wgmma accumulators, by one warpgroup: scaling, dots and sums along rows
// and columns, and the 64x64 gradients of scores and system. Needs gated_tiles.cuh.
//
// Accumulators are those of a 64-column product: register 4j + 2h + e of lane 4g + t in warp W is
// row 16W + 8h + g, column 8j + 2t + e. Tiles of shared memory are 64x64 panels, swizzled as TMA and
// wgmma have them. Row and column sums are formed in a fixed order.
#pragma once

namespace qla {

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

// Of 64 numbers, one a row, those of this thread's two rows.
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

// Sums over the rows of a block of x, x[2n + e] being what the lane has of column 8n + 2t + e. Lanes
// halve what they hold with each exchange.
__device__ __forceinline__ void put_column_sums(float *out, const float *x) {
  const int lane = threadIdx.x & 31, n = lane >> 4, e = lane >> 3 & 1;
  float pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    pair[i] = (n ? x[2 + i] : x[i]) + __shfl_xor_sync(~0u, n ? x[i] : x[2 + i], 16);
  float sum = (e ? pair[1] : pair[0]) + __shfl_xor_sync(~0u, e ? pair[0] : pair[1], 8);
  sum += __shfl_xor_sync(~0u, sum, 4);
  if ((lane & 4) == 0) out[8 * n + 2 * (lane & 3) + e] = sum;
}

// An accumulator, rounded, as a tile.
template <class T> __device__ __forceinline__ void put_tile(const float *x, T *tile) {
  T *row = lane_row(tile, warp_in_group());
#pragma unroll
  for (int b = 0; b < 4; ++b) put_block(row, b, *reinterpret_cast<const Block *>(x + 8 * b));
}

// Two accumulators as two tiles. The loop here, and in store_rows, is for code to be short.
template <class T>
__device__ __forceinline__ void put_tiles(const float *x, const float *y, T *tiles) {
#pragma unroll 1
  for (int second = 0; second < 2; ++second) {
    float z[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) z[i] = second ? y[i] : x[i];
    put_tile(z, tiles + 64 * 64 * second);
  }
}

// W = v - e U in place of U, and beta W in place of v.
template <class T>
__device__ __forceinline__ void correct_values(float *u, T *v, const float *e, const float *beta) {
  const int w = warp_in_group();
  T *row = lane_row(v, w);
  const float2 row_e = of_rows(e, w), row_beta = of_rows(beta, w);
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    Block x = get_block(row, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x.c[i] -= (i & 2 ? row_e.y : row_e.x) * u[8 * b + i];
      u[8 * b + i] = x.c[i];
      x.c[i] *= i & 2 ? row_beta.y : row_beta.x;
    }
    put_block(row, b, x);
  }
}

// Y and dV = beta Y, rounded; <Y, W> of each row.
template <class T>
__device__ __forceinline__ void finish_values(const float *y, const float *w_fp32, T *s_y, T *s_dv,
                                              const float *beta, float *sums) {
  const int w = warp_in_group();
  T *row_y = lane_row(s_y, w), *row_dv = lane_row(s_dv, w);
  const float2 row_beta = of_rows(beta, w);
  float dot[2] = {};
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    Block x = *reinterpret_cast<const Block *>(y + 8 * b);
    put_block(row_y, b, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      dot[i >> 1 & 1] += x.c[i] * w_fp32[8 * b + i];
      x.c[i] *= i & 2 ? row_beta.y : row_beta.x;
    }
    put_block(row_dv, b, x);
  }
  put_row_sums(dot, sums);
}

// <a, b> of one part of two tiles with the same layout, times `factor`: one number a warp.
template <int kElements, class T>
__device__ __forceinline__ void put_tile_dot(const T *a, const T *b, int part, float factor,
                                             float *sums) {
  const int thread = threadIdx.x & 127;
  const uint4 *left = reinterpret_cast<const uint4 *>(a + part * kElements) + thread;
  const uint4 *right = reinterpret_cast<const uint4 *>(b + part * kElements) + thread;
  float dot = 0.f;
#pragma unroll 2
  for (int i = 0; i < kElements / 8; i += 128) {
    const uint4 x = left[i], y = right[i];
    const unsigned xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 p = widened(a, xs[j]), q = widened(b, ys[j]);
      dot += p.x * q.x + p.y * q.y;
    }
  }
#pragma unroll
  for (int d = 16; d; d /= 2) dot += __shfl_xor_sync(~0u, dot, d);
  if ((thread & 31) == 0) sums[thread >> 5] = factor * dot;
}

// y = x times `scale` by rows: to sum0 or, if `second`, to sum1; <y, panel> of each row.
template <class T>
__device__ __forceinline__ void add_scaled(float *sum0, float *sum1, const float *x, int second,
                                           const float *scale, T *panel, float *sums) {
  const int w = warp_in_group();
  T *row = lane_row(panel, w);
  const float2 factor = of_rows(scale, w);
  float dot[2] = {};
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const Block other = get_block(row, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) dot[i >> 1 & 1] += x[8 * b + i] * other.c[i];
  }
  dot[0] *= factor.x;
  dot[1] *= factor.y;
  if (second) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sum1[i] += (i & 2 ? factor.y : factor.x) * x[i];
  } else {
#pragma unroll
    for (int i = 0; i < 32; ++i) sum0[i] += (i & 2 ? factor.y : factor.x) * x[i];
  }
  put_row_sums(dot, sums);
}

// G_ij x_ij in place below the diagonal and, if `diagonal`, on it; 0 above.
__device__ __forceinline__ void decay_scores(float *x, const float *gamma, int diagonal) {
  const int w = warp_in_group(), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const float2 row = of_rows(gamma, w);
#pragma unroll
  for (int b = 0; b < 4; ++b)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 column = *reinterpret_cast<const float2 *>(gamma + 16 * b + 8 * n + 2 * t);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i >> 1, e = i & 1;
        const bool low = n < h || n == h && 2 * t + e < g + diagonal;  // in a block on the diagonal
        const float decay = exp2f((h ? row.y : row.x) - (e ? column.y : column.x));
        const float y = x[8 * b + 4 * n + i] * decay;
        x[8 * b + 4 * n + i] = b < w || b == w && low ? y : 0.f;
      }
    }
}

// y = scale x is added to dp0 or, for the system, y = -beta x to f. Of X = strict_lower(y o other), row
// sums and column sums; `plain` receives row sums of x o other.
__device__ __forceinline__ void scores_backward(float *dp0, float *f, const float *x,
                                                const float *other, int system, float scale,
                                                const float *beta, float *rows, float *plain,
                                                float *columns) {
  const int w = warp_in_group(), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const float2 row_beta = of_rows(beta, w);
  const float factor[2] = {system ? -row_beta.x : scale, system ? -row_beta.y : scale};
  float dot[2] = {};
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b > w) break;
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int n = i >> 2, h = i >> 1 & 1, e = i & 1;
      const bool on_diagonal = n == h && b == w && 2 * t + e == g;
      const float y = on_diagonal ? 0.f : x[8 * b + i] * other[8 * b + i];
      dot[h] += y;
      sums[2 * n + e] += factor[h] * y;
    }
    put_column_sums(columns + 64 * w + 16 * b, sums);
  }
  if (system) {
#pragma unroll
    for (int i = 0; i < 32; ++i) f[i] += factor[i >> 1 & 1] * x[i];
  } else {
#pragma unroll
    for (int i = 0; i < 32; ++i) dp0[i] += factor[i >> 1 & 1] * x[i];
  }
  put_row_sums(dot, plain);
  dot[0] *= factor[0];
  dot[1] *= factor[1];
  put_row_sums(dot, rows);
}

// The first rows of two accumulators to global memory, rounded.
template <class T>
__device__ __forceinline__ void store_rows(const float *x, const float *y, T *out_x, T *out_y,
                                           int64_t stride, int rows) {
  const int lane = threadIdx.x & 31, first = 16 * warp_in_group() + (lane >> 2);
#pragma unroll 1
  for (int second = 0; second < 2; ++second) {
    T *row = (second ? out_y : out_x) + first * stride + 2 * (lane & 3);
#pragma unroll
    for (int h = 0; h < 2; ++h, row += 8 * stride)
      if (first + 8 * h < rows) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int at = 4 * j + 2 * h;
          *reinterpret_cast<unsigned *>(row + 8 * j) = round_pair(
              row, second ? y[at] : x[at], second ? y[at + 1] : x[at + 1]);
        }
      }
  }
}

}  // namespace qla
