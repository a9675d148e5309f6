"""RMSNorm and output gate in one Triton launch: what an engine runs behind its rule.

The engines' own norms are compiled extensions, or are not among the files that we load. Import this
where there is Triton.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl


@triton.jit
def norm_kernel(o, z, weight, y, z_row, heads, eps, V: tl.constexpr):
    row = tl.program_id(0)
    n, h, i = row // heads, row % heads, tl.arange(0, V)
    x = tl.load(o + row * V + i).to(tl.float32)
    g = tl.load(z + n * z_row + h * V + i).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x) / V + eps) * tl.load(weight + i).to(tl.float32)
    tl.store(y + row * V + i, x * g * tl.sigmoid(g))


def gated_norm(o, z, weight):
    """y = norm(o) weight silu(z); o is contiguous, z [N, HV, V] may be a slice of rows."""
    y = torch.empty_like(o)
    norm_kernel[(z.shape[0] * z.shape[1],)](
        o, z, weight, y, z.stride(0), z.shape[1], 1e-6, z.shape[2], num_warps=1
    )
    return y
