"""The sharded operators on the GPU: as for a long sequence in segments, with one gather added.

The link of a stretch is folded from the maps of its segments. After the gather, the state that
enters a stretch is folded from other stretches' links, and is used in place of an initial state.
The backward does the same with gradients. The host does not wait for the GPU.

What a rank launches before a gather, and what it launches behind it, are replayed as a program
each. K = 256 has an order of its own, and no programs: wide.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.call import Call, Options, SavedForward
from qla_kernels.gdn.launch import activations, segments
from qla_kernels.gdn.launch.backward import flat_readable, gradients_of_chunks
from qla_kernels.gdn.launch.segments import Maps, Segments
from qla_kernels.gdn.launch.states import BackwardBatch, chains
from qla_kernels.gdn.launch.steps import (
    FlatBatch,
    Outputs,
    SavedChunks,
    Solved,
    chain_segments,
    cut_batch,
    map_segments,
    solve,
)
from qla_kernels.gdn.launch.tensors import plan_shape
from qla_kernels.gdn.launch.wide_backward import wide_grads
from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.gdn.plan import Plan
from qla_kernels.gdn.shapes import WIDE
from qla_kernels.gdn.sharded import links
from qla_kernels.gdn.sharded.exchange import Neighbours, exchanged, neighbours
from qla_kernels.gdn.sharded.gathered import lines, signatures
from qla_kernels.gdn.sharded.layouts import ShardPlace
from qla_kernels.gdn.sharded.ops import Arriving, ShardForward, facts_of
from qla_kernels.gdn.sharded.wide import wide_shard_forward, wide_shard_states
from qla_kernels.gdn.validate import OP
from qla_kernels.runtime import device
from qla_kernels.runtime.programs import Programs
from qla_kernels.runtime.sm90 import require_aligned

SHARD_FORWARDS, SHARD_BACKWARDS = (
    [Programs(f"{OP}, a rank's {way} {when} the gather") for when in ("before", "behind")]
    for way in ("forward", "backward")
)


class Sent(NamedTuple):
    """What a pass has made before its gather: a rank's links, and what it goes on from."""

    links: Tensor  # [HV, stretches, V + K + 1, K] of `links.made`
    # Of these, None stands for the caller's own tensor
    g: Tensor | None  # activated; None in a backward
    beta: Tensor | None
    do: Tensor | None  # as kernels read it; None in a forward
    # Of a forward that solves for A before its chain
    g_cum: Tensor | None
    A: Tensor | None
    left: Tensor | None  # of `segments.left_gradients`, in a backward
    bounds: Tensor  # from here on, the fields of Segments and Maps
    starts_of: Tensor
    ends_of: Tensor
    first_segment: Tensor
    heads: Tensor
    states: Tensor
    M: Tensor
    cold: Tensor

    def flat(self) -> tuple[Tensor | None, ...]:
        return self

    @property
    def cut(self) -> Segments:
        return Segments(*self[7:12])

    @property
    def maps(self) -> Maps:
        return Maps(*self[12:])


class Received(NamedTuple):
    """What a rank has after a gather."""

    links: Tensor  # [ranks, HV, stretches, V + K + 1, K]
    rank: int


@torch.no_grad()
def gdn_shard_fwd(call: Call, options: Options, shard: ShardPlace) -> ShardForward:
    q, k, v, *_ = call
    T, HV, V, K = *v.shape[1:], q.shape[-1]
    require_aligned(OP, q=q, k=k, v=v)
    if T and call.num_sequences and K != WIDE:
        before, behind = SHARD_FORWARDS
        sent = before.run(_send_states, (call, options, shard), Sent)
        received = Received(*exchanged(sent.links, shard.group))
        records = call, options, shard, sent, received
        done = behind.run(_receive_states, records, ShardForward)
        if options.is_train and sent.A is not None:  # no result of a program is its argument
            done = done._replace(g_cum=sent.g_cum, A=sent.A)
        return done
    with device.of(q):
        g, beta = _activated(call, options)
        o, saved, entered = q.new_empty(v.shape), SavedChunks.empty(q, g), None
        line = _line(call, options, shard, "forward")
        if T and call.num_sequences:
            x = FlatBatch(q, k, v, g, beta, None, _bounds(call))
            entered = wide_shard_forward(x, call.scale, o, saved, line)
        else:  # no sequence comes here
            line.entering([g.new_zeros(HV, V + K, K)] * len(line.stretches))
            for fresh in (o, *saved):
                fresh.zero_()
    g_cum, A = saved if options.is_train else (None, None)
    return ShardForward(o, entered, g_cum, A)


