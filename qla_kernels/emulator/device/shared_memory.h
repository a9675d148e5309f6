// Shared memory of the running block: static arrays, then the dynamic buffer, then a page that
// faults. It starts out as bytes 0xff, which is NaN in every format.
#pragma once

#include "scheduler.h"

namespace emu {

struct SharedMemory {
  static constexpr uint32_t kStaticCapacity = 16384;  // descriptors reach 256 KB, dynamic has 227
  uint8_t* begin;  // address 0 of the shared window
  uint32_t dynamic_bytes;
  uint32_t static_bytes = 0;  // in use by the running block
  uint8_t* dynamic() const { return begin + kStaticCapacity; }
  uint8_t* end() const { return dynamic() + dynamic_bytes; }
};

void* allocate_static_shared(size_t bytes, size_t alignment);

// translate.py turns `extern __shared__ T name[]` into a pointer from here ...
inline void* dynamic_shared() { return block->shared->dynamic(); }

// ... and `__shared__ T name[n]` into a reference from here, one array per declaration and block.
template <class T>
T& static_shared(const void* declaration) {
  void*& array = block->static_shared[declaration];
  if (!array) array = allocate_static_shared(sizeof(T), std::max<size_t>(alignof(T), 16));
  return *static_cast<T*>(array);
}

inline bool is_shared(const void* pointer) {
  auto* byte = static_cast<const uint8_t*>(pointer);
  return byte >= block->shared->begin && byte <= block->shared->end();
}

// The 32-bit shared-memory address that TMA, ldmatrix and wgmma descriptors use, and back.
inline uint32_t shared_address(const void* pointer) {
  if (!is_shared(pointer)) fail("a pointer that is not into shared memory is used as one");
  return uint32_t(static_cast<const uint8_t*>(pointer) - block->shared->begin);
}
inline uint8_t* shared_pointer(uint32_t address) { return block->shared->begin + address; }

// The swizzle of TMA boxes and wgmma tiles: address bits 4, 5, 6 are crossed with bits 7, 8, 9.
inline uint32_t swizzled(uint32_t address, uint32_t span) {
  uint32_t mask = span == 128 ? 0x70 : span == 64 ? 0x30 : span == 32 ? 0x10 : 0;
  return address ^ (address >> 3 & mask);
}

}  // namespace emu

inline size_t __cvta_generic_to_shared(const void* pointer) { return emu::shared_address(pointer); }
inline uint32_t smem_ptr_to_uint(const void* pointer) { return emu::shared_address(pointer); }
inline unsigned cast_smem_ptr_to_int(const void* pointer) { return emu::shared_address(pointer); }
