// What wide_grads does besides the functions of chunk_grads/tiles.cuh, whose conventions hold here.
#pragma once

namespace qla {

// Adds y, x with each row times its number in `scale`, to `sum`; writes <y, panel> of each row to
// `sums`, and the same with `other_scale` in place of `scale` to `other_sums`.
template <class T>
__device__ __forceinline__ void add_twice_scaled(float *sum, const float *x, const float *scale,
                                                 const float *other_scale, T *panel, float *sums,
                                                 float *other_sums) {
  const int thread = thread_in_group();
  T *row = lane_row(panel, thread);
  const float2 factor = of_rows(scale, thread), other_factor = of_rows(other_scale, thread);
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
  const float whole[2] = {row_sum(dot[0]), row_sum(dot[1])};
  if (thread % 4 == 0) {
    const int first = first_row(thread);
    sums[first] = factor.x * whole[0];
    sums[first + 8] = factor.y * whole[1];
    other_sums[first] = other_factor.x * whole[0];
    other_sums[first + 8] = other_factor.y * whole[1];
  }
}

// Writes <Y, v> of rows 32 half to 32 half + 31 of two tiles. A lane has a piece of 16 bytes, eight
// lanes a row.
template <class T>
__device__ __forceinline__ void put_row_dots(const T *s_y, const T *s_v, float *sums, int half) {
  const int thread = thread_in_group(), piece = thread % 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 32 * half + 16 * i + thread / 8, at = 64 * row + 8 * (piece ^ row & 7);
    const uint4 y = *reinterpret_cast<const uint4 *>(s_y + at);
    const uint4 v = *reinterpret_cast<const uint4 *>(s_v + at);
    const unsigned ys[4] = {y.x, y.y, y.z, y.w}, vs[4] = {v.x, v.y, v.z, v.w};
    float dot = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 a = widened(s_y, ys[j]), b = widened(s_v, vs[j]);
      dot += a.x * b.x + a.y * b.y;
    }
#pragma unroll
    for (int d = 1; d < 8; d *= 2) dot += __shfl_xor_sync(~0u, dot, d);
    if (piece == 0) sums[row] = dot;
  }
}

// Puts a thread's accumulator into 16 KB of shared memory that holds nothing else, and takes it back.
__device__ __forceinline__ float4 *parked(void *at) {
  return static_cast<float4 *>(at) + thread_in_group();
}

__device__ __forceinline__ void park(const float *x, void *at) {
  float4 *place = parked(at);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    place[128 * i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
}

__device__ __forceinline__ void take_back(float *x, void *at) {
  const float4 *place = parked(at);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 y = place[128 * i];
    x[4 * i] = y.x;
    x[4 * i + 1] = y.y;
    x[4 * i + 2] = y.z;
    x[4 * i + 3] = y.w;
  }
}

}  // namespace qla
