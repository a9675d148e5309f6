"""Prepares a call's tensors for the kernels: views of tokens and states, bounds of sequences."""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qla_kernels.gdn.call import Call
from qla_kernels.gdn.choices import BatchLengths
from qla_kernels.gdn.kernels import chunk_table as chunk_table_kernel
from qla_kernels.gdn.lengths import Lengths, rounded, sequence_chunks
from qla_kernels.gdn.shapes import key_room
from qla_kernels.gdn.times import Shape
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.device_tables import kept
from qla_kernels.runtime.sm90 import dtype_name, low_words
from qla_kernels.runtime.varlen import ChunkTable, capacity
from qla_kernels.tile.constants import CHUNK

WHOLE = slice(None)
REACH = 1 << 31  # bytes that an int32 step can cover; a number has at most 8 bytes
BOUNDS = 1 << 16  # numbers in a table of bounds of dense batches: 256 KB


def flattens(x: Tensor) -> bool:
    """Returns True if the tokens of x [B, T, ..] lie a constant distance apart.

    For T == 1 that distance is the step from row to row, which must then be less than REACH.
    """
    B, T = x.shape[:2]
    if T == 1 < B:  # the distance of tokens is that of rows
        return x.stride(0) * x.element_size() < REACH
    return B == 1 or x.stride(0) == T * x.stride(1)


def flat_parts(*tensors: Tensor) -> list[slice]:
    """Returns the batch rows of each launch: all in one, or each alone if one does not flatten.

    A head-major batch does not.
    """
    if tensors[0].shape[0] == 1 or all(map(flattens, tensors)):
        return [WHOLE]
    return [slice(b, b + 1) for b in range(len(tensors[0]))]


def parts_in_reach(*tensors: Tensor) -> list[slice]:
    """Returns the batch rows of each launch of a kernel that takes the row stride as an int32.

    All rows go in one launch, or each alone if a stride is 2 GiB or more: below that it fits an
    int32, whether the kernel counts bytes or numbers.
    """
    for x in tensors:
        step = x.stride()[0]  # faster on the host than x.stride(0)
        if step >= REACH >> 3 and step * x.element_size() >= REACH:
            return [slice(b, b + 1) for b in range(len(x))]
    return [WHOLE]


def of_part(rows: slice, *tensors: Any) -> tuple[Any, ...]:
    """Returns the given batch rows of each tensor, and None for None.

    For all rows it returns the tensors themselves; a view costs the host 1 us per tensor.
    """
    return tensors if rows == WHOLE else tuple(None if x is None else x[rows] for x in tensors)


