// Writes a state from the registers of a wgmma accumulator to memory; a warpgroup has 64 rows.
// Register 4j + 2h + e of lane 4g + t in warp W is row 16W + 8h + g, column 8j + 2t + e.
#pragma once
#include <tl_templates/cuda/ldsm.h>

namespace qla {

// Writes a state that is rounded to 16 bits to a shared tile for TMA. The tile consists of panels
// of 64 columns with the 128-byte swizzle: the 16-byte piece p of row r lies at p ^ r % 8.
template <int kColumns, class T>
__device__ __forceinline__ void stage_state(const T *registers, T *tile) {
  const int *pairs = reinterpret_cast<const int *>(registers);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  T *row = tile + 64 * (16 * warp + (lane & 15));
  const int piece = lane >> 4 ^ (lane & 7);
#pragma unroll
  for (int j = 0; j < kColumns / 16; ++j)
    tl::ptx_stmatrix_m8n8_x4(row + j / 4 * 64 * 64 + 8 * (2 * (j % 4) ^ piece), pairs[4 * j],
                             pairs[4 * j + 1], pairs[4 * j + 2], pairs[4 * j + 3]);
}

// Writes a state in fp32, transposed. Rows lie `row` and columns `column` elements apart, and `at`
// is the destination of this thread's first element. One address is advanced: nvcc would otherwise
// form all 64 addresses first, more than a thread can hold besides the state.
template <int kColumns>
__device__ __forceinline__ void scatter_state(const float *registers, float *at, int64_t row,
                                            int64_t column) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j, at += 8 * column) {
    at[0] = registers[4 * j];
    at[column] = registers[4 * j + 1];
    at[8 * row] = registers[4 * j + 2];
    at[8 * row + column] = registers[4 * j + 3];
  }
}

}  // namespace qla
