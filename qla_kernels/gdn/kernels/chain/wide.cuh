// Products of a state with the keys and queries of a chunk, for a state that fills the registers.
//
// A warpgroup has S^T, [64][K] in fp32, in the registers of a wgmma accumulator: register 4j + 2h + e
// of lane 4g + t in warp W is row 16W + 8h + g, column 8j + 2t + e. The products' left operand is
// S^T in 16 bits. There is no room for all of it, so it is made in slabs of a few columns, two of
// which exist at a time: one is rounded while the products of the one before run. This file needs
// gated_tiles.cuh.
#pragma once

namespace qla {

// Rounds the columns of slab p: operands, 4 registers for 16 columns.
template <int kColumns, class T>
__device__ __forceinline__ void round_slab(int *slab, const float *s, int p) {
  const T *kind = nullptr;
  const float *columns = s + p * kColumns / 2;
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i)
    slab[i] = round_pair(kind, columns[2 * i], columns[2 * i + 1]);
  tl::warpgroup_fence_operand(reinterpret_cast<uint32_t *>(slab), kColumns / 4);
}

// Issues c (+)= a b^T for the columns of slab p; b is a [64][K] tile in 128-byte swizzled panels.
template <int kColumns, class T>
__device__ __forceinline__ void multiply_slab(float *c, const int *slab, tl::GmmaDescriptor b,
                                              int p) {
  const uint32_t *a = reinterpret_cast<const uint32_t *>(slab);
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i) {
    const int n = p * (kColumns / 16) + i;
    const int step = (n / 4 * 64 * 128 + n % 4 * 32) >> 4;  // in the descriptor's 16-byte units
    tl::wgmma_rs<Kind<T>::value, Kind<T>::value, tl::DataType::kFloat32, 64, 64, 16, false, false,
                 1, 1>(a + 4 * i, uint64_t(b + step), reinterpret_cast<uint32_t *>(c), n > 0);
  }
  tl::warpgroup_commit_batch();
}

// Starts x = s k^T and o = s q^T, of which o is the last in flight. Nothing else may be in flight.
// `slabs` are two slabs of kColumns columns of s; they stay in use while o is in flight.
template <int K, int kColumns, class T>
__device__ __forceinline__ void start_products(float *x, float *o, int *slabs, const float *s,
                                               const T *k, const T *q) {
  tl::GmmaDescriptor kt, qt;
  tl::initialize_wgmma_descriptor<1, 1, 64>(kt, const_cast<T *>(k));
  tl::initialize_wgmma_descriptor<1, 1, 64>(qt, const_cast<T *>(q));
  // ptxas has to be told that s is complete, or it inserts waits where s is read (C7517).
  tl::wait_wgmma<0>();
  tl::warpgroup_fence_operand(x, 32);
  tl::warpgroup_fence_operand(o, 32);
#pragma unroll
  for (int p = 0; p < K / kColumns; ++p) {
    int *slab = slabs + p % 2 * (kColumns / 4);
    if (p >= 2) tl::wait_wgmma<2>();  // for the products that read this slab's registers
    round_slab<kColumns, T>(slab, s, p);
    tl::warpgroup_arrive();
    multiply_slab<kColumns, T>(x, slab, kt, p);
    multiply_slab<kColumns, T>(o, slab, qt, p);
  }
  tl::warpgroup_fence_operand(x, 32);
  tl::warpgroup_fence_operand(o, 32);
}

// Waits for a product, while kInFlight later ones stay in flight.
template <int kInFlight> __device__ __forceinline__ void await_product(float *c) {
  tl::wait_wgmma<kInFlight>();
  tl::warpgroup_fence_operand(c, 32);
}

}  // namespace qla
