"""Launches the two chains of a backward that leave V' and Y besides states and their gradients.

`shapes.leaves_values` says for which head sizes. At K = 256 `chains.public_states` uses one, too.
"""

import torch
from torch import Tensor

from qla_kernels.gdn.kernels import wide_dstate as wide_dstate_kernel
from qla_kernels.gdn.kernels import wide_states as wide_states_kernel
from qla_kernels.gdn.kernels.chain.layout import TILE
from qla_kernels.gdn.launch.tensors import no_state, pass_state_through, spans, tokens
from qla_kernels.gdn.shapes import key_room
from qla_kernels.runtime import jit
from qla_kernels.runtime.sm90 import dtype_name
from qla_kernels.tile.constants import CHUNK


def room_for_values(states: Tensor) -> Tensor:
    """Returns uninitialised memory for V' or Y of all chunks: [chunks, HV, V / 64, 64, 64].

    Args:
        states: [chunks, HV, V, K].
    """
    chunks, HV, V, _ = states.shape
    return states.new_empty(chunks, HV, V // TILE, CHUNK, TILE)


def wide_states(
    k: Tensor,
    v: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    h0: Tensor | None,
    cu_seqlens: Tensor,
    first_chunk: Tensor,
    h: Tensor,
    vn: Tensor,
    starts_of: Tensor | None = None,
) -> None:
    """Computes the state that enters each chunk, and V' of the chunk.

    Args:
        k, v, g_cum, beta, A, h0, cu_seqlens, first_chunk, starts_of: as for `chains.chunk_states`;
            V is a multiple of 64.
        h: [chunks, HV, V, K] in k's dtype, written; rows past the last chunk are not.
        vn: [chunks, HV, V / 64, 64, 64], likewise.
    """
    B, T, HV, V = v.shape
    room = key_room(k.shape[-1])
    if not h.numel():  # no chunk
        return
    jit.compile(wide_states_kernel, wide_states_kernel.Variant(dtype_name(k.dtype), room))(
        tokens(k),
        torch.unflatten(tokens(v), -1, (-1, TILE)),
        g_cum.view(B * T, HV),
        beta.view(B * T, HV),
        A.view(B * T, HV, CHUNK),
        spans(cu_seqlens.int().contiguous()),
        first_chunk,
        first_chunk if starts_of is None else starts_of,
        no_state(g_cum, room, V) if h0 is None else h0,
        h,
        vn,
        0 if h0 is None else 1 if starts_of is None else 2,
    )


def wide_dstate(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    dht: Tensor | None,
    scale: float,
    cu_seqlens: Tensor,
    first_chunk: Tensor,
    dS: Tensor,
    y: Tensor,
    dv: Tensor,
    dh0: Tensor | None = None,
    ends_of: Tensor | None = None,
) -> None:
    """Computes the gradient of the state that leaves each chunk, and Y and dV of the chunk.

    Args:
        q, k, do, g_cum, beta, A, dht, scale, cu_seqlens, first_chunk, dh0, ends_of: as for
            `chains.dstate_chain`; V is a multiple of 64.
        dS: [chunks, HV, V, K] in k's dtype, written; rows past the last chunk are not.
        y: [chunks, HV, V / 64, 64, 64], likewise.
        dv: [B, T, HV, V], written; tokens of no sequence are not.
    """
    B, T, HV, V = do.shape
    room = key_room(k.shape[-1])
    if not dS.numel():  # no chunk
        pass_state_through(dht, dh0)
        return
    nothing = no_state(g_cum, room, V)
    jit.compile(wide_dstate_kernel, wide_dstate_kernel.Variant(dtype_name(k.dtype), room))(
        tokens(q),
        tokens(k),
        torch.unflatten(tokens(do), -1, (-1, TILE)),
        g_cum.view(B * T, HV),
        beta.view(B * T, HV),
        A.view(B * T, HV, CHUNK),
        spans(cu_seqlens.int().contiguous()),
        first_chunk,
        first_chunk if ends_of is None else ends_of,
        nothing if dht is None else dht,
        dS,
        y,
        dv.view(B * T, HV, V // TILE, TILE),
        nothing if dh0 is None else dh0,
        scale,
        0 if dht is None else 1 if ends_of is None else 2,
        int(dh0 is not None),
    )
