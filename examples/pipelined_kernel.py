"""An ordinary kernel of TileLang, with `@tilelang.jit` and `T.Pipelined`, in the emulator.

    python examples/pipelined_kernel.py   needs TileLang and g++, no GPU

Nothing of it is made for this package: TileLang splits the warps and places the barriers itself. A
kernel of your own goes the same way: `get_tir` with the arguments that the function is called with,
its pass configs, and every tensor as an argument, also those that `out_idx` would return.
"""

import tilelang
import tilelang.language as T
import torch

from qla_kernels.lab.emulator import EmulatedKernel

PASS_CONFIGS = {}  # what the kernel is compiled with: pass it to both


@tilelang.jit(out_idx=[2], pass_configs=PASS_CONFIGS)
def matmul(M, N, K, tile=64):
    @T.prim_func
    def main(
        a: T.Tensor((M, K), "bfloat16"),
        b: T.Tensor((K, N), "bfloat16"),
        c: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, tile), T.ceildiv(M, tile), threads=128) as (n, m):
            a_tile = T.alloc_shared((tile, tile), "bfloat16")
            b_tile = T.alloc_shared((tile, tile), "bfloat16")
            total = T.alloc_fragment((tile, tile), "float32")
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(K, tile), num_stages=3):
                T.copy(a[m * tile, k * tile], a_tile)
                T.copy(b[k * tile, n * tile], b_tile)
                T.gemm(a_tile, b_tile, total)
            T.copy(total, c[m * tile, n * tile])

    return main


def main() -> None:
    M, N, K = 128, 192, 256  # small: a product of this size takes a second
    kernel = EmulatedKernel(matmul.get_tir(M, N, K), PASS_CONFIGS)
    a, b = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
    want = a.float() @ b.float()
    for seed in range(6):
        c = torch.full((M, N), torch.nan)
        kernel(a, b, c, seed=seed)  # raises EmulationError with a report, such as of a deadlock
        error = (c - want).norm() / want.norm()
        print(f"seed {seed}: relative error {error:.1e}")
        assert error < 1e-5


if __name__ == "__main__":
    main()
