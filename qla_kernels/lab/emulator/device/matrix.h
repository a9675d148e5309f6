// ldmatrix and stmatrix: 8 x 8 tiles of 16-bit elements, between shared memory and registers.
//
// Lane l holds elements (l / 4, 2 (l % 4)) and the next one of each tile, transposed for .trans;
// the address of row r of tile m comes from lane 8 m + r.
#pragma once

#include "shared_memory.h"
#include "warp.h"

namespace emu {

inline uint16_t* element(const Meeting& meeting, int tile, int lane, int i, bool transposed) {
  int row = transposed ? lane % 4 * 2 + i : lane / 4;
  int column = transposed ? lane / 4 : lane % 4 * 2 + i;
  return reinterpret_cast<uint16_t*>(meeting.payloads[tile * 8 + row][0]) + column;
}

inline uint64_t row_address(const void* pointer, bool used) {
  if (used && shared_address(pointer) % 16) fail("ldmatrix/stmatrix: row not 16-byte aligned");
  return reinterpret_cast<uint64_t>(pointer);
}

template <int tiles, bool transposed>
void load_matrix(const void* row, void* registers, Where where) {
  auto meeting = meet("ldmatrix", ~0u, {row_address(row, lane() < 8 * tiles)}, where);
  auto* target = static_cast<uint16_t*>(registers);
  for (int m = 0; m < tiles; ++m)
    for (int i = 0; i < 2; ++i) target[m * 2 + i] = *element(*meeting, m, lane(), i, transposed);
  meet("ldmatrix", ~0u, {}, where);  // nobody overwrites a row before everybody has read it
}

template <int tiles, bool transposed>
void store_matrix(const void* row, const uint32_t (&registers)[tiles], Where where) {
  auto meeting = meet("stmatrix", ~0u, {row_address(row, lane() < 8 * tiles)}, where);
  for (int m = 0; m < tiles; ++m)
    for (int i = 0; i < 2; ++i)
      *element(*meeting, m, lane(), i, transposed) = uint16_t(registers[m] >> 16 * i);
  meet("stmatrix", ~0u, {}, where);
}

}  // namespace emu

namespace tl {

#define EMU_LDMATRIX(name, tiles, transposed)                                  \
  inline void name(const void* row, void* registers, EMU_WHERE) {              \
    emu::load_matrix<tiles, transposed>(row, registers, where);                \
  }
EMU_LDMATRIX(ptx_ldmatrix_x1, 1, false)
EMU_LDMATRIX(ptx_ldmatrix_x2, 2, false)
EMU_LDMATRIX(ptx_ldmatrix_x4, 4, false)
EMU_LDMATRIX(ptx_ldmatrix_x1_trans, 1, true)
EMU_LDMATRIX(ptx_ldmatrix_x2_trans, 2, true)
EMU_LDMATRIX(ptx_ldmatrix_x4_trans, 4, true)
#undef EMU_LDMATRIX

#define EMU_STMATRIX(x1, x2, x4, transposed)                                   \
  inline void x1(const void* row, uint32_t a, EMU_WHERE) {                     \
    emu::store_matrix<1, transposed>(row, {a}, where);                         \
  }                                                                            \
  inline void x2(const void* row, uint32_t a, uint32_t b, EMU_WHERE) {         \
    emu::store_matrix<2, transposed>(row, {a, b}, where);                      \
  }                                                                            \
  inline void x4(const void* row, uint32_t a, uint32_t b, uint32_t c,          \
                 uint32_t d, EMU_WHERE) {                                      \
    emu::store_matrix<4, transposed>(row, {a, b, c, d}, where);                \
  }
EMU_STMATRIX(ptx_stmatrix_x1, ptx_stmatrix_x2, ptx_stmatrix_x4, false)
EMU_STMATRIX(ptx_stmatrix_x1_trans, ptx_stmatrix_x2_trans, ptx_stmatrix_x4_trans, true)
EMU_STMATRIX(ptx_stmatrix_m8n8_x1, ptx_stmatrix_m8n8_x2, ptx_stmatrix_m8n8_x4, false)
EMU_STMATRIX(ptx_stmatrix_m8n8_x1_trans, ptx_stmatrix_m8n8_x2_trans, ptx_stmatrix_m8n8_x4_trans,
             true)
#undef EMU_STMATRIX

}  // namespace tl
