"""The operators of ops.py on CUDA tensors: allocates results and launches kernels.

Nothing is read back from the device.
"""

import math

import torch
from torch import Tensor

from qla_kernels.dualkv.heuristics import head_pack
from qla_kernels.dualkv.kernels import fwd as fwd_kernel
from qla_kernels.dualkv.ops import SharedBackward, SharedForward
from qla_kernels.dualkv.shapes import QUERY_ROWS
from qla_kernels.dualkv.tables import Tables
from qla_kernels.dualkv.validate import OP
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.sm90 import dtype_name, require_aligned, tma_readable


def dualkv_fwd(
    q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], scale: float, q_shift: int
) -> SharedForward:
    """Launches the forward; returns o and the base-2 lse.

    Raises Unsupported if the address of q, k or v is not a multiple of 16 bytes.
    """
    require_aligned(OP, q=q, k=k, v=v)
    work = Tables(*tables)
    num_queries, num_heads, D = q.shape
    pack = head_pack(num_heads, k.shape[1])
    with device.of(q):
        o = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse2 = q.new_empty(num_heads, num_queries, dtype=torch.float32)
        if num_queries:
            ctas = min(device.sm_count(q.device), work.order.shape[0])
            next_order = work.order.new_full((1,), ctas)  # CTAs begin with an item each
            jit.compile(fwd_kernel, fwd_kernel.Variant(dtype_name(q.dtype), D))(
                q, k, v, work.header, work.item, work.span, work.order, next_order, o, lse2,
                (QUERY_ROWS // pack).bit_length() - 1, num_heads // k.shape[1], q_shift,
                scale * math.log2(math.e), ctas,
            )  # fmt: skip
    return SharedForward(o, lse2)


@torch.no_grad()
def dualkv_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor,
    dlse: Tensor | None,
    tables: list[Tensor],
    scale: float,
    q_shift: int,
    deterministic: bool,
) -> SharedBackward:
    """Launches the backward; returns dq, dk and dv.

    Raises Unsupported if the address of q, k or v is not a multiple of 16 bytes.
    """
    from qla_kernels.dualkv.launch_backward import backward

    require_aligned(OP, q=q, k=k, v=v)
    with device.of(q):
        if not tma_readable(do):  # such as the gradient of a sum: one number, expanded
            do = do.contiguous()
        work = Tables(*tables)
        return SharedBackward(
            *backward(do, q, k, v, o, lse2, dlse, work, scale, q_shift, deterministic)
        )
