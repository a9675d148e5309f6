"""The backward at K = 256: the two chains, then the gradients of each chunk.

The chains leave V' and Y, so that the gradients need only 128 columns of K at a time. Sequences are
not cut into segments, and V is any multiple of 64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels import device, jit
from qla_kernels.gdn.kernels import wide_grads as wide_grads_kernel
from qla_kernels.gdn.kernels.chain.layout import TILE
from qla_kernels.gdn.launch.states import BackwardBatch
from qla_kernels.gdn.launch.tensors import chunk_table, pass_state_through, tokens
from qla_kernels.gdn.launch.wide_chains import room_for_values, wide_dstate, wide_states
from qla_kernels.sm90 import dtype_name
from qla_kernels.varlen import ChunkTable


class WideStates(NamedTuple):
    """The results of both chains, which wide_grads reads."""

    h: Tensor  # [capacity of the table, HV, V, K] the state that enters each chunk
    vn: Tensor  # [capacity, HV, V / 64, 64, 64] V'
    dS: Tensor  # as h: the gradient of the state that leaves each chunk
    y: Tensor  # as vn: Y
    table: ChunkTable


def wide_states_around(x: BackwardBatch, dv: Tensor) -> WideStates | None:
    """Runs both chains over whole sequences, on two streams; None where there is no chunk.

    Writes dv [B, T, HV, V] for tokens of sequences, and x.dh0 if given.
    """
    q, k, v, do, g_cum, beta, A, scale, bounds, h0, dht, dh0 = x
    B, T, HV, V = v.shape
    if not v.numel() or bounds.shape[0] == 1:  # no token, or none that a sequence owns
        pass_state_through(dht, dh0)
        return None
    bounds = bounds.int()
    table = chunk_table(B * T, bounds)
    first = table.first_chunk
    h, dS = (k.new_empty(table.chunks.shape[0], HV, V, k.shape[-1]) for _ in range(2))
    vn, y = room_for_values(h), room_for_values(dS)  # device.fork says why all are made here
    with device.fork(q) as aside:  # the chain that takes longer is launched first
        wide_dstate(q, k, do, g_cum, beta, A, dht, scale, bounds, first, dS, y, dv, dh0)
        with aside:
            wide_states(k, v, g_cum, beta, A, h0, bounds, first, h, vn)
    return WideStates(h, vn, dS, y, table)


def wide_grads(x: BackwardBatch, states: WideStates, out: tuple[Tensor, ...]) -> None:
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
    jit.compile(wide_grads_kernel, wide_grads_kernel.Variant(dtype_name(q.dtype), K))(
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
