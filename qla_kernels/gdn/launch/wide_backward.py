"""The gradients of each chunk from V' and Y, which the chains have left.

They need only 128 columns of K at a time. V is any multiple of 64.
"""

import torch
from torch import Tensor

from qla_kernels.gdn.kernels import wide_grads as wide_grads_kernel
from qla_kernels.gdn.kernels.chain.layout import TILE
from qla_kernels.gdn.launch.states import BackwardBatch, ValueStates
from qla_kernels.gdn.launch.tensors import tokens
from qla_kernels.gdn.shapes import key_room
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.sm90 import dtype_name


def wide_grads(x: BackwardBatch, states: ValueStates, out: tuple[Tensor, ...]) -> None:
    """Writes the gradients of every chunk, from the states before and after it, and V' and Y.

    Args:
        x: the batch; its states and bounds are not used.
        states: results of the chains.
        out: as for `backward.chunk_grads`, but dv is complete for tokens of sequences.
    """
    q, k, v, do, g_cum, beta, _, scale, *_ = x
    h, vn, dS, y, table = states
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    dq, dk, dv, dg, dbeta = out
    jit.compile(wide_grads_kernel, wide_grads_kernel.Variant(dtype_name(q.dtype), key_room(K)))(
        tokens(q),
        tokens(k),
        torch.unflatten(tokens(v), -1, (-1, TILE)),
        torch.unflatten(tokens(do), -1, (-1, TILE)),
        g_cum.view(B * T, H, HV // H),
        beta.view(B * T, H, HV // H),
        h,
        vn,
        dS,
        y,
        table.chunks,
        table.num_chunks,
        dq.view(B * T, H, K),
        dk.view(B * T, H, K),
        dv.view(B * T, HV, V // TILE, TILE),
        dg.view(B * T, HV),
        dbeta.view(B * T, HV),
        scale,
        min(device.sm_count(q.device), table.chunks.shape[0] * H),  # persistent CTAs
    )
