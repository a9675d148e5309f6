// What chunk_grads does to wgmma accumulators, by one warpgroup: scaling, dots and sums along rows
// and columns, and the 64x64 gradients of scores and system. Needs gated_tiles.cuh.
//
// Accumulators are those of a 64-column product: register 4j + 2h + e of lane 4g + t in warp W is
// row 16W + 8h + g, column 8j + 2t + e. Tiles of shared memory are 64x64 panels, swizzled as TMA
// and wgmma have them. Row and column sums are formed in a fixed order.
#pragma once

namespace qla {

__device__ __forceinline__ float2 widened(const bfloat16_t *, unsigned pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ float2 widened(const half_t *, unsigned pair) {
  return __half22float2(*reinterpret_cast<const __half2 *>(&pair));
}

// Returns the number of this thread in its warpgroup, by a shuffle, which no compiler moves out of
// a loop: addresses kept in registers over the loops would displace accumulators.
__device__ __forceinline__ int thread_in_group() {
  return __shfl_sync(~0u, threadIdx.x, threadIdx.x) & 127;
}

// Returns the number of this thread's warp; the compiler knows that all lanes have the same value.
__device__ __forceinline__ int own_warp() { return __shfl_sync(~0u, threadIdx.x, 0) / 32 % 4; }

// Where this lane's row of 8 elements lies for an instruction on the blocks of its warp's rows, as
// quarter_row<true> has it, but as one address for all four blocks: tiles begin at multiples of 1
// KB, so a block's two pieces of 16 bytes are found by changing bits.
template <class T> __device__ __forceinline__ T *lane_row(T *tile, int thread) {
  const int row = thread / 32 * 16 + thread % 16;
  return tile + 64 * row + 8 * (thread / 16 % 2 ^ row % 8);
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

// Returns the first of a thread's two rows of an accumulator; the second row is 8 below it.
__device__ __forceinline__ int first_row(int thread) { return thread / 32 * 16 + thread / 4 % 8; }

// Returns the numbers of this thread's two rows, given one number for each of 64 rows.
__device__ __forceinline__ float2 of_rows(const float *per_row, int thread) {
  const int first = first_row(thread);
  return make_float2(per_row[first], per_row[first + 8]);
}

// Returns the sum of x over the four lanes of a row.
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Writes row sums of x; x[0] and x[1] belong to the thread's two rows.
__device__ __forceinline__ void put_row_sums(const float *x, float *out, int thread) {
  const int first = first_row(thread);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = row_sum(x[h]);
    if (thread % 4 == 0) out[first + 8 * h] = sum;
  }
}

// Adds another lane's values to one half of the 2 kHalf numbers in x, and gives it the other half.
template <int kHalf> __device__ __forceinline__ void halve(float *x, int lane) {
  const bool high = lane & 2 * kHalf;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float given = __shfl_xor_sync(~0u, high ? x[i] : x[kHalf + i], 2 * kHalf);
    x[i] = (high ? x[kHalf + i] : x[i]) + given;
  }
}

// Writes column sums over a warp's rows; x[2j + e] is the lane's part of column 8j + 2t + e.
__device__ __forceinline__ void put_column_sums(float *out, float *x, int lane) {
  halve<8>(x, lane);
  halve<4>(x, lane);
  halve<2>(x, lane);
  *reinterpret_cast<float2 *>(out + 8 * (lane >> 2) + 2 * (lane & 3)) = make_float2(x[0], x[1]);
}

// Writes an accumulator, rounded, to a tile.
template <class T> __device__ __forceinline__ void put_tile(const float *x, T *tile) {
  T *row = lane_row(tile, thread_in_group());
#pragma unroll
  for (int b = 0; b < 4; ++b) put_block(row, b, *reinterpret_cast<const Block *>(x + 8 * b));
}

// Writes two accumulators to two tiles. The loop keeps the code short.
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

// Multiplies each row of x by its number in `scale`, in place.
__device__ __forceinline__ void scale_rows(float *x, const float *scale) {
  const float2 factor = of_rows(scale, thread_in_group());
#pragma unroll
  for (int i = 0; i < 32; ++i) x[i] *= i & 2 ? factor.y : factor.x;
}

// Replaces U by W = v - e U, and v by beta W.
template <class T>
__device__ __forceinline__ void correct_values(float *u, T *v, const float *e, const float *beta) {
  const int thread = thread_in_group();
  T *row = lane_row(v, thread);
  const float2 row_e = of_rows(e, thread), row_beta = of_rows(beta, thread);
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

// Writes Y and dV = beta Y, rounded, and <Y, W> of each row.
template <class T>
__device__ __forceinline__ void finish_values(const float *y, const float *w_fp32, T *s_y, T *s_dv,
                                              const float *beta, float *sums) {
  const int thread = thread_in_group();
  T *row_y = lane_row(s_y, thread), *row_dv = lane_row(s_dv, thread);
  const float2 row_beta = of_rows(beta, thread);
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
  put_row_sums(dot, sums, thread);
}

// Sets *out to this thread's summand of <a, b>, for one part of two tiles with the same layout.
template <int kElements, class T>
__device__ __forceinline__ void tile_dot(float *out, const T *a, const T *b, int part) {
  const int thread = thread_in_group();
  const uint4 *left = reinterpret_cast<const uint4 *>(a + part * kElements) + thread;
  const uint4 *right = reinterpret_cast<const uint4 *>(b + part * kElements) + thread;
  float dot = 0.f;
#pragma unroll 1
  for (int i = 0; i < kElements / 8; i += 128) {
    const uint4 x = left[i], y = right[i];
    const unsigned xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 p = widened(a, xs[j]), q = widened(b, ys[j]);
      dot += p.x * q.x + p.y * q.y;
    }
  }
  *out = dot;
}

// Writes `factor` times the sum of x over the threads of a warp: one number for each warp.
__device__ __forceinline__ void put_number(const float *x, float factor, float *out) {
  const int thread = thread_in_group();
  float sum = *x;
#pragma unroll
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (thread % 32 == 0) out[thread / 32] = factor * sum;
}

// Adds y, x with each row times its number in `scale`, to `sum`; writes <y, panel> of each row.
template <class T>
__device__ __forceinline__ void add_scaled(float *sum, const float *x, const float *scale, T *panel,
                                           float *sums) {
  const int thread = thread_in_group();
  T *row = lane_row(panel, thread);
  const float2 factor = of_rows(scale, thread);
  float dot[2] = {};
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const Block other = get_block(row, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      dot[i >> 1 & 1] += x[8 * b + i] * other.c[i];
      sum[8 * b + i] += (i & 2 ? factor.y : factor.x) * x[8 * b + i];
    }
  }
  dot[0] *= factor.x;
  dot[1] *= factor.y;
  put_row_sums(dot, sums, thread);
}

