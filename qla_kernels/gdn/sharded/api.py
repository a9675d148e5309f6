"""The public function with a cp_context: checks a call, compares it with other ranks', and runs it.

A rank whose call is wrong must not leave the other ranks waiting. It sends its error to them before
it raises, and every rank of the group raises.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qla_kernels import device
from qla_kernels.derivatives import refuse_forward_mode
from qla_kernels.errors import Unsupported, need
from qla_kernels.gdn import contents, ops
from qla_kernels.gdn.autograd import L2Norm, ShardedGatedDeltaRule, without_aliases
from qla_kernels.gdn.keywords import scale_of
from qla_kernels.gdn.sharded import ops as shard_ops
from qla_kernels.gdn.sharded.context import (
    LinePlace,
    agree,
    group_of,
    layout_refused,
    shard_of,
)
from qla_kernels.gdn.validate import (
    OP,
    Gate,
    check_activations,
    check_tensors,
    refusal,
    wants_gradients,
)
from qla_kernels.sm90 import dtype_name, require


class Call(NamedTuple):
    """A rank's call after its own checks; it is not yet compared with other ranks'."""

    shard: LinePlace
    facts: dict[str, object]  # these must be the same on all ranks
    bounds: tuple[Tensor, Tensor | None]
    scale: float
    is_train: bool


def sharded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    cp_context: Any,
    gate: Gate,
    states: bool,
    flags: dict[str, Any],
) -> Tensor:
    """Checks a call with a cp_context, compares it with other ranks', runs it and returns o.

    Args:
        states: the caller passed an initial state or wants the final one, which is refused.
        flags: warm_log_bound, use_qk_l2norm_in_kernel and the other keywords of the operators.

    Raises:
        ValueError: the arguments on this rank or another one are wrong, or differ between ranks.
        Unsupported: this version cannot run the call.
        ShardError: ranks could not exchange data.
    """
    normalise = flags["use_qk_l2norm_in_kernel"]
    try:
        call = _checked(q, k, v, g, beta, scale, cp_context, gate, states, flags)
    except Exception as problem:  # every kind of error is sent to the other ranks
        tell(problem, cp_context, q)
        raise
    if not torch.compiler.is_compiling():
        with device.of(q):  # torch may exchange objects on the current GPU
            agree(OP, call.shard, call.facts, None, q.is_cuda)
    parameters, bounds, (shard, *_) = gate.parameters(), call.bounds, call
    options = {
        **flags,
        "group": shard.group.group_name,
        "before": shard.before,
        "after": shard.after,
    }
    if not call.is_train:
        if normalise:
            q, k = ops.l2norm_fwd(q), ops.l2norm_fwd(k)
        done = shard_ops.gdn_shard_fwd(
            q, k, v, g, beta, call.scale, *bounds, *parameters, is_train=False, **options
        )
        return shard_ops.ShardForward(*done).o
    if normalise:
        q, k = (L2Norm.apply(x, bounds[0]) for x in (q, k))  # type: ignore[no-untyped-call]
    o: Tensor = ShardedGatedDeltaRule.apply(  # type: ignore[no-untyped-call]
        *without_aliases(q, k, v, g, beta, *parameters, *bounds), call.scale, options
    )
    return o


def tell(problem: Exception, cp_context: Any, q: object) -> None:
    """Sends this rank's error to the ranks of its group, and raises it here and on the other ranks.

    Does nothing, and leaves raising to the caller, while torch.compile traces, without an
    initialised process group, and on a rank outside the group.
    """
    if torch.compiler.is_compiling() or not dist.is_initialized():
        return
    group = group_of(OP, cp_context)
    if dist.get_rank(group) < 0:  # not one of them
        return
    nobody = LinePlace(group, group.rank(), group.size(), 0, 0, False)
    with device.of(q) if isinstance(q, Tensor) else nullcontext():
        agree(OP, nobody, {}, problem, False)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    cp_context: Any,
    gate: Gate,
    states: bool,
    flags: dict[str, Any],
) -> Call:
    if (reason := layout_refused(cp_context)) is not None:
        raise Unsupported(need(OP, *reason))
    shard = shard_of(OP, cp_context)
    bounds = cp_context.cu_seqlens, getattr(cp_context, "cu_seqlens_cpu", None)
    inputs = (q, k, v, g, beta, *gate.parameters())
    _check_states(states)
    check_tensors(OP, q, k, v, g, beta, None, *bounds)
    check_activations(OP, v, gate, flags["use_beta_sigmoid_in_kernel"], flags["allow_neg_eigval"])
    require(refusal(q, k, v, cp_context=cp_context))
    refuse_forward_mode(OP, *inputs)
    is_train = wants_gradients(inputs)
    _check_open_ends(shard, q.shape[1], len(bounds[0]))
    scale = scale_of(OP, scale, q)
    if not torch.compiler.is_compiling():
        if contents.asked_for():
            contents.check_contents(OP, g, beta, *bounds)
        _check_part(q.shape[1], *bounds)
    facts = {
        "gradients": is_train,
        "heads and sizes": (q.shape[2], *v.shape[2:], q.shape[-1]),
        "dtype": dtype_name(q.dtype),
        "use_gate_in_kernel": gate.use_gate_in_kernel,
        "scale": scale,
        **flags,
    }
    return Call(shard, facts, bounds, scale, is_train)


def _check_states(states: bool) -> None:
    if states:
        got = "initial_state or output_final_state with cp_context"
        needs = "neither: a sequence's ends may be on other ranks"
        raise ValueError(need(OP, got, needs, "drop it, or gather the sequence on one rank"))


def _check_open_ends(shard: LinePlace, num_tokens: int, num_bounds: int) -> None:
    if (shard.before or shard.after) and (num_tokens == 0 or num_bounds < 2):
        got = "no token on a rank that a sequence goes through"
        fix = "make cp_context with build_cp_context"
        raise ValueError(need(OP, got, "at least one", fix))


def _check_part(num_tokens: int, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> None:
    """Raises ValueError if the context's bounds do not fit the number of tokens on this rank.

    Bounds that are only on a GPU are not checked.
    """
    known = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if not known.is_cpu:
        return
    if contents.check_bounds(OP, num_tokens, known) != num_tokens:
        got = f"{num_tokens} tokens, and cp_context says that {int(known[-1])} are here"
        fix = "pass each rank its part of q, k, v, g and beta"
        raise ValueError(need(OP, got, "this rank's tokens", fix))
