"""The public function on a rank's part of sequences: checked, agreed on by all ranks, then run.

A call that is wrong on one rank must not leave the others waiting for it: each rank tells the
others what is wrong with its own call, and all raise.
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
from qla_kernels.gdn.autograd import L2Norm, ShardedGatedDeltaRule, apart
from qla_kernels.gdn.keywords import scale_of
from qla_kernels.gdn.sharded import ops as shard_ops
from qla_kernels.gdn.sharded.context import (
    Shard,
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
    """A rank's call that is right by itself."""

    shard: Shard
    facts: dict[str, object]  # which have to be the same on all ranks
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
    """o.

    states: whether the caller gave or wants any.
    flags: warm_log_bound, and use_qk_l2norm_in_kernel and others that are by name in the operators.
    """
    normalise = flags["use_qk_l2norm_in_kernel"]
    try:
        call = _checked(q, k, v, g, beta, scale, cp_context, gate, states, flags)
    except Exception as problem:  # whatever it is, the other ranks are to hear of it
        tell(problem, cp_context, q)
        raise
    if not torch.compiler.is_compiling():
        with device.of(q):  # where torch exchanges objects, if it does so on a GPU
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
        return shard_ops.Forward(*done).o
    if normalise:
        q, k = (L2Norm.apply(x, bounds[0]) for x in (q, k))  # type: ignore[no-untyped-call]
    o: Tensor = ShardedGatedDeltaRule.apply(  # type: ignore[no-untyped-call]
        *apart(q, k, v, g, beta, *parameters, *bounds), call.scale, options
    )
    return o


def tell(problem: Exception, cp_context: Any, q: object) -> None:
    """Raises what is wrong with this rank's call on all ranks; on none under torch.compile."""
    if torch.compiler.is_compiling() or not dist.is_initialized():
        return
    group = group_of(OP, cp_context)
    if dist.get_rank(group) < 0:  # not one of them
        return
    nobody = Shard(group, group.rank(), group.size(), 0, 0, False)
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


def _check_open_ends(shard: Shard, num_tokens: int, num_bounds: int) -> None:
    if (shard.before or shard.after) and (num_tokens == 0 or num_bounds < 2):
        got = "no token on a rank that a sequence goes through"
        fix = "make cp_context with build_cp_context"
        raise ValueError(need(OP, got, "at least one", fix))


def _check_part(num_tokens: int, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> None:
    """Where the host knows the bounds: they are those of the tokens that are here."""
    known = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if not known.is_cpu:
        return
    if contents.check_bounds(OP, num_tokens, known) != num_tokens:
        got = f"{num_tokens} tokens, and cp_context says that {int(known[-1])} are here"
        fix = "pass each rank its part of q, k, v, g and beta"
        raise ValueError(need(OP, got, "this rank's tokens", fix))
