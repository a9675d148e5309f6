// bfloat16 and half as storage types that compute in float and round to nearest even.
#pragma once

#include "cuda.h"

namespace emu {

struct BFloat16Bits {
  static float widen(uint16_t bits) { return bit_copy<float>(uint32_t(bits) << 16); }
  static uint16_t round(float value) {
    uint32_t bits = bit_copy<uint32_t>(value);
    if (std::isnan(value)) return 0x7fff;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

struct HalfBits {
  static float widen(uint16_t bits) { return float(bit_copy<_Float16>(bits)); }
  static uint16_t round(float value) { return bit_copy<uint16_t>(_Float16(value)); }
};

// Like cutlass::bfloat16_t and half_t: explicit in, implicit out, each operation rounds once.
template <class Bits>
struct Float16 {
  uint16_t bits;

  Float16() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  explicit Float16(T value) : bits(Bits::round(float(value))) {}
  operator float() const { return Bits::widen(bits); }
  Float16 to_half() const { return *this; }
  Float16 to_nv_bfloat16() const { return *this; }

  friend Float16 operator+(Float16 a, Float16 b) { return Float16(float(a) + float(b)); }
  friend Float16 operator-(Float16 a, Float16 b) { return Float16(float(a) - float(b)); }
  friend Float16 operator*(Float16 a, Float16 b) { return Float16(float(a) * float(b)); }
  friend Float16 operator/(Float16 a, Float16 b) { return Float16(float(a) / float(b)); }
  friend Float16 operator-(Float16 a) { return Float16(-float(a)); }
  Float16& operator+=(float b) { return *this = Float16(float(*this) + b); }
  Float16& operator-=(float b) { return *this = Float16(float(*this) - b); }
  Float16& operator*=(float b) { return *this = Float16(float(*this) * b); }
  Float16& operator/=(float b) { return *this = Float16(float(*this) / b); }
};

template <class T>
struct alignas(4) Pair {
  T x, y;
};

}  // namespace emu

using bfloat16_t = emu::Float16<emu::BFloat16Bits>;
using half_t = emu::Float16<emu::HalfBits>;
using __nv_bfloat16 = bfloat16_t;
using __half = half_t;
using half = half_t;
using __nv_bfloat162 = emu::Pair<bfloat16_t>;
using __half2 = emu::Pair<half_t>;
using half2 = __half2;

// ---- conversions ----
inline float __bfloat162float(bfloat16_t a) { return float(a); }
inline float __half2float(half_t a) { return float(a); }
inline bfloat16_t __float2bfloat16(float a) { return bfloat16_t(a); }
inline bfloat16_t __float2bfloat16_rn(float a) { return bfloat16_t(a); }
inline half_t __float2half(float a) { return half_t(a); }
inline half_t __float2half_rn(float a) { return half_t(a); }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {bfloat16_t(a), bfloat16_t(b)};
}
inline __half2 __floats2half2_rn(float a, float b) { return {half_t(a), half_t(b)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 a) { return __floats2bfloat162_rn(a.x, a.y); }
inline __half2 __float22half2_rn(float2 a) { return __floats2half2_rn(a.x, a.y); }
inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {float(a.x), float(a.y)}; }
inline float2 __half22float2(__half2 a) { return {float(a.x), float(a.y)}; }

template <class T>
inline unsigned __pack_half2(T x, T y) {
  return unsigned(x.bits) | unsigned(y.bits) << 16;
}
inline unsigned __pack_nv_bfloat162(bfloat16_t x, bfloat16_t y) { return __pack_half2(x, y); }

// ---- arithmetic by name ----
#define EMU_UNARY(name, expression)                                            \
  inline bfloat16_t name(bfloat16_t a) {                                       \
    float x = a;                                                               \
    return bfloat16_t(expression);                                             \
  }                                                                            \
  inline half_t name(half_t a) {                                               \
    float x = a;                                                               \
    return half_t(expression);                                                 \
  }
EMU_UNARY(__habs, std::fabs(x))
EMU_UNARY(hexp, std::exp(x))
EMU_UNARY(hexp2, std::exp2(x))
EMU_UNARY(hlog, std::log(x))
EMU_UNARY(hlog2, std::log2(x))
EMU_UNARY(hsqrt, std::sqrt(x))
EMU_UNARY(hrsqrt, 1.0f / std::sqrt(x))
EMU_UNARY(hrcp, 1.0f / x)
EMU_UNARY(htanh, std::tanh(x))
#undef EMU_UNARY

#define EMU_BINARY(name, expression)                                           \
  inline bfloat16_t name(bfloat16_t a, bfloat16_t b) {                         \
    float x = a, y = b;                                                        \
    return bfloat16_t(expression);                                             \
  }                                                                            \
  inline half_t name(half_t a, half_t b) {                                     \
    float x = a, y = b;                                                        \
    return half_t(expression);                                                 \
  }
EMU_BINARY(__hadd_rn, x + y)
EMU_BINARY(__hsub_rn, x - y)
EMU_BINARY(__hmul_rn, x * y)
EMU_BINARY(__hdiv, x / y)
EMU_BINARY(__hmax, std::fmax(x, y))
EMU_BINARY(__hmin, std::fmin(x, y))
#undef EMU_BINARY

template <class Bits>
inline emu::Float16<Bits> __hfma(emu::Float16<Bits> a, emu::Float16<Bits> b,
                                 emu::Float16<Bits> c) {
  return emu::Float16<Bits>(std::fma(float(a), float(b), float(c)));
}

namespace tl {

template <class T>
inline T from_uint1(uint1 packed) {
  return emu::bit_copy<T>(packed);
}
template <class T>
inline uint1 to_uint1(T pair) {
  return emu::bit_copy<uint1>(pair);
}
inline uint1 pack_half2(half_t a, half_t b) { return {__pack_half2(a, b)}; }

// add2, sub2, ...: two lanes at once, for float2 and for packed 16-bit pairs
#define EMU_PAIRWISE(name, expression)                                         \
  inline float name##_lane(float x, float y) { return expression; }            \
  inline float2 name(float2 a, float2 b) {                                     \
    return {name##_lane(a.x, b.x), name##_lane(a.y, b.y)};                     \
  }                                                                            \
  template <class T>                                                           \
  inline emu::Pair<T> name(emu::Pair<T> a, emu::Pair<T> b) {                   \
    return {T(name##_lane(a.x, b.x)), T(name##_lane(a.y, b.y))};               \
  }
EMU_PAIRWISE(add2, x + y)
EMU_PAIRWISE(sub2, x - y)
EMU_PAIRWISE(mul2, x * y)
EMU_PAIRWISE(max2, std::fmax(x, y))
EMU_PAIRWISE(min2, std::fmin(x, y))
#undef EMU_PAIRWISE

inline float2 fma2(float2 a, float2 b, float2 c) {
  return {std::fma(a.x, b.x, c.x), std::fma(a.y, b.y, c.y)};
}
template <class T>
inline emu::Pair<T> fma2(emu::Pair<T> a, emu::Pair<T> b, emu::Pair<T> c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline float2 abs2(float2 a) { return {std::fabs(a.x), std::fabs(a.y)}; }
template <class T>
inline emu::Pair<T> abs2(emu::Pair<T> a) {
  return {__habs(a.x), __habs(a.y)};
}

}  // namespace tl
