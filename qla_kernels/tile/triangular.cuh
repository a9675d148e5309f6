// The inverse X of a 64x64 unit lower triangular matrix I + L.
//
// In blocks of 16x16, X has diagonal blocks D_i = (I + L_ii)^-1, and below them
//
//   X_ij = -D_i (L_ij D_j + sum_{j < k < i} L_ik X_kj)
//
// The diagonal blocks are inverted first. Then each warp of a warpgroup works down one block
// column, and no more data crosses warps. It computes transposes: the running X_kj^T is then always
// the left operand of a product, directly in the layout of the previous product's accumulator, and
// L_ik and D_i are right operands that ldmatrix reads without transposing.
//
// Operands of products are rounded to fp16, which has as many mantissa bits as TF32 and needs half
// as many tensor instructions; these instructions dominate the time of the solve. Next to the unit
// diagonal the smallest step of fp16, 6e-8, is negligible. Entries beyond 65504 overflow.
//
// X is rounded once to 16 bits and written as a [64][64] tile with the 128-byte swizzle of TMA and
// wgmma. Blocks above the diagonal are never written: the caller zeroes the tile once.
#pragma once
#include <tl_templates/cuda/instruction/mma.h>
#include <tl_templates/cuda/ldsm.h>

namespace qla {

// Working memory of the solve: the diagonal blocks of L in fp32, zero on and above the diagonal,
// and an fp16 tile, swizzled as X is, with -L below the diagonal blocks and, later, the D_i.
constexpr int kLd = 24;  // floats per row: 8-byte accesses (24g + 2t mod 32) meet no bank twice
struct Scratch {
  float diagonal[4][16][kLd];
  half_t tile[64 * 64];
};

// A 16x16 block in the mma accumulator layout. Lane 4g + t holds, for n, h, e in {0, 1},
// c[4n + 2h + e] = element (8h + g, 8n + 2t + e).
struct Block {
  float c[8];
};

// A 16x16 operand of a product in fp16. A left operand holds pairs of a Block in the Block's order,
// and a right operand holds the transpose.
struct Operand {
  unsigned r[4];
};

__device__ __forceinline__ unsigned round_pair(const bfloat16_t *, float lo, float hi) {
  const __nv_bfloat162 p = __float22bfloat162_rn(make_float2(lo, hi));
  return *reinterpret_cast<const unsigned *>(&p);
}

__device__ __forceinline__ unsigned round_pair(const half_t *, float lo, float hi) {
  const __half2 p = __float22half2_rn(make_float2(lo, hi));
  return *reinterpret_cast<const unsigned *>(&p);
}

template <class T> __device__ __forceinline__ Operand rounded(const Block &x) {
  const T *kind = nullptr;
  return {round_pair(kind, x.c[0], x.c[1]), round_pair(kind, x.c[2], x.c[3]),
          round_pair(kind, x.c[4], x.c[5]), round_pair(kind, x.c[6], x.c[7])};
}

// Returns the address of this lane's row of 8 elements, for an instruction on the four 8x8 quarters
// of a block of a swizzled tile: 16-byte piece p of row r lies at p ^ r % 8. Quarters are in
// reading order, or in the order of columns for blocks that are held transposed.
template <bool kByColumns, class T>
__device__ __forceinline__ T *quarter_row(T *tile, int row, int column) {
  const int lane = threadIdx.x & 31, low = lane >> 3 & 1, high = lane >> 4;
  const int r = 16 * row + 8 * (kByColumns ? low : high) + (lane & 7);
  const int piece = 2 * column + (kByColumns ? high : low);
  return tile + 64 * r + 8 * (piece ^ (r & 7));
}

// Rounds a block, or its transpose, and writes it to block (row, column) of the tile.
template <bool kTransposed, class T>
__device__ __forceinline__ void put_block(T *tile, int row, int column, const Block &x) {
  const Operand p = rounded<T>(x);
  T *at = quarter_row<!kTransposed>(tile, row, column);
  if constexpr (kTransposed) tl::ptx_stmatrix_m8n8_x4_trans(at, p.r[0], p.r[1], p.r[2], p.r[3]);
  else tl::ptx_stmatrix_m8n8_x4(at, p.r[0], p.r[1], p.r[2], p.r[3]);
}

// acc += a b^T, where b is block (row, column) of the tile.
__device__ __forceinline__ void multiply_add(Block &acc, const Operand &a, half_t *tile, int row,
                                             int column) {
  Operand b;
  tl::ptx_ldmatrix_x4(quarter_row<false>(tile, row, column), b.r);
#pragma unroll
  for (int n = 0; n < 2; ++n)
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16,
                 false, true>(acc.c + 4 * n, a.r, b.r + 2 * n);
}

__device__ __forceinline__ void store_block(float (*s)[kLd], const Block &x) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<float2 *>(&s[8 * h + g][8 * n + 2 * t]) =
          make_float2(x.c[4 * n + 2 * h], x.c[4 * n + 2 * h + 1]);
}

