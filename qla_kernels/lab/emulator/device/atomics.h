// Atomics on global memory, which the host threads running different blocks share, and on shared.
#pragma once

#include <atomic>

#include "float16.h"

namespace emu {

// Any read-modify-write: retried until no other host thread came between.
template <class T, class Op>
T atomic_update(T* address, Op op) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t,
                                  std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  static_assert(sizeof(T) == sizeof(Bits));
  std::atomic_ref<Bits> cell(*reinterpret_cast<Bits*>(address));
  Bits before = cell.load();
  while (!cell.compare_exchange_weak(before, bit_copy<Bits>(op(bit_copy<T>(before))))) {
  }
  return bit_copy<T>(before);
}

template <class T>
T atomic_add(T* address, T value) {
  return atomic_update(address, [=](T old) { return T(old + value); });
}

}  // namespace emu

// ---- CUDA's own ----
template <class T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return emu::atomic_add(address, value);
}
template <class T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return emu::atomic_update(address, [=](T old) { return old < value ? value : old; });
}
template <class T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return emu::atomic_update(address, [=](T old) { return value < old ? value : old; });
}
template <class T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return emu::atomic_update(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return emu::atomic_update(address, [=](T old) { return old == expected ? value : old; });
}

// ---- TileLang's: the last argument is a memory order, which adds nothing here ----
template <class T, class U>
void AtomicAdd(T* address, U value, int = 0) {
  emu::atomic_add(address, T(value));
}
template <class T, class U>
T AtomicAddRet(T* address, U value, int = 0) {
  return emu::atomic_add(address, T(value));
}
template <class T, class U>
void AtomicMax(T* address, U value, int = 0) {
  atomicMax(address, T(value));
}
template <class T, class U>
void AtomicMin(T* address, U value, int = 0) {
  atomicMin(address, T(value));
}
template <class T>
T AtomicLoad(T* address, int) {
  return emu::atomic_update(address, [](T old) { return old; });
}
template <class T, class U>
void AtomicStore(T* address, U value, int) {
  atomicExch(address, T(value));
}

#define EMU_ATOMIC_VECTOR(name, count, vector)                                 \
  template <class T>                                                           \
  void name(T* address, const std::type_identity_t<T>* values, int = 0) {      \
    for (int i = 0; i < count; ++i) emu::atomic_add(address + i, values[i]);   \
  }                                                                            \
  inline void name(float* address, vector values, int = 0) {                   \
    name(address, &values.x);                                                  \
  }
EMU_ATOMIC_VECTOR(AtomicAddx2, 2, float2)
EMU_ATOMIC_VECTOR(AtomicAddx4, 4, float4)
#undef EMU_ATOMIC_VECTOR