def tokens(x: Tensor, tile: int | None = None) -> Tensor:
    """Returns x [B, T, heads, size] as a view [B T, heads, size].

    With `tile` the view is [B T, heads, size / tile, tile]. Dimensions of one element get a regular
    stride: torch allows any stride there, a TMA descriptor does not.
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


def key_first(state: Tensor | None, state_v_first: bool) -> Tensor | None:
    """Returns the caller's states as a view [.., K, V], or None for None.

    If state_v_first, the caller's states are [.., V, K]; the view differs in strides alone.
    """
    return state.mT if state_v_first and state is not None else state


def with_room(states: Tensor | None) -> Tensor | None:
    """Returns states [N, HV, K, V] with rows of zeros up to the K of the variants; None for None.

    States that need none are returned themselves. Kernels read and write all rows of a state by
    threads; tensors that TMA reads and writes need no room.
    """
    wide = room_for(states)
    if states is None or wide is None or wide is states:
        return states
    (wide if wide.stride(3) == 1 else wide.mT).zero_()
    wide[:, :, : states.shape[2]].copy_(states)
    return wide


def room_for(states: Tensor | None) -> Tensor | None:
    """Returns memory for results as `with_room` has them: `states` itself if it has the room.

    Its order is that of the states, so that rows of a copy lie side by side in both.
    """
    if states is None or (room := key_room(states.shape[2])) == states.shape[2]:
        return states
    N, HV, _, V = states.shape
    if states.stride(3) == 1:
        return states.new_empty(N, HV, room, V)
    return states.new_empty(N, HV, V, room).mT


def put_states(states: Tensor | None, done: Tensor | None) -> None:
    """Writes `done`, of `room_for`, to the states, if that is other memory."""
    if states is not None and done is not None and done.shape != states.shape:
        states.copy_(done[:, :, : states.shape[2]])


def fresh_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns an uninitialised contiguous tensor like x; new_empty takes the host twice as long."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def pass_state_through(state: Tensor | None, to: Tensor | None) -> None:
    """Copies `state` to `to`, or writes zeros if `state` is None; does nothing if `to` is None.

    Used for calls without tokens: states and their gradients then pass through unchanged.
    """
    if to is not None:
        to.zero_() if state is None else to.copy_(state)


def no_state(like: Tensor, K: int, V: int) -> Tensor:
    """Returns a placeholder [1, HV, K, V] for an absent state, which kernels do not access.

    It is a view with strides of 0 of `like`, an fp32 tensor [.., HV].
    """
    return like.as_strided((1, like.shape[-1], K, V), (0, 0, 0, 0))


def sequence_bounds(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns cu_seqlens or, if None, the bounds of the rows of x [B, T, ..], laid end to end."""
    if cu_seqlens is not None:
        return cu_seqlens
    B, T = x.shape[:2]
    if T == 0:
        return x.new_zeros(B + 1, dtype=torch.int32)
    width = -(-(B + 1) // 4) * 4  # rows begin at multiples of 16 bytes
    rows = max(1, BOUNDS // width)
    table = _dense_bounds(x.device, int(T // rows), rows, width)
    return table.as_strided((B + 1,), (1,), T % rows * width)


@kept(64)
def _dense_bounds(on: torch.device, block: int, rows: int, width: int) -> Tensor:
    """Returns the bounds of batches of `rows` lengths, from block * rows on: 0, T, 2 T, .. of each.

    Prefill comes with a new length at nearly every call, and to make a table takes the host longer
    than the call.
    """
    lengths = torch.arange(block * rows, (block + 1) * rows, dtype=torch.int32, device=on)
    return lengths[:, None] * torch.arange(width, dtype=torch.int32, device=on)


@kept(64)
def no_tokens(on: torch.device, num_sequences: int) -> Tensor:
    """Returns the bounds of sequences without tokens."""
    return torch.zeros(num_sequences + 1, dtype=torch.int32, device=on)


def spans(bounds: Tensor) -> Tensor:
    """Returns the first token of each sequence and one past its last, [N, 2] int32.

    Of contiguous bounds [N + 1] they are a view, in which rows overlap. Spans, of the nodes of a
    tree, are returned themselves.
    """
    return bounds if bounds.dim() == 2 else bounds.as_strided((bounds.shape[0] - 1, 2), (1, 1))


def plan_shape(call: Call) -> tuple[Lengths, Shape]:
    """Returns the sequences' numbers of chunks, and HV, K, V and the number of SMs, for a plan."""
    (B, T, HV, V), K = call.v.shape, call.q.shape[-1]
    chunks = chunks_of(call.num_sequences, B * T, call.cu_seqlens_cpu)
    return chunks, (HV, K, V, device.sm_count(call.q.device))


def batch_of(call: Call) -> tuple[BatchLengths, Shape]:
    """Returns a call's sequences and its shape, as `choices` takes them."""
    chunks, shape = plan_shape(call)
    size, on_host = (call.num_sequences, call.q.shape[0] * call.q.shape[1]), call.cu_seqlens_cpu
    known = call.cu_seqlens is None or on_host is not None
    in_order = None if on_host is None else functools.partial(chunks_in_order, on_host)
    return BatchLengths(chunks, size, known, in_order), shape


def chunks_of(num_sequences: int, num_tokens: int, cu_seqlens_cpu: Tensor | None) -> Lengths:
    """Returns the sequences' numbers of chunks, as `lengths.sequence_chunks` does.

    Without cu_seqlens_cpu all sequences count as equally long; no value is read from the device.
    """
    if cu_seqlens_cpu is None:
        return sequence_chunks(num_sequences, num_tokens)
    return _chunks_between(cu_seqlens_cpu.numpy().tobytes(), cu_seqlens_cpu.element_size())[0]


def chunks_in_order(cu_seqlens_cpu: Tensor) -> tuple[int, ...]:
    """Returns each sequence's number of chunks, rounded as those of `chunks_of`."""
    return _chunks_between(cu_seqlens_cpu.numpy().tobytes(), cu_seqlens_cpu.element_size())[1]


@functools.lru_cache(maxsize=64)
def _chunks_between(bounds: bytes, size: int) -> tuple[Lengths, tuple[int, ...]]:
    """Returns the sequences' numbers of chunks, counted and in order, for a cu_seqlens' bytes.

    Its numbers are int32 if `size` is 4, else int64. Cached: every layer has the same bounds.
    """
    lengths = np.diff(np.frombuffer(bounds, np.int32 if size == 4 else np.int64)).tolist()
    in_order = tuple(rounded(-(-length // CHUNK)) for length in lengths)
    return sequence_chunks(0, 0, lengths), in_order


def room_for_chunks(num_tokens: int, cu_seqlens: Tensor) -> ChunkTable:
    """Returns an uninitialised table with room for the most chunks that there can be."""
    N = cu_seqlens.shape[0] - 1
    chunks = cu_seqlens.new_empty(capacity(num_tokens, N), 2, dtype=torch.int32)
    return ChunkTable(chunks, *(cu_seqlens.new_empty(n, dtype=torch.int32) for n in (1, N + 1)))


def num_live_tokens(cu_seqlens: Tensor | None, like: Tensor) -> Tensor:
    """Returns the number of tokens that belong to a sequence, int32 [1] on the device.

    Without cu_seqlens all tokens do; the result is then uninitialised, and kernels do not read it.
    """
    if cu_seqlens is None:
        return like.new_empty(1, dtype=torch.int32)
    return low_words(cu_seqlens)[-1:]


def no_chunks(first: Tensor) -> ChunkTable:
    """Returns a placeholder for an absent table, which kernels do not access.

    It consists of views of `first`, which is [N + 1] int32.
    """
    return ChunkTable(first.as_strided((0, 2), (2, 1)), first[:1], first)


def chunk_table(num_tokens: int, cu_seqlens: Tensor) -> ChunkTable:
    """Returns the table of chunks of packed sequences, built by one launch.

    Its contents equal those of varlen.chunk_table.
    """
    table = room_for_chunks(num_tokens, cu_seqlens)
    if table.chunks.numel():
        variant = chunk_table_kernel.Variant(dtype_name(cu_seqlens.dtype))
        jit.compile(chunk_table_kernel, variant)(cu_seqlens.contiguous(), *table, num_tokens)
    return table
