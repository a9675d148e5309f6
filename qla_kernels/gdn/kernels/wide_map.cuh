// The product of a state that fills the registers with the keys of a chunk, without the one with the
// queries. Needs wide.cuh, which says how the state becomes a left operand.
#pragma once

namespace qla {

// Starts x = s k^T. Nothing else may be in flight. `slabs` are two slabs of kColumns columns of s;
// they stay in use while x is in flight.
template <int K, int kColumns, class T>
__device__ __forceinline__ void start_slabs(float *x, int *slabs, const float *s, const T *k) {
  tl::GmmaDescriptor kt;
  tl::initialize_wgmma_descriptor<1, 1, 64>(kt, const_cast<T *>(k));
  // ptxas has to be told that s is complete, or it inserts waits where s is read (C7517).
  tl::wait_wgmma<0>();
  tl::warpgroup_fence_operand(x, 32);
#pragma unroll
  for (int p = 0; p < K / kColumns; ++p) {
    int *slab = slabs + p % 2 * (kColumns / 4);
    if (p >= 2) tl::wait_wgmma<1>();  // for the product that reads this slab's registers
    round_slab<kColumns, T>(slab, s, p);
    tl::warpgroup_arrive();
    multiply_slab<kColumns, T>(x, slab, kt, p);
  }
  tl::warpgroup_fence_operand(x, 32);
}

}  // namespace qla
