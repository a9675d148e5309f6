// Loads and stores numbers of a dtype known at run time, and activates gates and betas: see
// raw_gates.py.
#include <tl_templates/cuda/common.h>

namespace qla {

enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT64 };  // DTYPES of raw_gates.py

__device__ __forceinline__ float bits_of(unsigned short x) { return __uint_as_float(x); }
__device__ __forceinline__ float bits_of(float x) { return x; }
__device__ __forceinline__ float bits_of(double x) { return float(x); }

template <class T, int Size>
__device__ __forceinline__ void fetch_as(float *to, const unsigned char *from, int64_t step,
                                         int count) {
#pragma unroll
  for (int i = 0; i < Size; ++i)
    to[i] = i < count ? bits_of(*reinterpret_cast<const T *>(from + i * step)) : 0.f;
}

template <int Size>
__device__ __forceinline__ void fetch(float *to, const unsigned char *from, int64_t head,
                                      int64_t step, int count, int dtype) {
  from += head;
  switch (dtype) {
    case FLOAT32: return fetch_as<float, Size>(to, from, step, count);
    case FLOAT64: return fetch_as<double, Size>(to, from, step, count);
    default: return fetch_as<unsigned short, Size>(to, from, step, count);
  }
}

__device__ __forceinline__ float decode(float x, int dtype) {
  const unsigned bits = __float_as_uint(x);
  const unsigned short low = bits;
  const float half = float(reinterpret_cast<const half_t &>(low));
  return dtype == FLOAT16 ? half : dtype == BFLOAT16 ? __uint_as_float(bits << 16) : x;
}

template <class T, int Size>
__device__ __forceinline__ void put_as(unsigned char *to, const float *from, int head, int64_t step,
                                       int count) {
#pragma unroll
  for (int i = 0; i < Size; ++i)
    if (i < count) reinterpret_cast<T *>(to + i * step)[head] = T(from[i]);
}

template <int Size>
__device__ __forceinline__ void put(unsigned char *to, const float *from, int head, int64_t step,
                                    int count, int dtype) {
  switch (dtype) {
    case FLOAT32: return put_as<float, Size>(to, from, head, step, count);
    case BFLOAT16: return put_as<bfloat16_t, Size>(to, from, head, step, count);
    case FLOAT16: return put_as<half_t, Size>(to, from, head, step, count);
    default: return put_as<double, Size>(to, from, head, step, count);
  }
}

__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x)));
}

__device__ __forceinline__ float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return __fdividef(x < 0.f ? e : 1.f, 1.f + e);
}

// Returns s (1 - s) for s = sigmoid(x), by a formula that stays exact where s is close to 1.
__device__ __forceinline__ float sigmoid_slope(float x) {
  const float e = expf(-fabsf(x));
  return __fdividef(e, (1.f + e) * (1.f + e));
}

// Returns -e^A_log, limited to finite numbers, because 0 times infinity would be NaN.
__device__ __forceinline__ float rate(float A_log) {
  const float most = 3.4028235e38f, e = expf(A_log);
  return e > most ? -most : -e;
}

}  // namespace qla
