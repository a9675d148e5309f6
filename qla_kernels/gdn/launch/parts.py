"""Value heads of more than 128 columns as several heads, for the chains and chunk_grads.

Columns of V do not depend on one another if q, k, g and beta are given. So a value head of m parts
is m value heads that share their gates, betas, A and key head; gradients of the shared ones are
sums. chunk_grads needs all columns of a head at once, and adds up dq and dk over the value heads of
a key head anyway. Values and states are views in parts. Gates, betas and A are repeated.
"""

from torch import Tensor

from qla_kernels.gdn.kernels import part_sums as part_sums_kernel
from qla_kernels.gdn.kernels import repeat_gates as repeat_gates_kernel
from qla_kernels.gdn.shapes import part_columns
from qla_kernels.runtime import jit
from qla_kernels.runtime.sm90 import dtype_name


def num_parts(V: int) -> int:
    return V // part_columns(V)


def of_values(x: Tensor, parts: int) -> Tensor:
    """Returns x [B, T, HV, V] as [B, T, HV parts, V / parts].

    It is a view if value heads lie side by side, else a copy.
    """
    B, T, HV, V = x.shape
    if HV > 1 and x.stride(2) != V:
        x = x.contiguous()
    row, token, *_ = x.stride()
    columns = V // parts
    return x.as_strided((B, T, HV * parts, columns), (row, token, columns, 1))


def repeat_gates(
    g_cum: Tensor, beta: Tensor, A: Tensor, parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns g_cum, beta [B, T, HV] and A [B, T, HV, 64] for the parts: HV parts value heads.

    All are contiguous; g_cum and beta are fp32.
    """
    B, T, HV = g_cum.shape
    gates = [x.new_empty(B, T, HV * parts) for x in (g_cum, beta)]
    A_out = A.new_empty(B, T, HV * parts, A.shape[3])
    rows, pieces = B * T * HV, (repeat_gates_kernel.ROW_PIECES, repeat_gates_kernel.REPEAT_PIECE)
    jit.compile(repeat_gates_kernel, repeat_gates_kernel.Variant(dtype_name(A.dtype)))(
        g_cum.view(rows),
        beta.view(rows),
        A.view(rows, *pieces),
        *(x.view(rows, parts) for x in gates),
        A_out.view(rows, parts, *pieces),
    )
    return gates[0], gates[1], A_out


def of_states(x: Tensor, parts: int) -> Tensor:
    """Returns states [N, HV, K, V], which split, as a view [N, HV parts, K, V / parts]."""
    (N, HV, K, V), (n, _, k, v) = x.shape, x.stride()
    columns = V // parts
    return x.as_strided((N, HV * parts, K, columns), (n, columns * v, k, v))


def splits(x: Tensor) -> bool:
    """Returns whether the columns of states [N, HV, K, V] are a constant distance apart.

    They are in [.., V, K].
    """
    return x.shape[1] == 1 or x.stride(1) == x.shape[3] * x.stride(3)


def part_sums(dg: Tensor, dbeta: Tensor, dg_out: Tensor, dbeta_out: Tensor) -> None:
    """Writes the sums over the parts of dg and dbeta [B, T, HV parts] to [B, T, HV], in order."""
    rows = dg_out.numel()
    jit.compile(part_sums_kernel, part_sums_kernel.Variant(dtype_name(dg.dtype)))(
        *(x.view(rows, -1) for x in (dg, dbeta)), *(x.view(rows) for x in (dg_out, dbeta_out))
    )