// Returns the bits of a TF32 operand, rounded to nearest. The tensor core itself would truncate the
// low bits, which would bias every product.
__device__ __forceinline__ unsigned tf32(float x) { return __float_as_uint(x) + 0x1000u; }

// c = a b^T of 8x8 matrices, element (g, 2t + e) in c[e]. Rows 8 to 15 of mma's left operand are
// zero. The inner index is permuted, 2t and 2t + 1 in the places of mma's t and t + 4, so that
// accumulators can be used as operands.
__device__ __forceinline__ void multiply_8x8(float *c, float a0, float a1, float b0, float b1) {
  float wide[4] = {};
  const unsigned left[4] = {tf32(a0), 0u, tf32(a1), 0u}, right[2] = {tf32(b0), tf32(b1)};
  tl::mma_sync<tl::DataType::kTensorFloat32, tl::DataType::kTensorFloat32, tl::DataType::kFloat32,
               16, 8, 8, false, true>(wide, left, right);
  c[0] = wide[0];
  c[1] = wide[1];
}

// Inverts the two 8x8 diagonal blocks of I + L_ii in place, for each of kBlocks blocks L_ii, by
// forward substitution in fp32. A lane has one column of one 8x8 block, so half a warp inverts both
// of them. The other half may work on other L_ii, or not write.
template <int kBlocks>
__device__ __forceinline__ void substitute(float (*const (&d)[kBlocks])[kLd], bool writes) {
  const int lane = threadIdx.x & 31, column = lane & 7, first = lane & 8;
  float x[kBlocks][8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float sum = i == column ? 1.f : 0.f;
#pragma unroll
      for (int q = 0; 4 * q < i; ++q) {
        const float4 l = *reinterpret_cast<const float4 *>(&d[b][first + i][first + 4 * q]);
        sum -= l.x * x[b][4 * q];
        if (4 * q + 1 < i) sum -= l.y * x[b][4 * q + 1];
        if (4 * q + 2 < i) sum -= l.z * x[b][4 * q + 2];
        if (4 * q + 3 < i) sum -= l.w * x[b][4 * q + 3];
      }
      x[b][i] = sum;
    }
  __syncwarp();
  if (writes)
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int i = 0; i < 8; ++i) d[b][first + i][first + column] = x[b][i];
  __syncwarp();
}

// Returns D^T. Its 8x8 blocks are the two inverses X00 and X11, and -X11 L10 X00 between them.
__device__ __forceinline__ Block join(float (*d)[kLd]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const float2 l10 = *reinterpret_cast<const float2 *>(&d[8 + g][2 * t]);
  const float2 x11 = *reinterpret_cast<const float2 *>(&d[8 + g][8 + 2 * t]);
  const float x00[2] = {d[2 * t][g], d[2 * t + 1][g]};  // X00^T
  float z[2], y[2];
  multiply_8x8(z, x00[0], x00[1], -l10.x, -l10.y);
  multiply_8x8(y, z[0], z[1], x11.x, x11.y);
  return {x00[0], x00[1], 0.f, 0.f, y[0], y[1], d[8 + 2 * t][8 + g], d[9 + 2 * t][8 + g]};
}

// Writes D_i to the scratch's tile and to the tile of X.
template <class T> __device__ __forceinline__ void put_inverse(Scratch *s, T *tile, int i) {
  const Block dt = join(s->diagonal[i]);
  put_block<true>(s->tile, i, i, dt);
  put_block<true>(tile, i, i, dt);
}

// Inverts all four diagonal blocks, by one warp.
template <class T> __device__ __forceinline__ void invert_diagonals(void *scratch, T *tile) {
  Scratch *s = static_cast<Scratch *>(scratch);
  const int half = threadIdx.x >> 4 & 1;
  substitute<2>({s->diagonal[half], s->diagonal[2 + half]}, true);
#pragma unroll 1
  for (int i = 0; i < 4; i += 2) {
    put_inverse(s, tile, i);
    put_inverse(s, tile, i + 1);
  }
}

// Solves one block column of X below its diagonal block. The column is not a template argument,
// because the code of all roles of a kernel has to fit the SM's instruction cache of 32 KB.
template <class T> __device__ __forceinline__ void solve_column(half_t *s, T *tile, int column) {
  Operand x[3];  // X_kj^T, from the diagonal down
  tl::ptx_ldmatrix_x4_trans(quarter_row<false>(s, column, column), x[0].r);
#pragma unroll
  for (int below = 1; below < 4; ++below) {
    const int row = column + below;
    if (row > 3) return;
    Block sum = {}, y = {};
#pragma unroll
    for (int k = 0; k < below; ++k) multiply_add(sum, x[k], s, row, column + k);
    multiply_add(y, rounded<half_t>(sum), s, row, row);
    put_block<true>(tile, row, column, y);
    if (below < 3) x[below] = rounded<half_t>(y);
  }
}

}  // namespace qla
