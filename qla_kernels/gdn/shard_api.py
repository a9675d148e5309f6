"""The public function on a rank's part of sequences: checked, agreed on by all ranks, then run.

A call that is wrong on one rank must not leave the others waiting for it: each rank tells the
others what is wrong with its own call, and all raise.
"""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.errors import Unsupported, need
from qla_kernels.gdn import contents, ops, shard_ops
from qla_kernels.gdn.autograd import L2Norm, ShardedGatedDeltaRule, apart
from qla_kernels.gdn.context_parallel import Shard, agree, layout_refused, shard_of
from qla_kernels.gdn.validate import (
    OP,
    Gate,
    check_activations,
    check_tensors,
    dtype_name,
    refusal,
    require,
    scale_of,
    wants_gradients,
)


def sharded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    cp_context: Any,
    gate: Gate,
    warm_log_bound: float,
    *,
    states: bool,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
) -> Tensor:
    """o. `states`: whether the caller gave or wants any."""
    if (reason := layout_refused(cp_context)) is not None:
        raise Unsupported(need(OP, *reason))
    shard = shard_of(OP, cp_context)
    bounds = cp_context.cu_seqlens, getattr(cp_context, "cu_seqlens_cpu", None)
    parameters = gate.parameters()
    is_train = wants_gradients((q, k, v, g, beta, *parameters))
    facts: dict[str, object] = {}
    problem = None
    try:
        _check_states(states)
        check_tensors(OP, q, k, v, g, beta, None, *bounds)
        check_activations(OP, v, gate, use_beta_sigmoid_in_kernel, allow_neg_eigval)
        require(refusal(q, k, v, cp_context=cp_context))
        _check_open_ends(shard, q.shape[1], len(bounds[0]))
        scale = scale_of(scale, q)
        if not torch.compiler.is_compiling():
            if contents.asked_for():
                contents.check_contents(OP, g, beta, *bounds)
            _check_part(q.shape[1], *bounds)
        facts = {
            "gradients": is_train,
            "heads and sizes": (q.shape[2], *v.shape[2:], q.shape[-1]),
            "dtype": dtype_name(q.dtype),
            "use_qk_l2norm_in_kernel": bool(use_qk_l2norm_in_kernel),
            "use_gate_in_kernel": bool(gate.use_gate_in_kernel),
            "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
            "allow_neg_eigval": allow_neg_eigval,
            "scale": scale,
            "warm_log_bound": warm_log_bound,
        }
    except ValueError as error:
        problem = error
    if not torch.compiler.is_compiling():
        agree(OP, shard, facts, problem, bounds[0].is_cuda)
    elif problem is not None:
        raise problem
    options = {
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "warm_log_bound": warm_log_bound,
        "group": shard.group.group_name,
        "before": shard.before,
        "after": shard.after,
    }
    if not is_train:
        if use_qk_l2norm_in_kernel:
            q, k = ops.l2norm_fwd(q), ops.l2norm_fwd(k)
        done = shard_ops.gdn_shard_fwd(
            q, k, v, g, beta, scale, *bounds, *parameters, is_train=False, **options
        )
        return shard_ops.Forward(*done).o
    if use_qk_l2norm_in_kernel:
        q, k = (L2Norm.apply(x, bounds[0]) for x in (q, k))  # type: ignore[no-untyped-call]
    o: Tensor = ShardedGatedDeltaRule.apply(  # type: ignore[no-untyped-call]
        *apart(q, k, v, g, beta, *parameters, *bounds), scale, options
    )
    return o


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
