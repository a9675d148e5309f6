// What is left: block orders, things with no effect here, printing and asserting.
#pragma once

#include "scheduler.h"

namespace tl {

// ---- no effect on one block's values; a missing proxy fence is reported ----
template <int registers>
void warpgroup_reg_alloc() {}
template <int registers>
void warpgroup_reg_dealloc() {}
inline void fence_proxy_async() { emu::current->fenced = ++emu::block->clock; }
inline void fence_barrier_init() {}

// ---- T.use_swizzle: panels of `width` rows or columns, every other one walked backwards ----
template <int width>
dim3 rasterization2DRow() {
  unsigned linear = ::blockIdx.x + ::blockIdx.y * gridDim.x;
  unsigned panel = linear / (width * gridDim.x), offset = linear % (width * gridDim.x);
  unsigned rows = std::min<unsigned>(width, gridDim.y - panel * width);
  unsigned column = offset / rows;
  return {panel % 2 ? gridDim.x - 1 - column : column, offset % rows + panel * width, ::blockIdx.z};
}
template <int width>
dim3 rasterization2DColumn() {
  unsigned linear = ::blockIdx.x + ::blockIdx.y * gridDim.x;
  unsigned panel = linear / (width * gridDim.y), offset = linear % (width * gridDim.y);
  unsigned columns = std::min<unsigned>(width, gridDim.x - panel * width);
  unsigned row = offset / columns;
  return {offset % columns + panel * width, panel % 2 ? gridDim.y - 1 - row : row, ::blockIdx.z};
}

}  // namespace tl

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}

// ---- T.print, T.device_assert ----
namespace emu {

void print(const char* message, const std::string& what);
template <class T>
std::string text_of(T value) {
  if constexpr (std::is_pointer_v<T>) return format("%p", (const void*)value);
  else if constexpr (std::is_integral_v<T>) return format("%lld", (long long)value);
  else return format("%g", double(float(value)));
}

}  // namespace emu

template <class T>
void debug_print_var(const char* message, T value) {
  emu::print(message, emu::text_of(value));
}
template <class T>
void debug_print_buffer_value(const char* message, const char* buffer, int index, T value) {
  emu::print(message, emu::format("%s[%d] = %s", buffer, index, emu::text_of(value).c_str()));
}
inline void debug_print_msg(const char* message) { emu::print(message, ""); }
inline void device_assert(bool condition) {
  if (!condition) emu::fail("device_assert failed");
}
inline void device_assert_with_msg(bool condition, const char* message) {
  if (!condition) emu::fail("device_assert failed: %s", message);
}
