"""The operators as differentiable steps: one torch.autograd.Function for each pair of operators.

Autocast changes nothing here: it has no rule for these operators, and they call no operator that
it casts. A backward is not differentiable; asking for a second derivative raises Unsupported.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn import ops
from qla_kernels.gdn.call import Call, Incoming, Options, SavedForward
from qla_kernels.gdn.sharded import ops as shard_ops
from qla_kernels.gdn.sharded.layouts import ShardPlace
from qla_kernels.gdn.sharded.ops import Arriving
from qla_kernels.gdn.validate import OP
from qla_kernels.runtime.derivatives import refuse_second_derivative
from qla_kernels.runtime.programs import Programs

DH0 = Call._fields.index("initial_state")

# The fields of their records in which T may be open
_FORWARD = *Call._fields, *Options._fields
_BACKWARD = *Call._fields, *SavedForward._fields, *Incoming._fields
_TOKENS = "q", "k", "v", "g", "beta", "g_cum", "A", "do"

FORWARDS, BACKWARDS = (
    Programs(f"{OP}, {way}", tokens=[i for i, name in enumerate(fields) if name in _TOKENS])
    for way, fields in (("forward", _FORWARD), ("backward", _BACKWARD))
)
NORMS = Programs(f"{OP}, norm", tokens=[0])
NORM_GRADIENTS = Programs(f"{OP}, gradient of a norm", tokens=[0, 1])


class One(NamedTuple):
    """The tensor that l2norm_fwd takes, and the result of either norm's operator."""

    x: Tensor

    def flat(self) -> tuple[Tensor | None, ...]:
        return self


class NormGradient(NamedTuple):
    """The arguments of l2norm_bwd."""

    x: Tensor
    dy: Tensor
    cu_seqlens: Tensor | None


def apply(call: Call, options: Options) -> tuple[Tensor, Tensor | None]:
    """Returns o and the final state, or None, with derivatives in all tensors of the call."""
    done = GatedDeltaRule.apply(*without_aliases(call), options)  # type: ignore[no-untyped-call]
    o, final_state = done
    return o, final_state


def apply_sharded(call: Call, options: Options, shard: ShardPlace) -> Tensor:
    """Returns o of this rank's tokens, with derivatives in all tensors of the call."""
    o: Tensor = ShardedGatedDeltaRule.apply(  # type: ignore[no-untyped-call]
        *without_aliases(call), options, shard
    )
    return o


def normalised(call: Call, recorded: bool) -> Call:
    """Returns the call with q and k divided by their norms, with derivatives if `recorded`."""

    def norm(x: Tensor) -> Tensor:
        y: Tensor = (
            L2Norm.apply(x, call.cu_seqlens)  # type: ignore[no-untyped-call]
            if recorded
            else ops.l2norm_fwd(x)
        )
        return y

    return call._replace(q=norm(call.q), k=norm(call.k))


def without_aliases(call: Call) -> Call:
    """Returns the call, with a view in place of each repeated tensor while torch.compile traces.

    Dynamo does not pass the same variable to an autograd.Function twice.
    """
    if not torch.compiler.is_compiling():
        return call
    distinct: list[Any] = []
    for x in call:
        if isinstance(x, Tensor) and any(x is y for y in distinct):
            x = x.view_as(x)
        distinct.append(x)
    return Call(*distinct)


def save(ctx: Any, call: Call, *results: Tensor | None) -> None:
    """Saves a call for the backward, and results of the forward, g_cum first."""
    ctx.scale, ctx.g_dtype = call.scale, call.g.dtype
    q, k, v, _, beta, _, *others = call
    ctx.save_for_backward(q, k, v, call.raw_g, beta, *others, *results)


def restored(ctx: Any) -> tuple[Call, list[Any]]:
    """Returns the call and the results that `save` kept; g is g_cum if the gate was not raw."""
    size = len(Call._fields) - 1  # all but scale
    kept = ctx.saved_tensors  # unpacked once: that may run the forward again
    (q, k, v, g, beta, *others), results = kept[:size], list(kept[size:])
    return Call(q, k, v, results[0] if g is None else g, beta, ctx.scale, *others), results


