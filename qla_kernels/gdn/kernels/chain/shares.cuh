// A state that one CTA hands to another through global memory, in fp32.
//
// As in gated_tiles.cuh, a warpgroup has 64 columns of V, transposed, in the registers of a [64][K]
// accumulator. `shelf` has 16 bytes of each of its threads, then the next 16. A thread takes what
// the thread of its number has put there, so a flag a warp is enough, and no barrier.
#include <tl_templates/cuda/atomic.h>

namespace qla {

template <int K>
__device__ __forceinline__ void give_state(const float *s, float *shelf, int *flags) {
  float4 *to = reinterpret_cast<float4 *>(shelf) + threadIdx.x;
#pragma unroll
  for (int j = 0; j < K / 8; ++j)
    to[128 * j] = make_float4(s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]);
  __syncwarp();  // the release below is of all lanes' stores
  if ((threadIdx.x & 31) == 0) AtomicStore(flags + (threadIdx.x >> 5), 1, 3);  // release, device
}

template <int K>
__device__ __forceinline__ void take_state(float *s, const float *shelf, int *flags) {
  // Acquires, of the device. The vote tells the compiler that lanes leave the loop together.
  while (!__all_sync(~0u, AtomicLoad(flags + (threadIdx.x >> 5), 2) != 0)) {
  }
  const float4 *at = reinterpret_cast<const float4 *>(shelf) + threadIdx.x;
#pragma unroll
  for (int j = 0; j < K / 8; ++j) {
    const float4 x = at[128 * j];
    s[4 * j] = x.x;
    s[4 * j + 1] = x.y;
    s[4 * j + 2] = x.z;
    s[4 * j + 3] = x.w;
  }
}

}  // namespace qla
