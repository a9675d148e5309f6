// What the host stand-in writes into a CUtensorMap, and what TMA reads back.
#pragma once

#include <cstdint>

namespace emu {

enum class MapType : uint8_t {  // the driver's CUtensorMapDataType
  U8, U16, U32, I32, U64, I64, F16, F32, F64, BF16, F32Ftz, TF32, TF32Ftz
};

struct TensorMap {
  static constexpr uint32_t kMagic = 0x54414d45;
  uint32_t magic;
  MapType type;
  uint8_t rank;
  uint8_t element_bytes;
  uint8_t swizzle_span;  // bytes; 0: none
  uint8_t* address;
  uint64_t dim[5];
  uint64_t stride[5];  // bytes
  uint16_t box[5];
  bool fill_nan;       // out-of-bounds elements read as NaN instead of zero
};

}  // namespace emu

struct CUtensorMap {
  alignas(64) emu::TensorMap map;
};
static_assert(sizeof(CUtensorMap) == 128, "generated host code reserves 128 bytes");
