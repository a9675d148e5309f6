// The inverse X of a 64x64 unit lower triangular matrix I + L, by one warpgroup.
//
// In blocks of 16x16, X has diagonal blocks D_i = (I + L_ii)^-1, and below them
//
//   X_ij = -D_i (L_ij D_j + sum_{j < k < i} L_ik X_kj)
//
// Warp i first inverts its own diagonal block. After one meeting of the warpgroup, warp j alone
// works down block column j, so nothing more crosses warps. It works on transposes: the running
// X_kj^T is then always a product's left operand, which comes straight out of the accumulator of
// the product before, and L_ik and D_i are right operands read from shared memory as they lie.
//
// Products run in TF32, with operands rounded to nearest. L lies in shared memory as fp32 rows of
// kLd floats: diagonal blocks as they are, zero on and above the diagonal; blocks below as -L,
// rounded to TF32. X leaves rounded once to 16 bits, as a [64][64] tile with the 128-byte swizzle
// that TMA and wgmma use. Blocks above the diagonal are never written: zero the tile once.
#pragma once
#include <tl_templates/cuda/instruction/mma.h>
#include <tl_templates/cuda/ldsm.h>

namespace qla {

constexpr int kLd = 72;  // floats per row: 8-byte accesses (8g + 2t mod 32) meet no bank twice

// A 16x16 block in the mma accumulator layout. Lane 4g + t holds, for n, h, e in {0, 1},
// c[4n + 2h + e] = element (8h + g, 8n + 2t + e).
struct Block {
  float c[8];
};

__device__ __forceinline__ float *block_at(float *s, int row, int column) {
  return s + 16 * (row * kLd + column);
}

__device__ __forceinline__ void store_block(float *s, const Block &x) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<float2 *>(s + (8 * h + g) * kLd + 8 * n + 2 * t) =
          make_float2(x.c[4 * n + 2 * h], x.c[4 * n + 2 * h + 1]);
}

// Bits of a TF32 operand, to nearest: the tensor core itself would cut the low bits off and bias
// every product.
__device__ __forceinline__ unsigned tf32(float x) { return __float_as_uint(x) + 0x1000u; }

__device__ __forceinline__ void mma_tf32(float *c, const unsigned *left, const unsigned *right) {
  tl::mma_sync<tl::DataType::kTensorFloat32, tl::DataType::kTensorFloat32, tl::DataType::kFloat32,
               16, 8, 8, false, true>(c, left, right);
}

// acc += a b^T, with b in shared memory; kRound where b is not in TF32 yet. A product may visit the
// inner index in any order, and here it visits columns 2t and 2t + 1 where mma says t and t + 4:
// then the accumulator layout is the left operand's layout, and nothing is shuffled.
template <bool kRound>
__device__ __forceinline__ void multiply_add(Block &acc, const Block &a, const float *b) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const unsigned left[4] = {tf32(a.c[4 * k]), tf32(a.c[4 * k + 2]), tf32(a.c[4 * k + 1]),
                              tf32(a.c[4 * k + 3])};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 v = *reinterpret_cast<const float2 *>(b + (8 * n + g) * kLd + 8 * k + 2 * t);
      const unsigned right[2] = {kRound ? tf32(v.x) : __float_as_uint(v.x),
                                 kRound ? tf32(v.y) : __float_as_uint(v.y)};
      mma_tf32(acc.c + 4 * n, left, right);
    }
  }
}

__device__ __forceinline__ unsigned round_pair(const bfloat16_t *, float lo, float hi) {
  const __nv_bfloat162 p = __float22bfloat162_rn(make_float2(lo, hi));
  return *reinterpret_cast<const unsigned *>(&p);
}

__device__ __forceinline__ unsigned round_pair(const half_t *, float lo, float hi) {
  const __half2 p = __float22half2_rn(make_float2(lo, hi));
  return *reinterpret_cast<const unsigned *>(&p);
}

