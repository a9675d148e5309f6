// Functions on the window's scores, which are in wgmma accumulators in the layout that
// tile/softmax.cuh describes.
//
// The functions only read accumulators. Then ptxas lets the next product run at the same time, also
// across iterations of the loop. If anything else wrote them, ptxas would wait for the product.
#pragma once

namespace qla {

constexpr int kBlock = 64;  // of the mask: keys, and queries of a head

__device__ __forceinline__ int window_row() {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

// Returns a score, or -inf if its row does not see its column. Rows are queries and columns are the
// keys of two blocks; row h of this thread sees the first end[block][h] keys of a block. A thread
// keeps a maximum and a sum of its own, for its quarter of a row.
template <bool kAll>
__device__ __forceinline__ float seen_score(const float *s, const int (*end)[2], int j, int h,
                                            int e) {
  const int column = j % 8 * 8 + threadIdx.x % 4 * 2 + e;
  return kAll || column < end[j / 8][h] ? s[4 * j + 2 * h + e] : -INFINITY;
}

template <bool kAll>
__device__ __forceinline__ void fold_seen(const float *s, const int (*end)[2], float *m, float *l,
                                          float scale2) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float even = m[h], odd = m[h];  // two chains: one would be latency
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      even = fmaxf(even, seen_score<kAll>(s, end, j, h, 0));
      odd = fmaxf(odd, seen_score<kAll>(s, end, j, h, 1));
    }
    const float grown = fmaxf(even, odd), from = grown * scale2;
    l[h] *= exp2f((m[h] - grown) * scale2);
    m[h] = grown;
    even = odd = 0;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      even += exp2f(seen_score<kAll>(s, end, j, h, 0) * scale2 - from);
      odd += exp2f(seen_score<kAll>(s, end, j, h, 1) * scale2 - from);
    }
    l[h] += even + odd;
  }
}

// m <- max(m, scores); l <- sum of 2^((score - m) scale2) over the scores so far and the new ones.
__device__ __forceinline__ void fold(const float *s, float *m, float *l, int b0, int b1, int last,
                                     float scale2) {
  const int row = window_row(), of[2] = {b0, b1};
  int end[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int b = of[i / 2], own = row + i % 2 * 8 + 1;
    end[i / 2][i % 2] = b < last ? kBlock : b == last ? own : 0;
  }
  if (__any_sync(~0u, max(b0, b1) >= last))  // a vote: see tile/pin.py
    fold_seen<false>(s, end, m, l, scale2);
  else
    fold_seen<true>(s, end, m, l, scale2);
}

// Combines the maxima and sums of the four threads of a row; each thread gets those of the row.
__device__ __forceinline__ void fold_quad(float *m, float *l, float scale2) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float whole = quad_max(m[h]);
    l[h] = quad_sum(l[h] * exp2f((m[h] - whole) * scale2));
    m[h] = whole;
  }
}

// Returns the sum of one key's probabilities over the queries of one head. Rows are keys, columns
// are the queries of two heads; queries from first[h] on see row h of this thread. Four lanes share
// two rows and two heads: a lane gets the sum of head lane / 2 % 2 and row lane % 2.
template <bool kAll>
__device__ __forceinline__ float weigh_seen(const float *s, const int *first, const float *lse2,
                                            float scale2) {
  const int lane = threadIdx.x % 32, column = lane % 4 * 2;
  float sum[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float even[2] = {0, 0}, odd[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 of = *reinterpret_cast<const float2 *>(lse2 + n * kBlock + j * 8 + column);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float *x = s + 4 * (n * 8 + j) + 2 * h;
        const float p0 = exp2f(x[0] * scale2 - of.x), p1 = exp2f(x[1] * scale2 - of.y);
        even[h] += kAll || j * 8 + column >= first[h] ? p0 : 0;
        odd[h] += kAll || j * 8 + column + 1 >= first[h] ? p1 : 0;
      }
    }
    sum[n][0] = even[0] + odd[0];
    sum[n][1] = even[1] + odd[1];
  }
  const bool second = lane & 2, lower = lane & 1;
  float mine[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float other = __shfl_xor_sync(~0u, second ? sum[0][h] : sum[1][h], 2);
    mine[h] = (second ? sum[1][h] : sum[0][h]) + other;
  }
  const float other = __shfl_xor_sync(~0u, lower ? mine[0] : mine[1], 1);
  return (lower ? mine[1] : mine[0]) + other;
}

__device__ __forceinline__ float weigh(const float *s, const float *lse2, int b, int last,
                                       float scale2) {
  const int row = window_row();
  const int first[2] = {b == last ? row : kBlock, b == last ? row + 8 : kBlock};
  return __any_sync(~0u, b >= last) ? weigh_seen<false>(s, first, lse2, scale2)
                                    : weigh_seen<true>(s, first, lse2, scale2);
}

}  // namespace qla
