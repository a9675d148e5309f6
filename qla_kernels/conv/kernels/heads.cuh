// Sums over the lanes of a head: see heads.py.
#include <tl_templates/cuda/common.h>

namespace qla {

// Even lanes of pairs `step` apart get the sum of a over the pair, odd ones that of b.
__device__ __forceinline__ float half_sum(float a, float b, int step) {
  const bool odd = threadIdx.x & step;
  return (odd ? b : a) + __shfl_xor_sync(~0u, odd ? a : b, step);
}

// The sum of number x[lane % 4] over the lanes of a head; of 3 the last also stands for a fourth,
// and 2 repeat. Of a warp's lanes the first `lanes`, a multiple of 4, count. A lane that is its own
// neighbour, past the head, doubles its sum.
template <int Count>
__device__ __forceinline__ float head_sums(const float *x, int lanes, int reach) {
  static_assert(1 <= Count && Count <= 4, "two bits of a lane name a number");
  float sum = x[0];
  if constexpr (Count == 1) {
    sum += __shfl_xor_sync(~0u, sum, 1);
  } else {
    sum = half_sum(sum, x[1], 1);
  }
  if constexpr (Count <= 2) {
    sum += __shfl_xor_sync(~0u, sum, 2);
  } else if constexpr (Count == 3) {
    sum = half_sum(sum, x[2] + __shfl_xor_sync(~0u, x[2], 1), 2);
  } else {
    sum = half_sum(sum, half_sum(x[2], x[3], 1), 2);
  }
  if (int(threadIdx.x % 32) >= lanes) sum = 0;
#pragma unroll
  for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step & reach);
  return sum * (float(reach + 1) / 32);
}

// Number i of those that the four lanes around this one have.
__device__ __forceinline__ float of_four(float x, int i) {
  return __shfl_sync(~0u, x, i, 4);
}

}  // namespace qla
