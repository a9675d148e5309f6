// The CUDA language surface that generated kernels use: keywords, launch coordinates, vectors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <math.h>
#include <type_traits>

#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))
#define TL_DEVICE inline
#define TL_DEVICE_NOINLINE __attribute__((noinline)) inline

#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define CUDART_INF ((double)INFINITY)
#define CUDART_NAN ((double)NAN)

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
// Set by the scheduler each time it resumes a thread.
extern thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

#define EMU_VECTORS(T, name)                                                   \
  struct name##1 {                                                             \
    T x;                                                                       \
  };                                                                           \
  struct alignas(2 * sizeof(T)) name##2 {                                      \
    T x, y;                                                                    \
  };                                                                           \
  struct name##3 {                                                             \
    T x, y, z;                                                                 \
  };                                                                           \
  struct alignas(sizeof(T) > 4 ? 16 : 4 * sizeof(T)) name##4 {                 \
    T x, y, z, w;                                                              \
  };                                                                           \
  inline name##1 make_##name##1(T x) { return {x}; }                           \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                   \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }           \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

EMU_VECTORS(signed char, char)
EMU_VECTORS(unsigned char, uchar)
EMU_VECTORS(short, short)
EMU_VECTORS(unsigned short, ushort)
EMU_VECTORS(int, int)
EMU_VECTORS(unsigned int, uint)
EMU_VECTORS(long long, longlong)
EMU_VECTORS(unsigned long long, ulonglong)
EMU_VECTORS(float, float)
EMU_VECTORS(double, double)
#undef EMU_VECTORS

namespace emu {

// The device compares bits, not types, all over the place; this is the well-defined way to do it.
template <class To, class From>
inline To bit_copy(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace emu
