// States in a pool, [K][V] in fp32 or bf16 with any strides, and states kept on the way.
// As in gated_tiles.cuh, a warpgroup has 64 columns of V, transposed, in the registers of a [64][K]
// accumulator.
namespace qla {

template <int K, class T>
__device__ __forceinline__ void load_pool(float *s, const T *at, int64_t k_stride,
                                          int64_t v_stride) {
  at += first_of_state(k_stride, v_stride);
#pragma unroll
  for (int j = 0; j < K / 8; ++j, at += 8 * k_stride)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[4 * j + i] = float(at[i / 2 * 8 * v_stride + i % 2 * k_stride]);
}

template <int K, class T>
__device__ __forceinline__ void store_numbers(const float *s, T *at, int64_t k_stride,
                                              int64_t v_stride) {
#pragma unroll
  for (int j = 0; j < K / 8; ++j, at += 8 * k_stride)
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i / 2 * 8 * v_stride + i % 2 * k_stride] = T(s[4 * j + i]);
}

template <int K, class T>
__device__ __forceinline__ void store_pool(const float *s, T *at, int64_t k_stride,
                                           int64_t v_stride) {
  store_numbers<K>(s, at + first_of_state(k_stride, v_stride), k_stride, v_stride);
}

// Stores a state within the loop over chunks: to entry `n` of a tensor of `count`, of a head, the
// `part`-th 64 columns of V from v on. Numbers are made unknown here, so that nothing of the address
// is computed before the loop, and held in registers for all of it. Strides are in bytes, of numbers
// of 4 bytes, fp32, or of 2, bf16.
template <int K>
__device__ __forceinline__ void keep_state(const float *s, unsigned char *at, int n, int hv, int v,
                                           int part, int64_t n_stride, int64_t h_stride,
                                           int64_t k_stride, int64_t v_stride, int size,
                                           int count) {
  if (n < 0 || n >= count) return;
  int thread = threadIdx.x;
  asm volatile("" : "+r"(hv), "+r"(v), "+r"(part), "+r"(thread));
  asm volatile("" : "+l"(k_stride), "+l"(v_stride));
  const int row = 16 * (thread >> 5 & 3) + (thread >> 2 & 7), column = 2 * (thread & 3);
  at += n * n_stride + hv * h_stride + (v + 64 * part + row) * v_stride + column * k_stride;
  if (size == 4)
    store_numbers<K>(s, reinterpret_cast<float *>(at), k_stride >> 2, v_stride >> 2);
  else
    store_numbers<K>(s, reinterpret_cast<bfloat16_t *>(at), k_stride >> 1, v_stride >> 1);
}

}  // namespace qla
