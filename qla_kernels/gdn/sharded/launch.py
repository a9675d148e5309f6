"""The sharded operators on the GPU: as for a long sequence in segments, with one gather added.

The link of a stretch is folded from the maps of its segments. After the gather, the state that
enters a stretch is folded from other stretches' links, and is used in place of an initial state.
The backward does the same with gradients. The host does not wait for the GPU.
"""

import torch
from torch import Tensor

from qla_kernels import device
from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.call import Call, Options, SavedForward
from qla_kernels.gdn.launch import activations, segments
from qla_kernels.gdn.launch.backward import flat_readable, gradients_of_chunks
from qla_kernels.gdn.launch.forward import FlatBatch, Outputs, SavedChunks, forward_batch
from qla_kernels.gdn.launch.segments import Maps, Segments
from qla_kernels.gdn.launch.states import BackwardBatch, segmented_chains
from qla_kernels.gdn.launch.tensors import plan_shape
from qla_kernels.gdn.launch.wide_backward import wide_grads
from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.gdn.shapes import WIDE
from qla_kernels.gdn.sharded import links
from qla_kernels.gdn.sharded.exchange import neighbours
from qla_kernels.gdn.sharded.ops import Arriving, ShardForward, ShardPlace, facts_of
from qla_kernels.gdn.sharded.wide import wide_shard_forward, wide_shard_states
from qla_kernels.gdn.validate import OP
from qla_kernels.sm90 import require_aligned


@torch.no_grad()
def gdn_shard_fwd(call: Call, options: Options, shard: ShardPlace) -> ShardForward:
    q, k, v, *_ = call
    bounds, (T, HV, V), K = _bounds(call), v.shape[1:], q.shape[-1]
    require_aligned(OP, q=q, k=k, v=v)
    with device.of(q):
        raw = call.g, call.beta, call.A_log, call.dt_bias
        g, beta = activations.activate(*raw, options.beta_range)
        o, saved, entered = q.new_empty(v.shape), None, None
        line = neighbours(shard, call.num_sequences, facts_of("forward", call, options))
        its = line.stretches
        if not T or not call.num_sequences:  # no sequence comes here
            line.entering([g.new_zeros(HV, V + K, K)] * len(its))
            saved = SavedChunks.empty(q, g)
            for fresh in (o, *saved):
                fresh.zero_()
        elif K == WIDE:
            saved, x = SavedChunks.empty(q, g), FlatBatch(q, k, v, g, beta, None, bounds)
            entered = wide_shard_forward(x, call.scale, o, saved, line)
        else:
            plan = gdn_plan.forward(*plan_shape(call), options.warm_log_bound, mapped=True)
            assert plan.segment_chunks is not None, "a shard is always mapped"
            if options.is_train or not plan.kernel.solves:
                saved = SavedChunks.empty(q, g)

            def exchange(found: Maps, cut: Segments) -> None:
                nonlocal entered
                entered = line.entering(links.of_states(found, cut, its, K))
                links.write_entering(found.left, entered, cut, its)

            x, out = FlatBatch(q, k, v, g, beta, None, bounds), Outputs(o, None, saved)
            ends = links.open_ends(its)
            forward_batch(x, call.scale, plan, out, open_ends=ends, exchange=exchange)
    g_cum, A = saved if options.is_train and saved is not None else (None, None)
    return ShardForward(o, entered, g_cum, A)


@torch.no_grad()
def gdn_shard_bwd(
    call: Call, saved: SavedForward, arriving: Arriving, options: Options, shard: ShardPlace
) -> GdnBackward:
    q, k, v, *_ = call
    bounds, (T, HV, V), K = _bounds(call), v.shape[1:], q.shape[-1]
    require_aligned(OP, q=q, k=k, v=v)
    with device.of(q):
        g_cum, A, _ = saved
        active = activations.activate_beta(call.beta, options.beta_range)
        grads = tuple(x.new_empty(x.shape) for x in (q, k, v, g_cum, g_cum))
        line = neighbours(shard, call.num_sequences, facts_of("backward", call, options))
        its, do = line.stretches, flat_readable(arriving.do.to(v.dtype))
        batch = BackwardBatch(q, k, v, do, g_cum, active, A, call.scale, bounds)
        if not T or not call.num_sequences:
            line.leaving([g_cum.new_zeros(HV, V + K, K)] * len(its))
            for x in grads:
                x.zero_()
        elif K == WIDE:
            wide_grads(batch, wide_shard_states(batch, grads[2], line, arriving.entered), grads)
        else:
            bound = gdn_plan.gradient_bound(options.warm_log_bound)
            most = gdn_plan.backward(*plan_shape(call), bound, mapped=True)
            assert most is not None, "a shard is always mapped"
            cut = segments.cut(g_cum, bounds, most, links.open_ends(its))

            def enter(left: Tensor) -> None:
                links.write_entering(left, arriving.entered, cut, its)

            def exchange(left: Tensor, found: Maps) -> None:
                leaving = line.leaving(links.of_gradients(left, found, cut, its, K))
                links.write_leaving(left, leaving, cut, its)

            states = segmented_chains(
                batch, grads[2], cut, None, bound, enter=enter, exchange=exchange
            )
            gradients_of_chunks(batch, states, grads)
        dq, dk, dv, dg, dbeta = grads
        raw = call.raw_g, call.beta, call.A_log, call.dt_bias
        dg, dbeta, *parameters = activations.backward(
            *raw, dg, dbeta, options.beta_range, call.cu_seqlens
        )
    return GdnBackward(dq, dk, dv, dbeta, dg, None, *parameters)


def _bounds(call: Call) -> Tensor:
    assert call.cu_seqlens is not None, "a shard has bounds"
    return call.cu_seqlens
