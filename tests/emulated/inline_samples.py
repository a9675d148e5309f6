"""Kernels around hand-written CUDA: intrinsics that must work, and misuse that must be reported."""

from typing import Any

import tilelang.language as T

F32 = "float32"

INLINE = r"""
#include <tl_templates/cuda/instruction/mma.h>

template <int W>
__device__ __forceinline__ float prefix_sum(float value) {
#pragma unroll
  for (int d = 1; d < W; d *= 2) {
    float below = __shfl_up_sync(0xffffffffu, value, d, W);
    if (threadIdx.x % W >= d) value = __fmaf_rn(below, 1.0f, value);
  }
  return value;
}

// y[i] = sum of x[j] over j <= i within each warp
__device__ __noinline__ void scan(const float* __restrict__ x, float* __restrict__ y) {
  __shared__ float4 staged[32];
  int i = threadIdx.x;
  if (i < 32) staged[i] = *reinterpret_cast<const float4*>(x + 4 * i);
  __syncthreads();
  float value = prefix_sum<32>(reinterpret_cast<const float*>(staged)[i]);
  bool finite = __all_sync(~0u, value == value) && !__any_sync(~0u, value != value);
  y[i] = finite && __ballot_sync(~0u, true) == ~0u ? value : exp2f(log2f(-1.0f));
}

// c = a b for 16 x 8 and 8 x 8 matrices in tf32, by one warp
__device__ void multiply(const float* a, const float* b, float* c) {
  int g = threadIdx.x / 4, t = threadIdx.x % 4;
  unsigned fa[4], fb[2];
  float fc[4] = {0, 0, 0, 0};
  for (int i = 0; i < 4; ++i) fa[i] = __float_as_uint(a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
  for (int i = 0; i < 2; ++i) fb[i] = __float_as_uint(b[(t + i * 4) * 8 + g]);
  using tl::DataType;
  tl::mma_sync<DataType::kTensorFloat32, DataType::kTensorFloat32, DataType::kFloat32, 16, 8, 8,
               false, true>(fc, fa, fb);
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = fc[i];
}
"""


def inline_cuda() -> Any:
    """A scan and a matrix product in hand-written CUDA."""

    @T.prim_func
    def inline_cuda(
        x: T.Tensor((128,), F32),
        y: T.Tensor((128,), F32),
        a: T.Tensor((16, 8), F32),
        b: T.Tensor((8, 8), F32),
        c: T.Tensor((16, 8), F32),
    ):
        with T.Kernel(1, threads=128) as _:
            T.import_source(INLINE)
            T.call_extern("handle", "scan", x.data, T.access_ptr(y[0], "w"))
            if T.get_thread_binding() < 32:
                T.call_extern("handle", "multiply", a.data, b.data, T.access_ptr(c[0, 0], "w"))

    return inline_cuda


PASSING = r"""
#include <tl_templates/cuda/atomic.h>

// sums[b] = sums[of] + x[b], by a warp, once block `of` has set its flag; sums[b] = x[b] if of < 0
__device__ void pass_on(const float* x, float* sums, int* flags, int b, int of) {
  int lane = threadIdx.x;
  float before = 0;
  if (of >= 0) {
    while (!__all_sync(~0u, AtomicLoad(flags + of, 2) != 0)) {  // acquire
    }
    before = sums[32 * of + lane];
  }
  sums[32 * b + lane] = before + x[32 * b + lane];
  __syncwarp();
  if (lane == 0) AtomicStore(flags + b, 1, 3);  // release
}
"""


def passing(blocks: int, step: int) -> Any:
    """Blocks of a warp each, of which block b polls until block b - step has handed on its sum."""

    @T.prim_func
    def passing(
        x: T.Tensor((blocks, 32), F32),
        sums: T.Tensor((blocks, 32), F32),
        flags: T.Tensor((blocks,), "int32"),
    ):
        with T.Kernel(blocks, threads=32) as b:
            T.import_source(PASSING)
            T.call_extern(
                "handle", "pass_on", x.data, T.access_ptr(sums[0, 0], "rw"),
                T.access_ptr(flags[0], "rw"), b, T.if_then_else(b - step < blocks, b - step, -1),
            )  # fmt: skip

    return passing


def calling(source: str, call: str, threads: int = 128) -> Any:
    """A kernel that only calls `call`, defined by `source`, on x."""

    @T.prim_func
    def calling(x: T.Tensor((128,), F32)):
        with T.Kernel(1, threads=threads) as _:
            T.import_source(source)
            T.call_extern("handle", call, T.access_ptr(x[0], "w"))

    return calling


MISUSE = r"""
__device__ __noinline__ void misuse(float* x) {
  volatile float* cell = x;
  volatile int zero = 0;
  int i = threadIdx.x, mode = int(x[0]);
  __shared__ float scratch[128];
  __syncthreads();
  switch (mode) {
    case 1: while (cell[0] == 1) __syncthreads();       // never ends, but keeps moving
    case 2: while (cell[0] == 2) { }                    // never ends and never waits
    case 3: if (i % 32 < 16) __syncwarp(); break;       // half a warp
    case 4: if (i % 2) __syncwarp(); else x[i] = __shfl_sync(~0u, x[i], 0); break;
    case 5: x[i + 1024] = 0; break;                     // past the end
    case 6: if (i == 0) x[-1] = 0; break;               // before the start
    case 7: x[i] = scratch[i]; break;                   // uninitialised shared memory
    case 8: x[i] = i / zero; break;
    case 9: if (i < 96) __syncthreads(); break;         // a block barrier that some threads skip
    case 10: if (i == 0) debug_print_var("mode", mode); break;
    case 11: tl::__sync_thread_partial(8, 64); break;   // 128 threads at a barrier for 64
    case 12:                                            // correct: to show that 13 is not
    case 13: {                                          // cp.async without a wait
      float* staged = scratch + 4 * (i / 4);
      if (i % 4 == 0) tl::cp_async_gs<16>(staged, x + 4 * (i / 4));
      asm volatile("cp.async.commit_group;");
      if (mode == 12) asm volatile("cp.async.wait_group 0;");
      __syncwarp();
      x[i] = scratch[i] + 1;
      break;
    }
    case 14: if (i == 0) x[1] = cell[128]; break;       // reads right past the end
    case 15: if (i == 0) x[1] = cell[-1]; break;        // reads right before the start
    case 16: if (i == 0) x[1] = cell[1l << 33]; break;  // reads far outside
    case 17: if (i == 0) x[1] = cell[-(1l << 33)]; break;
    case 18: if (i == 0) x[128] = 0; break;             // writes right past the end
  }
}
"""


def misuse() -> Any:
    """Breaks the rule that x[0] names."""
    return calling(MISUSE, "misuse")
