"""Computes the inputs of chunk_grads or wide_grads: states before chunks and gradients after them.

The chains that compute them run over whole sequences or over segments.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn import choices
from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.call import Options
from qla_kernels.gdn.choices import BatchLengths
from qla_kernels.gdn.launch import parts, segments
from qla_kernels.gdn.launch.chains import (
    DsInDv,
    chunk_states,
    copy_states,
    ds_room_in_dv,
    dstate_chain,
)
from qla_kernels.gdn.launch.segments import Maps, Segments
from qla_kernels.gdn.launch.tensors import (
    WHOLE,
    chunk_table,
    chunks_of,
    fresh_like,
    of_part,
    pass_state_through,
    sequence_bounds,
)
from qla_kernels.gdn.launch.wide_chains import room_for_values, wide_dstate, wide_states
from qla_kernels.gdn.shapes import WIDE, leaves_values
from qla_kernels.runtime import device
from qla_kernels.runtime.varlen import ChunkTable


class BackwardBatch(NamedTuple):
    """The inputs of a backward as kernels read them; B and T of all of them flatten to tokens."""

    q: Tensor  # [B, T, H, K]
    k: Tensor
    v: Tensor  # [B, T, HV, V]
    do: Tensor
    g_cum: Tensor  # [B, T, HV] fp32, natural log
    beta: Tensor  # [B, T, HV] fp32, activated
    A: Tensor  # [B, T, HV, 64] of the forward
    scale: float
    bounds: Tensor  # [N + 1] of the sequences, where B is 1; or 0, T, 2 T, ...
    h0: Tensor | None = None  # [N, HV, K, V] fp32, with room for the variant's K; zeros if None
    dht: Tensor | None = None  # likewise
    dh0: Tensor | None = None  # likewise, written if given

    def of_part(self, rows: slice) -> "BackwardBatch":
        if rows == WHOLE:
            return self
        q, k, v, do, g_cum, beta, A, h0, dht, dh0 = of_part(rows, *self[:7], *self[9:])
        bounds = sequence_bounds(q, None)
        return BackwardBatch(q, k, v, do, g_cum, beta, A, self.scale, bounds, h0, dht, dh0)

    def in_parts(self) -> "BackwardBatch":
        """Returns the batch with the parts of each value head as value heads: launch/parts.py.

        Its states split, as `with_states_that_split` returns them.
        """
        num = parts.num_parts(self.v.shape[3])
        if num == 1:
            return self
        v, do = (parts.of_values(x, num) for x in (self.v, self.do))
        g_cum, beta, A = parts.repeat_gates(self.g_cum, self.beta, self.A, num)
        h0, dht, dh0 = (
            None if x is None else parts.of_states(x, num) for x in (self.h0, self.dht, self.dh0)
        )
        return self._replace(v=v, do=do, g_cum=g_cum, beta=beta, A=A, h0=h0, dht=dht, dh0=dh0)

    def with_states_that_split(self, h: Tensor) -> "BackwardBatch":
        """Returns the batch with copies in place of states that `in_parts` cannot have as views.

        Its dh0 may be memory of its own. h: as in `chains.copy_states`.
        """
        if parts.num_parts(self.v.shape[3]) == 1:
            return self
        given = self.h0, self.dht, self.dh0
        h0, dht, dh0 = (x if x is None or parts.splits(x) else fresh_like(x.mT).mT for x in given)
        for x, to in ((self.h0, h0), (self.dht, dht)):
            if x is not None and to is not None and to is not x:
                copy_states(self.for_copies, h, x, to)
        return self._replace(h0=h0, dht=dht, dh0=dh0)

    @property
    def for_copies(self) -> tuple[Tensor, ...]:
        """The `inputs` of `chains.copy_states`."""
        return self.k, self.v, self.g_cum, self.beta, self.A


class ChainStates(NamedTuple):
    """What chunk_grads reads: a batch, of whose value heads each has at most 128 columns of V, and
    the results of the chains for it.
    """

    batch: BackwardBatch  # its states and bounds are not used
    h: Tensor  # [capacity of the table, HV, V, K] the state that enters each chunk
    dS: Tensor  # the gradient of the state that leaves each chunk: as h, less the rows in `held`
    table: ChunkTable
    held: DsInDv | None


class ValueStates(NamedTuple):
    """What wide_grads reads: the results of chains that leave V' and Y."""

    h: Tensor  # [capacity of the table, HV, V, K] the state that enters each chunk
    vn: Tensor  # [capacity, HV, V / 64, 64, 64] V'
    dS: Tensor  # as h: the gradient of the state that leaves each chunk
    y: Tensor  # as vn: Y
    table: ChunkTable


