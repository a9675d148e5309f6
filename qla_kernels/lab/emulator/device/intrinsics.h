// Scalar intrinsics. Approximate ones are computed to the last bit: ulps are not modelled.
#pragma once

#include "float16.h"

inline float __expf(float x) { return std::exp(x); }
inline float __exp10f(float x) { return std::pow(10.0f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __tanhf(float x) { return std::tanh(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __saturatef(float x) { return std::fmin(std::fmax(x, 0.0f), 1.0f); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __mul24(int x, int y) { return x * y; }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1) << (31 - i);
  return reversed;
}

inline int __float_as_int(float x) { return emu::bit_copy<int>(x); }
inline float __int_as_float(int x) { return emu::bit_copy<float>(x); }
inline unsigned __float_as_uint(float x) { return emu::bit_copy<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emu::bit_copy<float>(x); }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline float __int2float_rn(int x) { return float(x); }

template <class T>
inline T __ldg(const T* address) {
  return *address;
}

// CUDA's min and max take mixed types, and prefer the number when one operand is NaN.
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
  else return T(a) < T(b) ? T(b) : T(a);
}
template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
  else return T(b) < T(a) ? T(b) : T(a);
}

namespace tl {

inline float fast_rcp(float x) { return 1.0f / x; }
template <class T>
inline T fast_max(T a, T b) {
  return ::max(a, b);
}
template <class T>
inline T fast_min(T a, T b) {
  return ::min(a, b);
}
template <class T>
inline T clamp(T x, T low, T high) {
  return std::isnan(float(x)) ? x : ::min(::max(x, low), high);
}
template <int power = 1, class T>
inline T pow_of_int(T x) {
  T result = x;
  for (int i = 1; i < power; ++i) result *= x;
  return result;
}
template <class T>
inline bool Any(T* values, int count) {
  return std::any_of(values, values + count, [](T value) { return bool(value); });
}
template <class T>
inline bool All(T* values, int count) {
  return std::all_of(values, values + count, [](T value) { return bool(value); });
}

}  // namespace tl
