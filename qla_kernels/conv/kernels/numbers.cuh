// Loads of 8 bytes, and numbers of a dtype known at run time: see numbers.py.
#include <tl_templates/cuda/common.h>

namespace qla {

enum { FLOAT32, BFLOAT16, FLOAT16 };  // DTYPES of shapes.py

template <class T>
__device__ __forceinline__ void load_8_bytes(T *to, const T *from) {
  *reinterpret_cast<uint2 *>(to) = __ldg(reinterpret_cast<const uint2 *>(from));
}

// From one of three tensors with rows so many elements apart. Which one does not change in a loop,
// so that the compiler chooses once.
template <class T>
__device__ __forceinline__ void load_section(T *to, const T *a, const T *b, const T *c, int which,
                                          int row, int step_a, int step_b, int step_c, int piece) {
  const T *from = which == 0 ? a : which == 1 ? b : c;
  const int step = which == 0 ? step_a : which == 1 ? step_b : step_c;
  load_8_bytes(to, from + piece * 4 + int64_t(row) * step);
}

template <class T, int Count>
__device__ __forceinline__ void numbers_as(float *to, const unsigned char *from, int first) {
#pragma unroll
  for (int i = 0; i < Count; ++i) to[i] = float(reinterpret_cast<const T *>(from)[first + i]);
}

template <int Count>
__device__ __forceinline__ void numbers(float *to, const unsigned char *from, int first,
                                        int dtype) {
  switch (dtype) {
    case FLOAT32: return numbers_as<float, Count>(to, from, first);
    case BFLOAT16: return numbers_as<bfloat16_t, Count>(to, from, first);
    default: return numbers_as<half_t, Count>(to, from, first);
  }
}

__device__ __forceinline__ void put_number(unsigned char *to, float x, int place, int dtype) {
  switch (dtype) {
    case FLOAT32: reinterpret_cast<float *>(to)[place] = x; return;
    case BFLOAT16: reinterpret_cast<bfloat16_t *>(to)[place] = bfloat16_t(x); return;
    default: reinterpret_cast<half_t *>(to)[place] = half_t(x); return;
  }
}

__device__ __forceinline__ float factor(float z, float least) {
  return fmaxf(__fdividef(1.f, 1.f + __expf(-z)), least);
}

}  // namespace qla
