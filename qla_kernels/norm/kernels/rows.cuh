// Loads of 16 bytes: see rows.py.
#include <tl_templates/cuda/common.h>

namespace qla {

template <class T>
__device__ __forceinline__ void load_16_bytes_or_0(T *to, const T *from, bool there) {
  uint4 piece = make_uint4(0, 0, 0, 0);
  if (there) piece = __ldg(reinterpret_cast<const uint4 *>(from));
  *reinterpret_cast<uint4 *>(to) = piece;
}

}  // namespace qla
