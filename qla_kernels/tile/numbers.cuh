// Numbers of a float dtype that is known at run time: see numbers.py.
#include <tl_templates/cuda/common.h>

namespace qla {

enum { FLOAT32, BFLOAT16, FLOAT16 };  // FLOATS of runtime/sm90.py

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

}  // namespace qla