def gradients(ctx: Any, call: Call, done: ops.GdnBackward) -> list[Tensor | None]:
    """Returns the gradients of the call's fields, in their order; dg and dh0 in their dtypes."""
    dh0 = done.dh0
    if dh0 is not None and call.initial_state is not None:
        dh0 = dh0.to(call.initial_state.dtype)
    by_name = {
        "q": done.dq,
        "k": done.dk,
        "v": done.dv,
        "g": done.dg.to(ctx.g_dtype),
        "beta": done.dbeta,
        "initial_state": dh0,
        "A_log": done.dA_log,
        "dt_bias": done.ddt_bias,
    }
    return [by_name.get(name) for name in Call._fields]


class GatedDeltaRule(torch.autograd.Function):
    """Applies gdn_fwd, with gdn_bwd as its derivative, to the fields of a Call and to Options.

    Saves the inputs, which are usually alive anyway, and g_cum and A: 4 + 64 * 2 bytes per token
    and value head. Where segments are kept (`choices.py`) it also saves 4 K (K + V) bytes per
    segment and value head. While it runs, the backward needs 4 K V bytes per chunk and value head,
    or 3 K V where K = 128 and V is a multiple of 128.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        *fields, options = arguments
        call = Call(*fields)
        done = FORWARDS.run(ops.gdn_fwd, (call, options), ops.GdnForward.of_flat)
        ctx.set_materialize_grads(False)  # an unused final state costs no tensor of zeros
        ctx.options = options
        save(ctx, call, done.g_cum, done.A, *done.cp_cache)
        return done.o, done.final_state

    @staticmethod
    @refuse_second_derivative(OP)
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
        call, (g_cum, A, *cp_cache) = restored(ctx)
        if do is None:  # only the final state was used
            do = call.v.new_zeros(()).expand(call.v.shape)
        incoming = Incoming(do, dht, ctx.needs_input_grad[DH0])  # dh0 is as large as all states
        records = call, SavedForward(g_cum, A, cp_cache), incoming, ctx.options
        done = BACKWARDS.run(ops.gdn_bwd, records, ops.GdnBackward)
        return *gradients(ctx, call, done), None


class ShardedGatedDeltaRule(torch.autograd.Function):
    """Applies gdn_shard_fwd, with gdn_shard_bwd as its derivative; takes a ShardPlace as well.

    Saves the inputs, g_cum, A and the states [stretches, HV, V, K] that enter stretches of this
    rank. Gradients of A_log and dt_bias are sums over this rank's tokens.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *fields, options, shard = arguments
        call = Call(*fields)
        done = shard_ops.gdn_shard_fwd(call, options, shard)
        ctx.options, ctx.shard = options, shard
        save(ctx, call, done.g_cum, done.A, done.entered)
        o: Tensor = done.o
        return o

    @staticmethod
    @refuse_second_derivative(OP)
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        call, (g_cum, A, entered) = restored(ctx)
        done = shard_ops.gdn_shard_bwd(
            call, SavedForward(g_cum, A, []), Arriving(do, entered), ctx.options, ctx.shard
        )
        return *gradients(ctx, call, done), None, None


class L2Norm(torch.autograd.Function):
    """Applies l2norm_fwd, with l2norm_bwd as its derivative.

    Saves x and not its norm: x is often a slice of a projection that is alive anyway.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, cu_seqlens)
        return NORMS.run(lambda of: One(ops.l2norm_fwd(*of)), (One(x),), One).x

    @staticmethod
    @refuse_second_derivative(OP)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        x, cu_seqlens = ctx.saved_tensors
        given = NormGradient(x, dy, cu_seqlens)
        done = NORM_GRADIENTS.run(lambda of: One(ops.l2norm_bwd(*of)), (given,), One)
        return done.x, None