// G_ij x_ij in place below the diagonal and, if `diagonal`, on it; 0 above. `gates` are the
// first three rows of a gate slot, as in gated_tiles.cuh: gamma, beta, decay to the block's end.
__device__ __forceinline__ void decay_scores(float *x, const float *gates, int diagonal) {
  const int w = own_warp(), lane = thread_in_group() % 32, g = lane / 4, t = lane % 4;
  const float *gamma = gates, *fall = gates + 128;
  const float2 row = of_rows(gamma, 32 * w + lane);
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b < w) {
      const float end = gamma[16 * b + 15];
      *reinterpret_cast<Block *>(x + 8 * b) =
          scaled(x + 8 * b, fall + 16 * b, exp2f(row.x - end), exp2f(row.y - end));
    } else if (b > w) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[8 * b + i] = 0.f;
    } else {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 column = *reinterpret_cast<const float2 *>(gamma + 16 * b + 8 * n + 2 * t);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int h = i >> 1, e = i & 1;
          const float decay = exp2f((h ? row.y : row.x) - (e ? column.y : column.x));
          const bool low = n < h || n == h && 2 * t + e < g + diagonal;
          x[8 * b + 4 * n + i] = low ? x[8 * b + 4 * n + i] * decay : 0.f;
        }
      }
    }
  }
}

// Adds scale x to dp0 or, if `system`, -beta x to f.
__device__ __forceinline__ void add_scores(float *dp0, float *f, const float *x, int system,
                                           float scale, const float *beta) {
  if (system) {
    const float2 row_beta = of_rows(beta, thread_in_group());
#pragma unroll
    for (int i = 0; i < 32; ++i) f[i] -= (i & 2 ? row_beta.y : row_beta.x) * x[i];
  } else {
#pragma unroll
    for (int i = 0; i < 32; ++i) dp0[i] += scale * x[i];
  }
}

// Writes row sums and column sums of X = strict_lower(y o other), where y is scale x or, if
// `system`, -beta x. `plain` receives row sums of strict_lower(x o other).
__device__ __forceinline__ void sum_scores(const float *x, const float *other, int system,
                                           float scale, const float *beta, float *rows,
                                           float *plain, float *columns) {
  const int w = own_warp(), lane = thread_in_group() % 32, g = lane / 4, t = lane % 4;
  const float2 row_beta = of_rows(beta, 32 * w + lane);
  const float factor[2] = {system ? -row_beta.x : scale, system ? -row_beta.y : scale};
  float dot[2] = {}, sums[16] = {};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int b = i >> 3, n = i >> 2 & 1, h = i >> 1 & 1, e = i & 1;
    const bool on_diagonal = n == h && b == w && 2 * t + e == g;
    const float y = on_diagonal ? 0.f : x[i] * other[i];
    dot[h] += y;
    sums[i / 4 * 2 + e] += factor[h] * y;
  }
  put_column_sums(columns + 64 * w, sums, lane);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = row_sum(dot[h]);
    const int row = first_row(32 * w + lane) + 8 * h;
    if (t == 0) {
      plain[row] = sum;
      rows[row] = factor[h] * sum;
    }
  }
}

// Writes `rows` rows of a tile to global memory in pieces of 16 bytes: to rows first, first + step,
// ..., which are `size` elements apart and have `columns` elements from `out` on.
template <class T>
__device__ __forceinline__ void store_rows(const T *tile, T *out, int size, int columns, int first,
                                           int step, int rows) {
  const int thread = thread_in_group(), piece = thread % 8;
  if (8 * piece >= columns) return;
#pragma unroll 1
  for (int row = thread / 8; row < rows; row += 16) {
    const uint4 *from = reinterpret_cast<const uint4 *>(tile + 64 * row) + (piece ^ (row & 7));
    const int64_t to = int64_t(first + row * step) * size + 8 * piece;
    *reinterpret_cast<uint4 *>(out + to) = *from;
  }
}

// Writes 0 to a piece of 16 bytes. The compiler knows pieces only in rows of a constant size.
template <class T> __device__ __forceinline__ void clear_piece(T *piece) {
  *reinterpret_cast<uint4 *>(piece) = {};
}

}  // namespace qla
