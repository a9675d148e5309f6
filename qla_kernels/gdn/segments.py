"""Long sequences in segments, on the GPU: where they are cut, and the state that enters each.

A segment begins a multiple of 64 tokens into its sequence, so to every other kernel it is a
sequence like any other: with `bounds` for cu_seqlens, and its start state for an initial state.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels import jit
from qla_kernels.gdn.chain import TILE
from qla_kernels.gdn.kernels import segment_map as segment_map_kernel
from qla_kernels.gdn.kernels import segment_map_bwd as segment_map_bwd_kernel
from qla_kernels.gdn.kernels import segment_plan as segment_plan_kernel
from qla_kernels.gdn.kernels import segment_scan as segment_scan_kernel
from qla_kernels.gdn.packing import no_state, tokens
from qla_kernels.gdn.plan import capacity
from qla_kernels.gdn.validate import dtype_name
from qla_kernels.varlen import CHUNK


class Segments(NamedTuple):
    """Segments of packed sequences, one after the other, with room for the most there can be.

    Behind the last one there are empty ones that belong to no sequence.
    """

    bounds: Tensor  # [capacity + 1] int32: segment p has the tokens bounds[p] to bounds[p + 1]
    starts_of: Tensor  # [capacity + 1] int32: the sequence that segment p begins, or -1
    ends_of: Tensor  # [capacity + 1] int32: the sequence that segment p ends, or -1
    first_segment: Tensor  # [N + 1] int32

    @property
    def capacity(self) -> int:
        return self.bounds.shape[0] - 1


class Maps(NamedTuple):
    """What segments do to the states that enter them: S_end = M S_start + b."""

    left: Tensor  # [capacity, HV, V, K] fp32: in row p + 1, b or all of what segment p leaves
    M: Tensor  # [capacity, HV, 2, K, K] bf16: where cold, M^T as the sum of two
    cold: Tensor  # [capacity, HV] int32: whether M is needed; unwritten for a sequence's last one


def cut(num_tokens: int, cu_seqlens: Tensor, segment_chunks: int) -> Segments:
    """Sequences of more than `segment_chunks` chunks, cut into segments of nearly equal length."""
    N = cu_seqlens.shape[0] - 1
    rows = capacity(num_tokens, N, segment_chunks) + 1
    bounds, starts_of, ends_of = (
        cu_seqlens.new_empty(rows, dtype=torch.int32) for _ in Segments._fields[:3]
    )
    segments = Segments(bounds, starts_of, ends_of, cu_seqlens.new_empty(N + 1, dtype=torch.int32))
    variant = segment_plan_kernel.Variant(dtype_name(cu_seqlens.dtype))
    jit.compile(segment_plan_kernel, variant)(
        cu_seqlens.contiguous(),
        segments.first_segment,
        bounds,
        starts_of,
        ends_of,
        segment_chunks,
    )
    return segments


def maps(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor | None,
    h0: Tensor | None,
    segments: Segments,
    warm_log_bound: float,
) -> Maps:
    """What each segment does to the state that enters it.

    Args:
        k, v: [B, T, heads, size]; any strides that flatten to tokens, with unit last stride.
        g, beta: [B, T, HV] fp32, g in natural log: g_cum of kkt_solve where A is given, else gates.
        A: [B, T, HV, 64] of kkt_solve; solved for again, and not kept, if None.
        h0: [N, HV, K, V] fp32, any strides; zeros if None.
        warm_log_bound: where the chunks at a segment's end leave less than e^this of the state that
            enters them, those chunks alone are taken. -inf: nowhere.
    """
    B, T, HV, V = v.shape
    K = k.shape[-1]
    found = Maps(
        v.new_empty(segments.capacity, HV, V, K, dtype=torch.float32),
        v.new_empty(segments.capacity, HV, 2, K, K, dtype=torch.bfloat16),
        v.new_empty(segments.capacity, HV, dtype=torch.int32),
    )
    variant = segment_map_kernel.Variant(dtype_name(k.dtype), K, A is None)
    jit.compile(segment_map_kernel, variant)(
        tokens(k),
        torch.unflatten(tokens(v), -1, (-1, TILE)),
        g.view(B * T, HV),
        beta.view(B * T, HV),
        v.new_empty(0, HV, CHUNK) if A is None else A.view(B * T, HV, CHUNK),
        segments.bounds,
        segments.starts_of,
        segments.ends_of,
        no_state(g, K, V) if h0 is None else h0,
        *found,
        warm_log_bound,
        int(h0 is not None),
    )
    return found


def start_states(found: Maps, h0: Tensor | None, segments: Segments) -> Tensor:
    """The state that enters each segment, from what `maps` found; takes the place of `left`.

    Returns [capacity, HV, K, V] fp32; rows of no segment are not written.
    """
    return _fold(found.left, h0, found, segments, reverse=False)


def end_gradients(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    dht: Tensor | None,
    scale: float,
    found: Maps,
    segments: Segments,
    warm_log_bound: float,
) -> Tensor:
    """The gradient of the state that leaves each segment.

    Args:
        q, k, do: [B, T, heads, size]; any strides that flatten to tokens, with unit last stride.
        dht: [N, HV, K, V] fp32, any strides; zeros if None.
        found: of `maps`, with the same bound.

    Returns:
        [capacity, HV, K, V] fp32; rows of no segment are not written.
    """
    B, T, HV, V = do.shape
    K = k.shape[-1]
    ends = torch.empty_like(found.left)
    variant = segment_map_bwd_kernel.Variant(dtype_name(k.dtype), K)
    jit.compile(segment_map_bwd_kernel, variant)(
        tokens(q),
        tokens(k),
        torch.unflatten(tokens(do), -1, (-1, TILE)),
        g_cum.view(B * T, HV),
        beta.view(B * T, HV),
        A.view(B * T, HV, CHUNK),
        segments.bounds,
        segments.starts_of,
        segments.ends_of,
        no_state(g_cum, K, V) if dht is None else dht,
        ends,
        scale,
        warm_log_bound,
        int(dht is not None),
    )
    return _fold(ends, dht, found, segments, reverse=True)


def _fold(
    states: Tensor, given: Tensor | None, found: Maps, segments: Segments, reverse: bool
) -> Tensor:
    K = states.shape[-1]
    variant = segment_scan_kernel.Variant(K, reverse)
    jit.compile(segment_scan_kernel, variant)(
        segments.first_segment,
        no_state(states[0, :, 0, 0], K, states.shape[-2]) if given is None else given,
        states,
        found.M,
        found.cold,
        int(given is not None),
    )
    return states.mT
