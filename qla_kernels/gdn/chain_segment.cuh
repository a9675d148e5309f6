// How many chunks at one end of a segment decide what leaves it there: its state at its end, or, at
// its beginning, the gradient of a state. M, the map of these chunks from a state to a state, obeys
// |M| <= prod_t e^{g_t} max(1, |1 - beta_t |k_t|^2|). Chunks and tokens are counted from that end;
// tensors are given from the segment's first token on.
#pragma once

namespace qla {

// The fewest chunks whose gates sum to less than `limit`, or 0 if no number of them do. Every warp
// by itself.
template <bool kAtEnd>
__device__ __forceinline__ int chunks_by_gates(const float *g_cum, int64_t token, int length,
                                               float limit) {
  const int lane = threadIdx.x & 31, num_chunks = (length + 63) / 64;
  float before = 0.f;  // gates of the chunks that the warp has passed
#pragma unroll 1
  for (int base = 0; base < num_chunks; base += 32) {
    const int i = base + lane, chunk = kAtEnd ? num_chunks - 1 - i : i;
    float total = i < num_chunks ? g_cum[token * min(64 * chunk + 63, length - 1)] : 0.f;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float x = __shfl_up_sync(~0u, total, d);
      if (lane >= d) total += x;
    }
    total += before;
    if (const unsigned below = __ballot_sync(~0u, i < num_chunks && total < limit))
      return base + __ffs(below);
    before = __shfl_sync(~0u, total, 31);
  }
  return 0;
}

// The same where gates are not cumulated, by all threads of the CTA: a chunk a warp.
template <int kWarps>
__device__ __forceinline__ int chunks_by_raw_gates(const float *g, int64_t token, int length,
                                                   float limit, float *s_sum) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_chunks = (length + 63) / 64;
  float total = 0.f;
#pragma unroll 1
  for (int base = 0; base < num_chunks; base += kWarps) {
    const int t = 64 * (num_chunks - 1 - base - warp) + lane;
    float sum = t >= 0 && t < length ? g[token * t] : 0.f;
    sum += t >= 0 && t + 32 < length ? g[token * (t + 32)] : 0.f;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    __syncthreads();  // the sums before have been read
    if (lane == 0) s_sum[warp] = sum;
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < min(kWarps, num_chunks - base); ++w)
      if ((total += s_sum[w]) < limit) return base + w + 1;
  }
  return 0;
}

template <class T> __device__ __forceinline__ float sum_of_squares(const T *eight) {
  const uint4 piece = *reinterpret_cast<const uint4 *>(eight);
  const T *x = reinterpret_cast<const T *>(&piece);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += float(x[i]) * float(x[i]);
  return sum;
}

// sum_t log max(1, |1 - beta_t |k_t|^2|) over the chunks `first` to `last`, by all threads of the
// CTA and the same in all. beta is in fp32; or, where is_16, 16 bits wide in beta16.
template <bool kAtEnd, int K, int kWarps, class T>
__device__ __forceinline__ float growth(const T *k, int64_t k_token, const float *beta,
                                        const T *beta16, bool is_16, int64_t beta_token,
                                        int length, int first, int last, float *s_sum) {
  constexpr int kLanes = K / 8, kTokens = 32 * kWarps / kLanes, kRounds = 4;  // of a token, at once
  const int part = threadIdx.x % kLanes, which = threadIdx.x / kLanes;
  const int begin = 64 * (kAtEnd ? (length + 63) / 64 - last : first);
  const int end = min(begin + 64 * (last - first), length);
  float sum = 0.f;
#pragma unroll 1
  for (int base = begin; base < end; base += kRounds * kTokens) {
    float norm[kRounds], weight[kRounds];
#pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      const int t = base + j * kTokens + which;
      norm[j] = t < end ? sum_of_squares(k + k_token * t + 8 * part) : 0.f;
      weight[j] = t >= end ? 0.f : is_16 ? float(beta16[beta_token * t]) : beta[beta_token * t];
    }
#pragma unroll
    for (int j = 0; j < kRounds; ++j) {
#pragma unroll
      for (int d = 1; d < kLanes; d *= 2) norm[j] += __shfl_xor_sync(~0u, norm[j], d);
      sum += logf(fmaxf(1.f, fabsf(1.f - weight[j] * norm[j])));
    }
  }
#pragma unroll
  for (int d = kLanes; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
  __syncthreads();  // the sums of a call before have been read
  if (threadIdx.x % 32 == 0) s_sum[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += s_sum[w];
  return sum;
}

// The fewest chunks over which the bound on |M| is below e^limit, or 0 if it never is. Keys are only
// read where the gates alone would do, and as far as they would.
template <bool kAtEnd, bool kCumulated, int K, int kWarps, class T>
__device__ __forceinline__ int warm_chunks(const T *k, int64_t k_token, const float *g,
                                           const float *beta, const T *beta16, bool is_16,
                                           int64_t token, int length, float limit, float *s_sum) {
  static_assert(kAtEnd || kCumulated, "nobody looks at raw gates from the beginning on");
  int found = 0, seen = 0;
  if (limit == -INFINITY) return 0;  // as no bound is below it: gates need not be read
#pragma unroll 1
  for (;;) {
    if constexpr (kCumulated) found = chunks_by_gates<kAtEnd>(g, token, length, limit);
    else found = chunks_by_raw_gates<kWarps>(g, token, length, limit, s_sum);
    if (found <= seen) return found;
    limit -= growth<kAtEnd, K, kWarps>(k, k_token, beta, beta16, is_16, token, length, seen, found,
                                       s_sum);
    seen = found;
  }
}

}  // namespace qla
