// wgmma: warpgroup matrix products that read their operands and write their accumulators late,
// only when a wait forces them to.
#pragma once

#include "float16.h"
#include "shared_memory.h"

namespace tl {

enum class DataType : int {
  kInt4, kUInt4, kInt8, kUInt8, kInt16, kUInt16, kInt32, kUInt32, kInt64, kUInt64,
  kFloat8_e4m3, kFloat8_e5m2, kFloat16, kBFloat16, kFloat16x2, kFloat32, kTensorFloat32
};

}  // namespace tl

namespace emu {

constexpr bool is_matrix_input(tl::DataType type) {
  return type == tl::DataType::kFloat16 || type == tl::DataType::kBFloat16 ||
         type == tl::DataType::kTensorFloat32;
}
constexpr int bytes_of(tl::DataType type) { return type == tl::DataType::kTensorFloat32 ? 4 : 2; }

// One element of a matrix operand; tf32 drops the low 13 mantissa bits, as the tensor cores do.
inline float matrix_element(tl::DataType type, const void* address) {
  if (type == tl::DataType::kTensorFloat32) {
    uint32_t bits;
    std::memcpy(&bits, address, 4);
    return bit_copy<float>(bits & 0xffffe000);
  }
  uint16_t bits;
  std::memcpy(&bits, address, 2);
  return type == tl::DataType::kBFloat16 ? BFloat16Bits::widen(bits) : HalfBits::widen(bits);
}

struct WgmmaShape {
  tl::DataType a, b;
  int n, k;
  bool a_mn_major, b_mn_major;  // "transposed" operands
  int a_sign, b_sign;
  bool a_in_registers;
  bool operator==(const WgmmaShape&) const = default;
};

// One instruction, put together from the calls of its 128 threads.
struct Wgmma {
  WgmmaShape shape;
  uint64_t a = 0, b = 0;  // descriptors
  int issued = 0;         // threads that have issued it
  bool invalid = false;   // its numbers are NaN
  uint32_t time = 0;      // at which the last of them did
  Where where;
  const uint32_t* a_registers[kWarpgroup];
  float* accumulators[kWarpgroup];
  bool accumulate[kWarpgroup];
};

struct WgmmaQueue {
  std::deque<Wgmma> instructions;
  long first = 0;      // position of instructions.front() among all that were issued
  long requested = 0;  // instructions that some wait has asked for
  long done = 0;       // instructions that were carried out
  std::vector<Where> lines;  // of all that were issued
  static constexpr int kLatest = -1;  // until nothing else can move
  int busy = 0;        // scheduler rounds until the requested ones are done
};

void issue_wgmma(const WgmmaShape& shape, uint64_t a, const uint32_t* a_registers, uint64_t b,
                 float* accumulators, bool accumulate, Where where);
void commit_wgmmas();
void wait_for_wgmmas(int in_flight, Where where);

}  // namespace emu

namespace tl {

struct GmmaDescriptor {
  uint32_t reg32_[2] = {0, 0};
  template <class T>
  GmmaDescriptor operator+(T offset) const {
    GmmaDescriptor moved = *this;
    moved.reg32_[0] += uint32_t(offset);
    return moved;
  }
  explicit operator uint64_t() const { return uint64_t(reg32_[1]) << 32 | reg32_[0]; }
};

// Offsets arrive in units of 16 bytes.
template <int layout, int leading_offset, int stride_offset, class T>
void initialize_wgmma_descriptor(GmmaDescriptor& descriptor, T* start) {
  descriptor.reg32_[0] = emu::shared_address(start) >> 4 | uint32_t(leading_offset) << 16;
  descriptor.reg32_[1] = uint32_t(stride_offset) | uint32_t(layout) << 30;
}
template <class T>
void increase_descriptor_offset(GmmaDescriptor& descriptor, T offset) {
  descriptor.reg32_[0] += uint32_t(offset >> 4);
}

template <DataType A, DataType B, DataType C, int M, int N, int K, bool a_mn, bool b_mn, int sa,
          int sb, bool a_in_registers>
constexpr emu::WgmmaShape wgmma_shape() {
  static_assert(C == DataType::kFloat32, "the emulator's wgmma accumulates in float32");
  static_assert(emu::is_matrix_input(A) && emu::is_matrix_input(B),
                "the emulator's wgmma takes float16, bfloat16 and tf32 operands");
  static_assert(M == 64 && N % 8 == 0 && N <= 256 && K * emu::bytes_of(A) == 32);
  static_assert(!(a_mn || b_mn) || emu::bytes_of(A) == 2, "tf32 operands are K-major");
  return {A, B, N, K, a_mn, b_mn, sa, sb, a_in_registers};
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool a_mn, bool b_mn, int sa = 1,
          int sb = 1>
void wgmma_ss(uint64_t a, uint64_t b, uint32_t* c, bool accumulate,
              emu::Where where = emu::Where::current()) {
  emu::issue_wgmma(wgmma_shape<A, B, C, M, N, K, a_mn, b_mn, sa, sb, false>(), a, nullptr, b,
                   reinterpret_cast<float*>(c), accumulate, where);
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool a_mn, bool b_mn, int sa = 1,
          int sb = 1>
void wgmma_rs(const uint32_t* a, uint64_t b, uint32_t* c, bool accumulate,
              emu::Where where = emu::Where::current()) {
  emu::issue_wgmma(wgmma_shape<A, B, C, M, N, K, a_mn, b_mn, sa, sb, true>(), 0, a, b,
                   reinterpret_cast<float*>(c), accumulate, where);
}

inline void warpgroup_arrive() {}
inline void warpgroup_fence_operand(void*, int) {}
inline void warpgroup_commit_batch() { emu::commit_wgmmas(); }
template <int in_flight>
void warpgroup_wait(emu::Where where = emu::Where::current()) {
  emu::wait_for_wgmmas(in_flight, where);
}
template <int in_flight>
void wait_wgmma(emu::Where where = emu::Where::current()) {
  emu::wait_for_wgmmas(in_flight, where);
}

}  // namespace tl