// Round a block, or its transpose, into place in a swizzled [64][64] tile: 16-byte piece p of row r
// lies at p ^ r % 8.
template <bool kTransposed, class T>
__device__ __forceinline__ void put_block(T *tile, int row, int column, const Block &x) {
  const int lane = threadIdx.x & 31, i = lane & 7;
  const int low = lane >> 3 & 1, high = lane >> 4;  // which 8x8 quarter this lane addresses
  const int r = 16 * row + 8 * (kTransposed ? high : low) + i;
  const int piece = 2 * column + (kTransposed ? low : high);
  T *at = tile + 64 * r + 8 * (piece ^ (r & 7));
  const unsigned p0 = round_pair(tile, x.c[0], x.c[1]), p1 = round_pair(tile, x.c[2], x.c[3]),
                 p2 = round_pair(tile, x.c[4], x.c[5]), p3 = round_pair(tile, x.c[6], x.c[7]);
  if constexpr (kTransposed) tl::ptx_stmatrix_m8n8_x4_trans(at, p0, p1, p2, p3);
  else tl::ptx_stmatrix_m8n8_x4(at, p0, p1, p2, p3);
}

// D = (I + L)^-1 of one diagonal block by one warp, in place; returns D^T. The two 8x8 blocks on
// the diagonal by forward substitution in fp32, one column a lane (both halves of the warp alike),
// then the one below them as -X11 L10 X00.
__device__ __forceinline__ Block invert_diagonal(float *d) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int column = lane & 7, half = lane >> 3 & 1;
  float *own = d + 8 * half * (kLd + 1);
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float sum = i == column ? 1.f : 0.f;
#pragma unroll
    for (int q = 0; 4 * q < i; ++q) {
      const float4 l = *reinterpret_cast<const float4 *>(own + i * kLd + 4 * q);
      sum -= l.x * x[4 * q];
      if (4 * q + 1 < i) sum -= l.y * x[4 * q + 1];
      if (4 * q + 2 < i) sum -= l.z * x[4 * q + 2];
      if (4 * q + 3 < i) sum -= l.w * x[4 * q + 3];
    }
    x[i] = sum;
  }
  __syncwarp();
  if (lane < 16)
#pragma unroll
    for (int i = 0; i < 8; ++i) own[i * kLd + column] = x[i];
  __syncwarp();
  const float *upper = d + 2 * t * kLd + g, *lower = upper + 8 * (kLd + 1);
  const float2 l10 = *reinterpret_cast<const float2 *>(d + (8 + g) * kLd + 2 * t);
  const float2 x11 = *reinterpret_cast<const float2 *>(d + (8 + g) * kLd + 8 + 2 * t);
  Block dt = {upper[0], upper[kLd], 0.f, 0.f, 0.f, 0.f, lower[0], lower[kLd]};
  // rows 0 to 7 of the accumulator alone: X00^T L10^T, and that times X11^T
  float z[4] = {}, y[4] = {};
  const unsigned left[4] = {tf32(dt.c[0]), 0u, tf32(dt.c[1]), 0u};
  const unsigned right[2] = {tf32(-l10.x), tf32(-l10.y)};
  mma_tf32(z, left, right);
  const unsigned left2[4] = {tf32(z[0]), 0u, tf32(z[1]), 0u};
  const unsigned right2[2] = {tf32(x11.x), tf32(x11.y)};
  mma_tf32(y, left2, right2);
  dt.c[4] = y[0];
  dt.c[5] = y[1];
  __syncwarp();  // every lane has read L10
  d[(8 + 2 * t) * kLd + g] = y[0];
  d[(9 + 2 * t) * kLd + g] = y[1];
  return dt;
}

// Block column J of X below its diagonal block, given D_J^T.
template <int J, class T>
__device__ __forceinline__ void solve_column(float *s, T *tile, const Block &dt) {
  Block x[4 - J];  // X_kJ^T
  x[0] = dt;
#pragma unroll
  for (int i = J + 1; i < 4; ++i) {
    Block y = {};
#pragma unroll
    for (int k = J; k < i; ++k) multiply_add<false>(y, x[k - J], block_at(s, i, k));
    x[i - J] = Block{};
    multiply_add<true>(x[i - J], y, block_at(s, i, i));
    put_block<true>(tile, i, J, x[i - J]);
  }
}

}  // namespace qla
