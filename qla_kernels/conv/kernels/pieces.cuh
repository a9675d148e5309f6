// Loads of 8 bytes, and act(z) / z: see pieces.py.
#include <tl_templates/cuda/common.h>

namespace qla {

// The 4 numbers of a piece of a row; rows are `step` elements apart, less than 4 GB. One
// multiplication of 32 bits, and what does not change in a loop is computed in front of it.
template <class T>
__device__ __forceinline__ T *piece_of(T *x, int row, int step, int piece) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T *>(reinterpret_cast<Byte *>(x + piece * 4)
                               + uint64_t(unsigned(row)) * (unsigned(step) * unsigned(sizeof(T))));
}

template <class T>
__device__ __forceinline__ void load_piece(T *to, const T *x, int row, int step, int piece) {
  *reinterpret_cast<uint2 *>(to) =
      __ldg(reinterpret_cast<const uint2 *>(piece_of(x, row, step, piece)));
}

// Likewise from one of three tensors; which one does not change in a loop.
template <class T>
__device__ __forceinline__ void load_section(T *to, const T *a, const T *b, const T *c, int which,
                                             int row, int step_a, int step_b, int step_c,
                                             int piece) {
  load_piece(to, which == 0 ? a : which == 1 ? b : c, row,
             which == 0 ? step_a : which == 1 ? step_b : step_c, piece);
}

template <class T>
__device__ __forceinline__ void store_piece(T *y, const T *from, int row, int step, int piece) {
  using Piece = std::conditional_t<sizeof(T) == 2, uint2, uint4>;
  *reinterpret_cast<Piece *>(piece_of(y, row, step, piece)) = *reinterpret_cast<const Piece *>(from);
}

__device__ __forceinline__ float factor(float z, float least) {
  return fmaxf(__fdividef(1.f, 1.f + __expf(-z)), least);
}

}  // namespace qla
