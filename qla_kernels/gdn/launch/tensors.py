"""How a call's tensors look to the kernels: packed tokens, states [N, HV, K, V], bounds."""

import functools

import numpy as np
import torch
from torch import Tensor

from qla_kernels import jit
from qla_kernels.device_tables import kept
from qla_kernels.gdn.kernels import chunk_table as chunk_table_kernel
from qla_kernels.gdn.plan import Lengths, sequence_chunks
from qla_kernels.sm90 import dtype_name
from qla_kernels.varlen import ChunkTable, capacity

WHOLE = slice(None)
REACH = 1 << 31  # bytes; numbers have 8 at most


def flattens(x: Tensor) -> bool:
    """Whether the tokens of x [B, T, ..] lie a constant distance apart."""
    B, T = x.shape[:2]
    if T == 1 < B:  # the distance is that of rows
        return x.stride(0) * x.element_size() < REACH
    return B == 1 or x.stride(0) == T * x.stride(1)


def flat_parts(*tensors: Tensor) -> list[slice]:
    """The batch rows that one launch takes: all, or each alone where a tensor does not flatten.

    That is a head-major batch.
    """
    if tensors[0].shape[0] == 1 or all(map(flattens, tensors)):
        return [WHOLE]
    return [slice(b, b + 1) for b in range(len(tensors[0]))]


def parts_in_reach(*tensors: Tensor) -> list[slice]:
    """The batch rows that one launch takes which is told the step from row to row, as an int32.

    All, or each alone where that is too far: 2 GiB, in whatever unit a kernel counts.
    """
    for x in tensors:
        step = x.stride()[0]  # the host has the tuple sooner than the number
        if step >= REACH >> 3 and step * x.element_size() >= REACH:
            return [slice(b, b + 1) for b in range(len(x))]
    return [WHOLE]


def of_part(rows: slice, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Those batch rows; a view of all of them would cost the host 1 us a tensor."""
    return tensors if rows == WHOLE else tuple(x[rows] for x in tensors)


def tokens(x: Tensor, tile: int | None = None) -> Tensor:
    """[B, T, heads, size] as [B T, heads, size], or as [B T, heads, size / tile, tile].

    A dimension of one element may have any stride in torch, but not in a TMA descriptor.
    """
    B, T, heads, size = x.shape
    row, token, head, _ = x.stride()
    if T == 1:
        token = row if B > 1 else heads * size
    if heads == 1:
        head = size
    if tile is None:
        return x.as_strided((B * T, heads, size), (token, head, 1))
    return x.as_strided((B * T, heads, size // tile, tile), (token, head, tile, 1))


def key_first(state: Tensor | None, rows: slice, state_v_first: bool) -> Tensor | None:
    """A view [.., K, V] of the caller's states: their layout is a matter of strides."""
    if state is None:
        return None
    (state,) = of_part(rows, state)
    return state.mT if state_v_first else state


def fresh_like(x: Tensor) -> Tensor:
    """Uninitialised and contiguous; new_empty takes the host twice as long."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def hand_on(state: Tensor | None, to: Tensor | None) -> None:
    """Where there is no token, states and their gradients pass as they are, or as zeros."""
    if to is not None:
        to.zero_() if state is None else to.copy_(state)


def no_state(like: Tensor, K: int, V: int) -> Tensor:
    """For a state [N, HV, K, V] that is not there, never touched; `like` is [.., HV], fp32."""
    return like.as_strided((1, like.shape[-1], K, V), (0, 0, 0, 0))


def sequence_bounds(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """cu_seqlens, or what it would be if the rows of x [B, T, ..] lay packed."""
    if cu_seqlens is not None:
        return cu_seqlens
    B, T = x.shape[:2]
    if T == 0:
        return x.new_zeros(B + 1, dtype=torch.int32)
    return _dense_bounds(x.device, T, B + 1)


@kept(256)
def _dense_bounds(on: torch.device, T: int, count: int) -> Tensor:
    return torch.arange(0, T * count, T, dtype=torch.int32, device=on)


def chunks_of(num_sequences: int, num_tokens: int, cu_seqlens_cpu: Tensor | None) -> Lengths:
    """What is known of the sequences' chunks without asking the device."""
    if cu_seqlens_cpu is None:
        return sequence_chunks(num_sequences, num_tokens)
    return _chunks_between(cu_seqlens_cpu.numpy().tobytes(), cu_seqlens_cpu.element_size())


@functools.lru_cache(maxsize=64)
def _chunks_between(bounds: bytes, size: int) -> Lengths:
    """Of bounds as int32 or int64: every layer of a model asks for the same ones."""
    ends = np.frombuffer(bounds, np.int32 if size == 4 else np.int64)
    return sequence_chunks(0, 0, np.diff(ends).tolist())


def room_for_chunks(num_tokens: int, cu_seqlens: Tensor) -> ChunkTable:
    """A table to be written."""
    N = cu_seqlens.shape[0] - 1
    chunks = cu_seqlens.new_empty(capacity(num_tokens, N), 2, dtype=torch.int32)
    return ChunkTable(chunks, *(cu_seqlens.new_empty(n, dtype=torch.int32) for n in (1, N + 1)))


def live_end(cu_seqlens: Tensor | None, like: Tensor) -> Tensor:
    """How many tokens belong to a sequence, int32 [1]; any number where all do."""
    if cu_seqlens is None:
        return like.new_empty(1, dtype=torch.int32)
    return low_words(cu_seqlens)[-1:]


def low_words(x: Tensor) -> Tensor:
    """int64 as int32, of any strides and without a copy."""
    return x if x.dtype == torch.int32 else x.unsqueeze(-1).view(torch.int32).select(-1, 0)


def no_chunks(first: Tensor) -> ChunkTable:
    """A table that is not there, never touched; `first` is [N + 1] int32."""
    return ChunkTable(first.as_strided((0, 2), (2, 1)), first[:1], first)


def chunk_table(num_tokens: int, cu_seqlens: Tensor) -> ChunkTable:
    """varlen.chunk_table of packed sequences, in one launch."""
    table = room_for_chunks(num_tokens, cu_seqlens)
    if table.chunks.numel():
        variant = chunk_table_kernel.Variant(dtype_name(cu_seqlens.dtype))
        jit.compile(chunk_table_kernel, variant)(cu_seqlens.contiguous(), *table, num_tokens)
    return table