def _send_states(call: Call, options: Options, shard: ShardPlace) -> Sent:
    q, k, v, *_ = call
    with device.of(q):
        g, beta = _activated(call, options)
        its, facts = shard.stretches(call.num_sequences), facts_of("forward", call, options)
        x, plan = FlatBatch(q, k, v, g, beta, None, _bounds(call)), _plan(call, options)
        saved = None if plan.kernel.solves else SavedChunks.empty(q, g)
        cut, table = cut_batch(x, plan, links.open_ends(its))
        found = map_segments(x, plan, solve(x, call.scale, plan, saved, table, cut), cut)
        assert isinstance(found, Maps), "K = 256 has links of its own"
        carried = signatures(facts, its, reverse=False)
        made = links.made(found.left, found, cut, its, q.shape[-1], carried, reverse=False)
    own = g if g is not call.g else None, beta if beta is not call.beta else None, None
    g_cum, A = saved or (None, None)
    return Sent(made, *own, g_cum, A, None, *cut, *found)


def _receive_states(
    call: Call, options: Options, shard: ShardPlace, sent: Sent, received: Received
) -> ShardForward:
    q, k, v, g, beta, *_ = call
    with device.of(q):
        g, beta = (own if x is None else x for own, x in ((g, sent.g), (beta, sent.beta)))
        its, facts = shard.stretches(call.num_sequences), facts_of("forward", call, options)
        o, plan, saved = q.new_empty(v.shape), _plan(call, options), None
        if sent.g_cum is not None and sent.A is not None:
            saved = SavedChunks(sent.g_cum, sent.A)
        elif options.is_train:
            saved = SavedChunks.empty(q, g)
        found, cut, entered = sent.maps, sent.cut, None
        passed = lines(facts, its, received.rank, len(received.links), reverse=False)
        if any(passed):
            entered = links.enter(
                received.links, passed, found.left, cut, its, reverse=False, results=True
            )
        x, out = FlatBatch(q, k, v, g, beta, None, _bounds(call)), Outputs(o, None, saved)
        chain_segments(x, call.scale, plan, Solved(beta), out, cut, found)
    fresh = saved if options.is_train and sent.A is None else None
    return ShardForward(o, entered, *(fresh or (None, None)))


@torch.no_grad()
def gdn_shard_bwd(
    call: Call, saved: SavedForward, arriving: Arriving, options: Options, shard: ShardPlace
) -> GdnBackward:
    q, k, v, *_ = call
    T, HV, V, K = *v.shape[1:], q.shape[-1]
    require_aligned(OP, q=q, k=k, v=v)
    if T and call.num_sequences and K != WIDE:
        before, behind = SHARD_BACKWARDS
        sent = before.run(_send_gradients, (call, saved, arriving, options, shard), Sent)
        received = Received(*exchanged(sent.links, shard.group))
        records = call, saved, arriving, options, shard, sent, received
        return behind.run(_receive_gradients, records, GdnBackward)
    with device.of(q):
        grads, line = _room(call, saved), _line(call, options, shard, "backward")
        if T and call.num_sequences:
            batch = _batch(call, saved, arriving, options)
            wide_grads(batch, wide_shard_states(batch, grads[2], line, arriving.entered), grads)
        else:
            line.leaving([saved.g_cum.new_zeros(HV, V + K, K)] * len(line.stretches))
            for x in grads:
                x.zero_()
        return _gradients(call, options, grads)


