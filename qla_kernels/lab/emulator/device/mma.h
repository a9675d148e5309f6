// mma.sync: 16 x 8 warp matrix products, immediate.
#pragma once

#include "warp.h"
#include "wgmma.h"

namespace emu {

// Fragment layouts. Lane l has g = l / 4 and t = l % 4; a 32-bit register holds `per` elements.
// A: register r covers row g + 8 (r % 2) and column (t + 4 (r / 2)) per + e
// B: register r covers row (t + 4 r) per + e and column g
// C: element i is row g + 8 (i / 2), column 2 t + i % 2
template <tl::DataType A, tl::DataType B, int K>
void multiply_fragments(float* c, const void* a, const void* b, Where where) {
  constexpr int per = 4 / bytes_of(A);
  constexpr int b_registers = K / (4 * per);
  Payload mine{};
  std::memcpy(&mine[0], a, 8 * b_registers);
  std::memcpy(&mine[2], b, 4 * b_registers);
  auto meeting = meet("mma_sync", ~0u, mine, where);

  int g = lane() / 4, t = lane() % 4;
  auto operand = [&](tl::DataType type, int source, int word, int r, int e) {
    auto* registers = reinterpret_cast<const uint8_t*>(&meeting->payloads[source][word]);
    return matrix_element(type, registers + 4 * r + e * bytes_of(type));
  };
  for (int i = 0; i < 4; ++i) {
    int half = i / 2, column = 2 * t + i % 2;
    float sum = 0;
    for (int k = 0; k < K; ++k) {
      int pair = k / per, source = pair % 4, r = pair / 4, e = k % per;
      sum += operand(A, g * 4 + source, 0, half + 2 * r, e) *
             operand(B, column * 4 + source, 2, r, e);
    }
    c[i] += sum;
  }
}

}  // namespace emu

namespace tl {

template <DataType A, DataType B, DataType C, int M, int N, int K, bool a_transposed,
          bool b_transposed, bool saturate = false, class TA, class TB>
void mma_sync(float* c, const TA* a, const TB* b, EMU_WHERE) {
  static_assert(C == DataType::kFloat32, "the emulator's mma_sync accumulates in float32");
  static_assert(emu::is_matrix_input(A) && emu::is_matrix_input(B),
                "the emulator's mma_sync takes float16, bfloat16 and tf32 operands");
  static_assert(M == 16 && N == 8 && K * emu::bytes_of(A) >= 16 && K * emu::bytes_of(A) <= 32);
  static_assert(!a_transposed && b_transposed && !saturate && sizeof(TA) == 4 && sizeof(TB) == 4);
  emu::multiply_fragments<A, B, K>(c, a, b, where);
}

}  // namespace tl
