// Finds the number of chunks at one end of a segment that determine its result there: the state at
// the segment's end, or, at its beginning, the gradient of the state. M, the map of these chunks
// from a state to a state, obeys |M| <= prod_t e^{g_t} max(1, |1 - beta_t |k_t|^2|). Chunks and
// tokens are counted from that end; pointers to tensors point to the segment's first token.
#pragma once

namespace qla {

// Returns log max(1, |1 - beta |k|^2|), with square = |k|^2.
__device__ __forceinline__ float token_growth(float beta, float square) {
  return logf(fmaxf(1.f, fabsf(1.f - beta * square)));
}

// Writes the sum of token_growth over each 16 tokens of a chunk to growth's row of the last of
// these tokens. kk is a warpgroup's accumulator of K K^T, in the layout that gated_tiles.cuh
// describes. `growth` points to the chunk's first token.
__device__ __forceinline__ void put_growth(const float *kk, const float *beta, float *growth,
                                           int64_t token, int rows) {
  const int lane = threadIdx.x & 31, g = lane >> 2, w = __shfl_sync(~0u, threadIdx.x >> 5 & 3, 0);
  float sum = 0.f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = 16 * w + 8 * h + g;
    float square;
#pragma unroll
    for (int b = 0; b < 4; ++b)  // selected, not indexed: kk is in registers
      if (b == 0 || b == w) square = g & 1 ? kk[8 * b + 6 * h + 1] : kk[8 * b + 6 * h];
    if ((lane & 3) == g >> 1 && row < rows) sum += token_growth(beta[row], square);
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane == 0 && 16 * w < rows) growth[token * min(16 * w + 15, rows - 1)] = sum;
}

// Returns the fewest chunks whose gates, plus the sums of put_growth if `grows`, sum to less than
// `limit`, or 0 if no number of chunks does. Every warp computes it by itself.
template <bool kAtEnd>
__device__ __forceinline__ int chunks_by_gates(const float *g_cum, const float *growth, bool grows,
                                               int64_t token, int length, float limit) {
  const int lane = threadIdx.x & 31, num_chunks = (length + 63) / 64;
  float before = 0.f;  // sum over the chunks of earlier passes
#pragma unroll 1
  for (int base = 0; base < num_chunks; base += 32) {
    const int i = base + lane, chunk = kAtEnd ? num_chunks - 1 - i : i;
    float total = i < num_chunks ? g_cum[token * min(64 * chunk + 63, length - 1)] : 0.f;
    if (grows) {
#pragma unroll
      for (int t = 64 * chunk; t < 64 * chunk + 64; t += 16)
        if (i < num_chunks && t < length) total += growth[token * min(t + 15, length - 1)];
    }
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

// Returns the same for gates that are not cumulated, without growth, and from the segment's end.
// All threads of the CTA take part; a warp sums one chunk.
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
    __syncthreads();  // the sums of the previous pass have been read
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

// Returns sum_t log max(1, |1 - beta_t |k_t|^2|) over the chunks `first` to `last` - 1. All threads
// of the CTA take part and get the same result. Keys have `size` numbers, at most K. beta is in fp32
// or, if is_16, in beta16.
template <bool kAtEnd, int K, int kWarps, class T>
__device__ __forceinline__ float read_growth(const T *k, int size, int64_t k_token,
                                             const float *beta, const T *beta16, bool is_16,
                                             int64_t beta_token, int length, int first, int last,
                                             float *s_sum) {
  constexpr int kLanes = K / 8, kTokens = 32 * kWarps / kLanes, kRounds = 8;  // of a token, at once
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
      norm[j] = t < end && 8 * part < size ? sum_of_squares(k + k_token * t + 8 * part) : 0.f;
      weight[j] = t >= end ? 0.f : is_16 ? float(beta16[beta_token * t]) : beta[beta_token * t];
    }
#pragma unroll
    for (int j = 0; j < kRounds; ++j) {
#pragma unroll
      for (int d = 1; d < kLanes; d *= 2) norm[j] += __shfl_xor_sync(~0u, norm[j], d);
      sum += token_growth(weight[j], norm[j]);
    }
  }
#pragma unroll
  for (int d = kLanes; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
  __syncthreads();  // the sums of a previous call have been read
  if (threadIdx.x % 32 == 0) s_sum[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += s_sum[w];
  return sum;
}

// Returns the fewest chunks over which the bound on |M| is below e^limit, or 0 if it never is.
// Unless `grows`, no sums of put_growth exist. Then the keys are read here, in those chunks only
// over which the gates alone are below the limit.
template <bool kAtEnd, bool kCumulated, int K, int kWarps, class T>
__device__ __forceinline__ int warm_chunks(const T *k, int size, int64_t k_token, const float *g,
                                           const float *growth, bool grows, const float *beta,
                                           const T *beta16, bool is_16, int64_t token, int length,
                                           float limit, float *s_sum) {
  static_assert(kAtEnd || kCumulated, "nobody looks at raw gates from the beginning on");
  int found = 0, seen = 0;
  if (limit == -INFINITY) return 0;  // no bound is below it, so gates need not be read
  if (grows) return chunks_by_gates<kAtEnd>(g, growth, true, token, length, limit);
#pragma unroll 1
  for (;;) {
    if constexpr (kCumulated) found = chunks_by_gates<kAtEnd>(g, g, false, token, length, limit);
    else found = chunks_by_raw_gates<kWarps>(g, token, length, limit, s_sum);
    if (found <= seen) return found;
    limit -= read_growth<kAtEnd, K, kWarps>(k, size, k_token, beta, beta16, is_16, token, length,
                                            seen, found, s_sum);
    seen = found;
  }
}

}  // namespace qla
