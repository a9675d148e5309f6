"""Launches the two chains of the backward, which store a state or its gradient for every chunk.

`public_states` uses one of them for a forward with output_h.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.kernels import chunk_states as chunk_states_kernel
from qla_kernels.gdn.kernels import dstate_chain as dstate_chain_kernel
from qla_kernels.gdn.kernels.chain.layout import TILE
from qla_kernels.gdn.launch.tensors import (
    chunk_table,
    flat_parts,
    no_state,
    no_tokens,
    of_part,
    pass_state_through,
    sequence_bounds,
    spans,
    tokens,
)
from qla_kernels.gdn.launch.wide_chains import room_for_values, wide_states
from qla_kernels.gdn.shapes import PART_COLUMNS, WIDE, key_room
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.sm90 import dtype_name
from qla_kernels.runtime.varlen import capacity
from qla_kernels.tile.constants import CHUNK


class DsInDv(NamedTuple):
    """Memory for rows 0 to 63 (of V) of each dS, most of it in the dV output.

    Both have 64 x 128 elements per chunk, and chunk_grads reads these rows before it writes dV.
    """

    dv: Tensor  # [B, T, HV, V]: for chunks of 64 tokens
    tails: Tensor  # [N, HV, 64, K]: for a sequence's last chunk, if it has fewer than 64 tokens
    owner: Tensor  # [capacity of the chunk table] int32: the sequence whose last chunk that is


def ds_room_in_dv(dv: Tensor, K: int, num_sequences: int) -> DsInDv | None:
    """Returns a DsInDv that uses dv, or None unless K and V are both 128.

    The sizes per chunk differ if K and V do, and for V = 64 the 64 rows would be all of dS.
    """
    B, T, HV, V = dv.shape
    if not K == V == 2 * TILE:
        return None
    owner = dv.new_empty(capacity(B * T, num_sequences), dtype=torch.int32)
    return DsInDv(dv, dv.new_empty(num_sequences, HV, TILE, K), owner)


def chunk_states(
    k: Tensor,
    v: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    h0: Tensor | None,
    cu_seqlens: Tensor,
    first_chunk: Tensor,
    every: int = 1,
    ht: Tensor | None = None,
    tile_v: int | None = None,
    out: Tensor | None = None,
    starts_of: Tensor | None = None,
) -> Tensor:
    """Computes the state that enters each chunk, or one state per `every` chunks of a sequence.

    Args:
        k, v: [B, T, heads, size]; any strides that flatten to tokens, with unit last stride.
        g_cum, beta: [B, T, HV] fp32, g_cum in natural log, of kkt_solve.
        A: [B, T, HV, 64] of kkt_solve.
        h0: [N, HV, K, V] fp32, any strides, of `with_room`; zeros if None.
        first_chunk: [N + 1] of the chunk table.
        every: store the states of the chunks whose number in the sequence is a multiple of this.
        ht: [N, HV, K, V] fp32, any strides, of `room_for`, written if given.
        tile_v: columns of V a CTA computes, 64 or 128; chosen from the shape if None, and 64 where
            V is more than 128.
        out: memory for the result; allocated for the most states there can be if None.
        starts_of: the row of h0 from which each sequence starts, or -1 for zeros; its own if None.

    Returns:
        [slots, HV, V, K] in k's dtype. Sequence n owns ceil(chunks / every) slots, after those of
        sequence n - 1; slots that no sequence owns are not written.
    """
    B, T, HV, V = v.shape
    K = k.shape[-1]
    of_sequences = spans(cu_seqlens.int().contiguous())
    N = of_sequences.shape[0]
    h = k.new_empty(capacity(B * T, N, CHUNK * every), HV, V, K) if out is None else out
    if not h.numel():  # no chunk
        pass_state_through(h0, ht)
        return h
    room = key_room(K)
    variant = chunk_states_kernel.Variant(dtype_name(k.dtype), room, _tile_v(N, v, tile_v))
    nothing = no_state(g_cum, room, V)
    jit.compile(chunk_states_kernel, variant)(
        tokens(k),
        torch.unflatten(tokens(v), -1, (-1, variant.tile_v)),
        g_cum.view(B * T, HV),
        beta.view(B * T, HV),
        A.view(B * T, HV, CHUNK),
        of_sequences,
        _first_slot(first_chunk, every),
        first_chunk if starts_of is None else starts_of,
        nothing if h0 is None else h0,
        h,
        nothing if ht is None else ht,
        every,
        0 if h0 is None else 1 if starts_of is None else 2,
        int(ht is not None),
    )
    return h


def copy_states(
    inputs: tuple[Tensor, ...], h: Tensor, x: Tensor, to: Tensor, rows: Tensor | None = None
) -> None:
    """Writes states x to `to`, by a launch of chunk_states over sequences without tokens.

    Such a sequence ends in the state that it starts from. One launch so copies rows that the device
    alone knows, between any strides, and programs can repeat it.

    Args:
        inputs: k, v, g_cum, beta, A as in `chunk_states`, and h as its result; not accessed.
        x: [rows, HV, K, V] fp32, any strides, of `with_room`.
        to: [N, HV, K, V] fp32, any strides, of `room_for`.
        rows: [N] int32 or longer: the row of x for each of `to`; its own if None.
    """
    k, v, g_cum, beta, A = inputs
    bounds = no_tokens(k.device, to.shape[0])
    chunk_states(k, v, g_cum, beta, A, x, bounds, bounds, ht=to, tile_v=TILE, out=h, starts_of=rows)


def public_states(
    call: Call, options: Options, beta: Tensor, h0: Tensor | None, saved: tuple[Tensor, Tensor]
) -> Tensor:
    """Returns the state before each chunk in the caller's layout.

    Args:
        call: packed sequences need cu_seqlens_cpu, as `refusal` demands: without it the number of
            chunks would have to be read from the device.
        beta: activated.
        h0: [N, HV, K, V] fp32, of `with_room`.
        saved: g_cum and A.

    Returns:
        [B, chunks, HV, K, V] in k's dtype, or [.., V, K] if state_v_first.
    """
    k, v, (g_cum, A) = call.k, call.v, saved
    B, T, HV, V = v.shape
    if call.cu_seqlens is None:
        num_chunks = -(-T // CHUNK)
    else:
        assert call.cu_seqlens_cpu is not None, "`refusal` demands it"
        num_chunks = int((-(-call.cu_seqlens_cpu.diff() // CHUNK)).sum())
    h = k.new_empty(B, num_chunks, HV, V, k.shape[-1])
    for rows in flat_parts(k, v):
        k_b, v_b, g_cum_b, beta_b, A_b, h0_b, h_b = of_part(rows, k, v, g_cum, beta, A, h0, h)
        bounds = sequence_bounds(k_b, call.cu_seqlens).int()
        first_chunk = chunk_table(len(k_b) * T, bounds).first_chunk
        out = h_b.flatten(0, 1)
        inputs = k_b, v_b, g_cum_b, beta_b, A_b, h0_b, bounds, first_chunk
        if k.shape[-1] == WIDE:
            wide_states(*inputs, out, room_for_values(out))
        else:
            chunk_states(*inputs, out=out)
    return h if options.state_v_first else h.mT.contiguous()


def dstate_chain(
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
    dh0: Tensor | None = None,
    tile_v: int | None = None,
    held: DsInDv | None = None,
    ends_of: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the gradient of the state that leaves each chunk.

    Args:
        q, k, do: [B, T, heads, size]; any strides that flatten to tokens, with unit last stride.
        g_cum, beta: [B, T, HV] fp32, g_cum in natural log, of kkt_solve.
        A: [B, T, HV, 64] of kkt_solve.
        dht: [N, HV, K, V] fp32, any strides, of `with_room`; zeros if None.
        first_chunk: [N + 1] of the chunk table.
        dh0: [N, HV, K, V] fp32, any strides, of `room_for`, written if given.
        tile_v: as in `chunk_states`.
        held: memory for rows 0 to 63 of V; None keeps them in the result.
        ends_of: given if the sequences are nodes of a tree, whose spans [N, 2] `cu_seqlens` then
            holds, and whose first chunks [N] `first_chunk`: the row of dht with the gradient of the
            state after each node, or -1 for zeros.
        out: memory for the result; allocated if None.

    Returns:
        [capacity of the chunk table, HV, V, K] in k's dtype, or [.., V - 64, K] with `held`; rows
        past the last chunk are not written.
    """
    B, T, HV, V = do.shape
    K = k.shape[-1]
    of_sequences = spans(cu_seqlens.int().contiguous())
    N = of_sequences.shape[0]
    rows = V if held is None else V - TILE
    dS = k.new_empty(capacity(B * T, N), HV, rows, K) if out is None else out
    if not dS.numel():  # no chunk
        pass_state_through(dht, dh0)
        return dS
    room = key_room(K)
    variant = dstate_chain_kernel.Variant(dtype_name(k.dtype), room, _tile_v(N, do, tile_v))
    nothing = no_state(g_cum, room, V)
    jit.compile(dstate_chain_kernel, variant)(
        tokens(q),
        tokens(k),
        torch.unflatten(tokens(do), -1, (-1, variant.tile_v)),
        g_cum.view(B * T, HV),
        beta.view(B * T, HV),
        A.view(B * T, HV, CHUNK),
        of_sequences,
        first_chunk,
        first_chunk if ends_of is None else ends_of,
        nothing if dht is None else dht,
        dS,
        nothing if dh0 is None else dh0,
        *ds_rows_in_dv(held, dS, do, first_chunk),
        scale,
        0 if dht is None else 1 if ends_of is None else 2,
        int(dh0 is not None),
        int(held is not None),
    )
    return dS


def ds_rows_in_dv(
    held: DsInDv | None, dS: Tensor, values: Tensor, integers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dv, tails and owner as a kernel takes them.

    If held is None, these are placeholders of the same ranks, which the kernel does not access.
    """
    if held is None:
        return tokens(values), dS.view(-1, dS.shape[1], TILE, dS.shape[3]), integers
    return tokens(held.dv), held.tails, held.owner


def _first_slot(first_chunk: Tensor, every: int) -> Tensor:
    """Returns the first slot of each sequence, [N + 1] int32: ceil(chunks / every) slots each."""
    if every == 1:
        return first_chunk
    slots = (first_chunk.diff() + every - 1) // every
    return torch.nn.functional.pad(slots.cumsum(0, dtype=torch.int32), (1, 0))


def _tile_v(num_sequences: int, values: Tensor, wanted: int | None) -> int:
    HV, V = values.shape[2:]
    if V > PART_COLUMNS:  # a CTA of a wider tile takes all of V
        return TILE
    if wanted is not None:
        return int(wanted)  # a Number of a trace follows from T
    half = device.sm_count(values.device) // 2  # a backward runs both chains at the same time
    return gdn_plan.tile_v(num_sequences, HV, V, half)
