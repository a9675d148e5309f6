// Two state warpgroups hold the same 64 rows (of V) of a state, and each half of its K columns. A
// product of the state with K^T is then a sum of two, one in each warpgroup, and both warpgroups
// need all of it. Each completes the columns of 32 of the chunk's 64 tokens: number 0 the first 32.
//
// Register 4j + 2h + e of lane 4g + t in warp W is row 16W + 8h + g, column 8j + 2t + e, so 32
// columns are 16 consecutive registers, and a thread exchanges numbers with one thread alone, the
// one of the same number in the other warpgroup. The numbers pass through `low` and `high`, each
// [2 warpgroups][2][128 threads] of 16 bytes, 8 KB. The summands take all of both, the results take
// `low`. After that both may become [64][64] tiles of 16 bits whose rows are tokens: each warpgroup
// writes the rows of the other one's tokens, which in `low` lie where it has just read its results.
// Needs triangular.cuh.
#pragma once
#include <tl_templates/cuda/ldsm.h>

namespace qla {

// Returns the place of a thread's 16 bytes number i of 4 of what warpgroup `to` receives.
__device__ __forceinline__ uint4 *place_of(void *low, void *high, int to, int i) {
  return static_cast<uint4 *>(i < 2 ? low : high) + 256 * to + 128 * (i & 1) + (threadIdx.x & 127);
}

// Adds the other warpgroup's numbers to this one's columns of x, and gives it the others. Both get
// the same bits from the same two summands. The other half of x is left as it was.
template <int kOwn>
__device__ __forceinline__ void sum_half(float *x, void *low, void *high, int barrier) {
  const float *given = x + 16 * (1 - kOwn);
  float *own = x + 16 * kOwn;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    *reinterpret_cast<float4 *>(place_of(low, high, 1 - kOwn, i)) =
        make_float4(given[4 * i], given[4 * i + 1], given[4 * i + 2], given[4 * i + 3]);
  tl::__sync_thread_partial(barrier, 256);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 other = *reinterpret_cast<const float4 *>(place_of(low, high, kOwn, i));
    own[4 * i] += other.x;
    own[4 * i + 1] += other.y;
    own[4 * i + 2] += other.z;
    own[4 * i + 3] += other.w;
  }
}

// Gives the other warpgroup this one's columns of x, rounded, and gets its columns. A thread writes
// where it has just read its summands; only the other warpgroup's thread reads there after that.
template <int kOwn, class T>
__device__ __forceinline__ void share_half(T *x, void *low, int barrier) {
  unsigned *pairs = reinterpret_cast<unsigned *>(x);
  const unsigned *own = pairs + 8 * kOwn;
  unsigned *got = pairs + 8 * (1 - kOwn);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    *place_of(low, low, kOwn, i) =
        make_uint4(own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]);
  tl::__sync_thread_partial(barrier, 256);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 other = *place_of(low, low, 1 - kOwn, i);
    got[4 * i] = other.x;
    got[4 * i + 1] = other.y;
    got[4 * i + 2] = other.z;
    got[4 * i + 3] = other.w;
  }
}

// Writes the other warpgroup's columns of a [64][64] accumulator, already rounded, to the rows of the
// same numbers of a swizzled tile.
template <int kOwn, class T>
__device__ __forceinline__ void stage_half_transposed(const T *x, T *tile) {
  const int *pairs = reinterpret_cast<const int *>(x), w = threadIdx.x >> 5 & 3;
#pragma unroll
  for (int b = 2 - 2 * kOwn; b < 4 - 2 * kOwn; ++b)
    tl::ptx_stmatrix_m8n8_x4_trans(quarter_row<false>(tile, b, w), pairs[4 * b], pairs[4 * b + 1],
                                   pairs[4 * b + 2], pairs[4 * b + 3]);
}

}  // namespace qla
