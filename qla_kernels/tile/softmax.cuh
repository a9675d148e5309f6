// The online softmax of scores in wgmma accumulators: see softmax.py.
//
// Layout of a warpgroup's [64, kN] accumulator: lane = threadIdx.x % 32 of warp w of the warpgroup
// holds
//
//   x[4 j + 2 h + e] = element (16 w + 8 h + lane / 4, 8 j + 2 (lane % 4) + e),  h, e in {0, 1}
//
// A thread thus has a quarter of two rows, h = 0 and 1, and per-row numbers are arrays of two.
#pragma once

namespace qla {

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Returns the number that is subtracted from scores: the maximum, or 0 if the row has seen no key.
__device__ __forceinline__ float origin(float m) { return m == -INFINITY ? 0.0f : m; }

template <int kN>
__device__ __forceinline__ void grow_max(const float *s, float *m, float *a, float scale2) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float even = fmaxf(m[h], s[2 * h]), odd = s[2 * h + 1];  // two chains: one would be latency
#pragma unroll
    for (int j = 1; j < kN / 8; ++j) {
      even = fmaxf(even, s[4 * j + 2 * h]);
      odd = fmaxf(odd, s[4 * j + 2 * h + 1]);
    }
    const float grown = quad_max(fmaxf(even, odd));
    a[h] = exp2f((m[h] - origin(grown)) * scale2);  // of the difference: exactly 1 where m stays
    m[h] = grown;
  }
}

template <int kN>
__device__ __forceinline__ void exponentiate(float *s, const float *m, const float *a, float *l,
                                             float scale2) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float from = origin(m[h]) * scale2;
    float even = 0, odd = 0;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      float *x = s + 4 * j + 2 * h;
      x[0] = exp2f(x[0] * scale2 - from);
      x[1] = exp2f(x[1] * scale2 - from);
      even += x[0];
      odd += x[1];
    }
    l[h] = l[h] * a[h] + (even + odd);
  }
}

template <int kN> __device__ __forceinline__ void scale_rows(float *x, const float *a) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) x[i] *= a[i >> 1 & 1];
}

// Most tiles raise no maximum; then a is 1 in the whole warp, and scaling would change no bit.
template <int kN> __device__ __forceinline__ void rescale(float *o, const float *a) {
  if (__any_sync(~0u, a[0] != 1.0f || a[1] != 1.0f)) scale_rows<kN>(o, a);
}

template <int kN>
__device__ __forceinline__ void finish(float *o, const float *m, const float *l, float *lse2,
                                       float scale2) {
  float inverse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = quad_sum(l[h]);
    inverse[h] = total == 0.0f ? 0.0f : 1.0f / total;
    lse2[h] = m[h] * scale2 + log2f(total);
  }
  scale_rows<kN>(o, inverse);
}

}  // namespace qla
