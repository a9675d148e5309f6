// Reductions and scans across threads, built from the collectives as TileLang builds them.
#pragma once

#include "intrinsics.h"
#include "named_barrier.h"
#include "warp.h"

namespace tl {

#define EMU_OPERATOR(name, expression)                                         \
  struct name {                                                                \
    template <class T>                                                         \
    T operator()(T x, T y) {                                                   \
      return expression;                                                       \
    }                                                                          \
  };
EMU_OPERATOR(SumOp, x + y)
EMU_OPERATOR(MaxOp, ::max(x, y))
EMU_OPERATOR(MinOp, ::min(x, y))
EMU_OPERATOR(BitAndOp, x & y)
EMU_OPERATOR(BitOrOp, x | y)
EMU_OPERATOR(BitXorOp, x ^ y)
EMU_OPERATOR(SumOp_f32x2, add2(x, y))
EMU_OPERATOR(MaxOp_f32x2, max2(x, y))
EMU_OPERATOR(MinOp_f32x2, min2(x, y))
#undef EMU_OPERATOR

// The two barriers of a cross-warp step: __syncthreads, or named barriers 1 and 2.
struct SyncThreadsBarrier {
  template <int phase = 0>
  static void sync(emu::Where where) {
    __syncthreads(where);
  }
};
template <int threads>
struct NamedBarrier {
  template <int phase = 1>
  static void sync(emu::Where where) {
    emu::named_barrier(phase, threads, true, where);
  }
};

// Butterfly over `threads` thread indices in steps down to `scale`; steps of 32 and more go
// through shared memory.
template <class Op, int threads, int scale, int thread_offset = 0,
          class Barrier = SyncThreadsBarrier, int batch = 1, int workspace_stride = 0>
struct AllReduce {
  template <class T>
  static T run(T x, T* workspace = nullptr, EMU_WHERE) {
    for (int step = threads / 2; step >= scale; step /= 2) butterfly(&x, 1, step, workspace, where);
    return x;
  }
  template <class T>
  static void run_batch(T* x, T* workspace = nullptr, EMU_WHERE) {
    for (int step = threads / 2; step >= scale; step /= 2)
      butterfly(x, batch, step, workspace, where);
  }

 private:
  template <class T>
  static void butterfly(T* x, int count, int step, T* workspace, emu::Where where) {
    if (step < 32) {
      for (int i = 0; i < count; ++i) x[i] = Op()(x[i], shfl_xor_sync(~0u, x[i], step, where));
      return;
    }
    int mine = int(threadIdx.x) - thread_offset;
    Barrier::template sync<1>(where);
    for (int i = 0; i < count; ++i) workspace[mine + i * workspace_stride] = x[i];
    Barrier::template sync<2>(where);
    for (int i = 0; i < count; ++i)
      x[i] = Op()(x[i], workspace[(mine ^ step) + i * workspace_stride]);
  }
};

template <class T, class Op>
T warp_reduce(T value, Op op, EMU_WHERE) {
  for (int step = 16; step; step /= 2) value = op(value, shfl_xor_sync(~0u, value, step, where));
  return value;
}
template <class T>
T warp_reduce_sum(T value, EMU_WHERE) {
  return warp_reduce(value, SumOp(), where);
}
template <class T>
T warp_reduce_max(T value, EMU_WHERE) {
  return warp_reduce(value, MaxOp(), where);
}
template <class T>
T warp_reduce_min(T value, EMU_WHERE) {
  return warp_reduce(value, MinOp(), where);
}

// ---- scans: one warp per line ----

struct ScanSumOp : SumOp {
  template <class T>
  static T identity() {
    return T(0);
  }
};
struct ScanMaxOp : MaxOp {
  template <class T>
  static T identity() {
    return T(-INFINITY);
  }
};

template <class Op, bool reverse, class T>
void scan_line(const T* source, T* target, int extent, int source_stride, int target_stride) {
  T carry = Op::template identity<T>();
  int segments = (extent + 31) / 32;
  for (int s = 0; s < segments; ++s) {
    int i = (reverse ? segments - 1 - s : s) * 32 + emu::lane();
    T value = i < extent ? source[i * source_stride] : Op::template identity<T>();
    for (int step = 1; step < 32; step *= 2) {
      T other = reverse ? shfl_down_sync(~0u, value, step) : shfl_up_sync(~0u, value, step);
      if (reverse ? emu::lane() < 32 - step : emu::lane() >= step) value = Op()(value, other);
    }
    value = Op()(value, carry);
    if (i < extent) target[i * target_stride] = value;
    carry = shfl_sync(~0u, value, reverse ? 0 : 31);
  }
}

template <class Op, bool reverse>
struct Scan1D {
  template <class T, int segment = 32>
  static void run(const T* source, T* target, int extent) {
    if (threadIdx.x < 32) scan_line<Op, reverse>(source, target, extent, 1, 1);
  }
};
template <class Op, int threads, int axis, bool reverse>
struct Scan2D {
  template <class T, int segment = 32>
  static void run(const T* source, T* target, int rows, int columns, int source_stride,
                  int target_stride) {
    for (int line = threadIdx.x / 32; line < (axis == 1 ? rows : columns); line += threads / 32) {
      if constexpr (axis == 1)
        scan_line<Op, reverse>(source + line * source_stride, target + line * target_stride,
                               columns, 1, 1);
      else
        scan_line<Op, reverse>(source + line, target + line, rows, source_stride, target_stride);
    }
  }
};
template <int threads, bool reverse = false>
struct CumSum1D : Scan1D<ScanSumOp, reverse> {};
template <int threads, bool reverse = false>
struct CumMax1D : Scan1D<ScanMaxOp, reverse> {};
template <int threads, int axis = 0, bool reverse = false>
struct CumSum2D : Scan2D<ScanSumOp, threads, axis, reverse> {};
template <int threads, int axis = 0, bool reverse = false>
struct CumMax2D : Scan2D<ScanMaxOp, threads, axis, reverse> {};

}  // namespace tl