def _send_gradients(
    call: Call, saved: SavedForward, arriving: Arriving, options: Options, shard: ShardPlace
) -> Sent:
    with device.of(call.q):
        its, facts = shard.stretches(call.num_sequences), facts_of("backward", call, options)
        x, bound = _batch(call, saved, arriving, options), _gradient_bound(options)
        q, k, v, do, g_cum, beta, A, scale, bounds, *_ = x
        most = gdn_plan.backward(*plan_shape(call), bound, mapped=True)
        assert most is not None, "a shard is always mapped"
        cut = segments.cut(g_cum, bounds, most, links.open_ends(its))
        found = segments.maps(k, v, g_cum, beta, A, None, cut, bound)
        with device.fork(q) as aside:
            with aside:
                links.enter_again(arriving.entered, found.left, cut, its)
                segments.start_states(found, None, cut)  # written to found.left
            left = segments.left_gradients(q, k, do, g_cum, beta, A, None, scale, cut, bound)
            carried = signatures(facts, its, reverse=True)
            made = links.made(left, found, cut, its, q.shape[-1], carried, reverse=True)
    own = None, beta if beta is not call.beta else None, do if do is not arriving.do else None
    return Sent(made, *own, None, None, left, *cut, *found)


def _receive_gradients(
    call: Call,
    saved: SavedForward,
    arriving: Arriving,
    options: Options,
    shard: ShardPlace,
    sent: Sent,
    received: Received,
) -> GdnBackward:
    q, k, v, _, beta, scale, *_ = call
    with device.of(q):
        its, facts = shard.stretches(call.num_sequences), facts_of("backward", call, options)
        found, cut, left, grads = sent.maps, sent.cut, sent.left, _room(call, saved)
        assert left is not None, "a backward's"
        passed = lines(facts, its, received.rank, len(received.links), reverse=True)
        links.enter(received.links, passed, left, cut, its, reverse=True)
        x = BackwardBatch(
            q, k, v, arriving.do if sent.do is None else sent.do, saved.g_cum,
            beta if sent.beta is None else sent.beta, saved.A, scale, cut.bounds,
            h0=found.left.mT, dht=segments.fold_gradients(left, None, found, cut),
        )  # fmt: skip
        gradients_of_chunks(x, chains(x, grads[2]), grads)
        return _gradients(call, options, grads)


def _activated(call: Call, options: Options) -> tuple[Tensor, Tensor]:
    return activations.activate(call.g, call.beta, call.A_log, call.dt_bias, options.beta_range)


def _plan(call: Call, options: Options) -> Plan:
    return gdn_plan.forward(*plan_shape(call), options.warm_log_bound, mapped=True)


def _gradient_bound(options: Options) -> float:
    return gdn_plan.gradient_bound(options.warm_log_bound)


def _batch(call: Call, saved: SavedForward, arriving: Arriving, options: Options) -> BackwardBatch:
    do = flat_readable(arriving.do.to(call.v.dtype))
    beta = activations.activate_beta(call.beta, options.beta_range)
    rows = call.q, call.k, call.v, do, saved.g_cum, beta, saved.A
    return BackwardBatch(*rows, call.scale, _bounds(call))


def _room(call: Call, saved: SavedForward) -> tuple[Tensor, ...]:
    """Returns uninitialised dq, dk, dv, dg and dbeta."""
    rows = call.q, call.k, call.v, saved.g_cum, saved.g_cum
    return tuple(x.new_empty(x.shape) for x in rows)


def _gradients(call: Call, options: Options, grads: tuple[Any, ...]) -> GdnBackward:
    """Returns the results, with the gradients of raw gates and betas."""
    dq, dk, dv, dg, dbeta = grads
    raw = call.raw_g, call.beta, call.A_log, call.dt_bias
    dg, dbeta, *parameters = activations.backward(
        *raw, dg, dbeta, options.beta_range, call.cu_seqlens
    )
    return GdnBackward(dq, dk, dv, dbeta, dg, None, *parameters)


def _line(call: Call, options: Options, shard: ShardPlace, step: str) -> Neighbours:
    return neighbours(shard, call.num_sequences, facts_of(step, call, options))


def _bounds(call: Call) -> Tensor:
    assert call.cu_seqlens is not None, "a shard has bounds"
    return call.cu_seqlens
