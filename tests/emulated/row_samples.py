"""A kernel whose CTA is two-dimensional: rows of 128 threads, each of them a warpgroup."""

from typing import Any

import tilelang.language as T

from qla_kernels.tile.ring import Ring

BF16, F32 = "bfloat16", "float32"
TILE, STAGES, ROW = 64, 2, 128


def twins(defect: str | None = None, K: int = 3 * TILE) -> Any:
    """C = A B^T, 128 x 64 of it a CTA: row 2 loads and stores, rows 0 and 1 run the same code.

    Each twin owns 64 rows of C, and a slot of `c_full`, whose number it knows at run time.
    """
    n = T.dynamic("n")
    c_count = 2 * ROW if defect == "count of both" else ROW
    steps = K // TILE

    @T.prim_func
    def twins(
        A: T.Tensor((2 * TILE, K), BF16),
        B: T.Tensor((n, K), BF16),
        C: T.Tensor((2 * TILE, n), BF16),
    ):
        with T.Kernel(T.ceildiv(n, TILE), threads=(ROW, 3)) as bx:
            a = T.alloc_shared((STAGES, 2, TILE, TILE), BF16)
            b = T.alloc_shared((STAGES, TILE, TILE), BF16)
            c = T.alloc_shared((2, TILE, TILE), BF16)
            acc = T.alloc_fragment((TILE, TILE), F32)
            ab_full = T.alloc_barrier([1] * STAGES)
            ab_free = T.alloc_barrier([2 * ROW] * STAGES)
            c_full = T.alloc_barrier([c_count] * 2)
            ab = Ring(ab_full, ab_free, STAGES)
            column = bx * TILE
            if T.get_thread_binding(1) < 2:
                w = T.alloc_var("int32")
                w = T.get_thread_binding(1)
                T.clear(acc)
                for i in T.serial(steps):
                    ab.wait(i)
                    T.wgmma_gemm(a[ab.slot(i), w, :, :], b[ab.slot(i), :, :], acc, transpose_B=True)
                    T.wait_wgmma(0)
                    ab.release(i)
                T.copy(acc, c[w, :, :])
                T.fence_proxy_async()
                T.barrier_arrive(c_full[0 if defect == "slot of both" else w])
            elif T.get_thread_binding() < 32:
                for i in T.serial(steps):
                    k = i * TILE
                    ab.acquire(i)
                    for half in T.unroll(2):
                        T.tma_copy(
                            A[half * TILE : (half + 1) * TILE, k : k + TILE],
                            a[ab.slot(i), half, :, :],
                            barrier=ab.barrier(i),
                        )
                    T.tma_copy(
                        B[column : column + TILE, k : k + TILE],
                        b[ab.slot(i), :, :],
                        barrier=ab.barrier(i),
                    )
                    if T.shuffle_elect(32):
                        ab.commit(i)
            elif T.get_thread_binding() < 64:
                for half in T.serial(2):
                    T.barrier_wait(c_full[half], 0)
                    T.tma_copy(
                        c[half, :, :],
                        C[half * TILE : (half + 1) * TILE, column : column + TILE],
                    )
                    T.tma_store_wait(0)

    return twins