def states_around(
    x: BackwardBatch,
    dv: Tensor,
    options: Options,
    cu_seqlens_cpu: Tensor | None,
    cp_cache: list[Tensor],
    known: bool = True,
) -> ChainStates | ValueStates | None:
    """Runs the chains over whole sequences or over segments; None where there is no chunk.

    Segments are those of the forward's cache, where that takes less time than whole sequences; if
    there is no cache, the plan decides, or the bands do. Writes x.dh0 if given.

    Args:
        dv: as in `chains`.
        cp_cache: the forward's cache; may be empty.
        known: False if the device alone knows the lengths of the sequences.
    """
    B, T, HV, V = dv.shape
    if not dv.numel() or len(x.bounds) == 1:  # no token, or none that a sequence owns
        pass_state_through(x.dht, x.dh0)
        return None
    x = x._replace(bounds=x.bounds.int())
    if x.k.shape[-1] == WIDE:  # sequences stay whole
        return value_chains(x, dv)
    bound = gdn_plan.gradient_bound(options.warm_log_bound)
    size, shape = (len(x.bounds) - 1, B * T), (HV, x.k.shape[-1], V, device.sm_count(dv.device))
    batch = BatchLengths(chunks_of(*size, cu_seqlens_cpu), size, known)
    kept = segments.of_cache(cp_cache)
    room = None if kept is None else kept[0].capacity
    plan = choices.backward(batch, shape, bound, options.auto_cp, room)
    tile_v = plan.kernel.tile_v
    if not plan.has_segments:
        return chains(x, dv, tile_v)
    own = x.g_cum, x.bounds, plan.segment_chunks
    cut, maps = kept or (segments.cut(*own, bands=plan.bands), None)
    return segmented_chains(x, dv, cut, maps, bound, tile_v)


def chains(x: BackwardBatch, dv: Tensor, tile_v: int | None = None) -> ChainStates | ValueStates:
    """Runs the two chains on two streams; returns their results. Writes x.dh0 if given.

    Args:
        x: the batch; its bounds are int32, of sequences or of segments.
        dv: [B, T, HV, V], the dV output of the backward. chunk_grads writes it, and it may hold a
            part of dS until then; for wide_grads it is written here, for tokens of sequences.
        tile_v: columns of V that a CTA computes; chosen from the shape if None. For wide_grads it
            is 64.
    """
    leaves = leaves_values(x.k.shape[-1], x.v.shape[-1])
    return value_chains(x, dv) if leaves else part_chains(x, dv, tile_v)


def value_chains(x: BackwardBatch, dv: Tensor) -> ValueStates:
    """Runs wide_dstate and wide_states; arguments are as for `chains`."""
    q, k, v, do, g_cum, beta, A, scale, bounds, h0, dht, dh0 = x
    table = chunk_table(q.shape[0] * q.shape[1], bounds)
    first = table.first_chunk
    h, dS = (k.new_empty(table.chunks.shape[0], *v.shape[2:], k.shape[-1]) for _ in range(2))
    vn, y = room_for_values(h), room_for_values(dS)  # device.fork says why all are made here
    with device.fork(q) as aside:  # the chain that takes longer is launched first
        wide_dstate(q, k, do, g_cum, beta, A, dht, scale, bounds, first, dS, y, dv, dh0)
        with aside:
            wide_states(k, v, g_cum, beta, A, h0, bounds, first, h, vn)
    return ValueStates(h, vn, dS, y, table)


def part_chains(x: BackwardBatch, dv: Tensor, tile_v: int | None = None) -> ChainStates:
    """Runs dstate_chain and chunk_states over the parts of the value heads, as `chains` says."""
    whole, table = x, chunk_table(x.q.shape[0] * x.q.shape[1], x.bounds)
    # device.fork says why here
    of_heads = x.k.new_empty(table.chunks.shape[0], *x.v.shape[2:], x.k.shape[-1])
    split = x.with_states_that_split(of_heads)
    x = split.in_parts()
    q, k, v, do, g_cum, beta, A, scale, bounds, h0, dht, dh0 = x
    dv, h = dv.view(v.shape), of_heads.view(-1, *v.shape[2:], k.shape[-1])
    first, held = table.first_chunk, ds_room_in_dv(dv, k.shape[-1], len(bounds) - 1)
    # The chains are independent and, with few sequences and heads, each leaves SMs idle.
    with device.fork(q) as aside:  # the chain that takes longer is launched first
        dS = dstate_chain(q, k, do, g_cum, beta, A, dht, scale, bounds, first, dh0, tile_v, held)
        with aside:
            chunk_states(k, v, g_cum, beta, A, h0, bounds, first, tile_v=tile_v, out=h)
    if whole.dh0 is not None and split.dh0 is not None and split.dh0 is not whole.dh0:
        copy_states(whole.for_copies, of_heads, split.dh0, whole.dh0)
    return ChainStates(x._replace(h0=None, dht=None, dh0=None), h, dS, table, held)


def segmented_chains(
    x: BackwardBatch,
    dv: Tensor,
    cut: Segments,
    kept: Maps | None,
    warm_log_bound: float,
    tile_v: int | None = None,
) -> ChainStates | ValueStates:
    """Returns the same states as `chains` over whole sequences, but runs the chains over segments.

    The chunks of segments are those of their sequences, in the same order. Writes x.dh0 if given.

    Args:
        cut: the segments.
        kept: the forward's maps, whose `left` holds start states; None computes both here.
    """
    q, k, v, do, g_cum, beta, A, scale, _, h0, dht, dh0 = x
    found = kept or segments.maps(k, v, g_cum, beta, A, h0, cut, warm_log_bound)
    starts = found.left.mT
    with device.fork(q) as aside:
        if kept is None:
            with aside:
                segments.start_states(found, h0, cut)  # written to found.left
        ends = segments.end_gradients(
            q, k, do, g_cum, beta, A, dht, scale, found, cut, warm_log_bound
        )
    before = None if dh0 is None else torch.empty_like(found.left).mT  # per segment
    del found  # frees M, which is as large as all that is computed from it
    pieces = x._replace(bounds=cut.bounds, h0=starts, dht=ends, dh0=before)
    done = chains(pieces, dv, tile_v)
    if dh0 is not None and before is not None:
        h = done.h.view(-1, *v.shape[2:], k.shape[-1])
        copy_states(x.for_copies, h, before, dh0, cut.first_segment)
    return done
