"""The operators as differentiable steps: one torch.autograd.Function for each pair of operators.

Autocast changes nothing here: it has no rule for these operators, and they call no operator that
it casts. A backward is not differentiable; asking for a second derivative raises Unsupported.
"""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.derivatives import refuse_second_derivative
from qla_kernels.gdn import ops
from qla_kernels.gdn.ops import GdnBackward, GdnForward
from qla_kernels.gdn.sharded import ops as shard_ops
from qla_kernels.gdn.validate import OP


def without_aliases(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the tensors, with a view in place of each repeated one while torch.compile traces.

    Dynamo does not pass the same variable to an autograd.Function twice.
    """
    if not torch.compiler.is_compiling():
        return tensors
    found: list[Tensor | None] = []
    for x in tensors:
        if x is not None and any(x is y for y in found):
            x = x.view_as(x)
        found.append(x)
    return tuple(found)


class GatedDeltaRule(torch.autograd.Function):
    """Applies gdn_fwd, with gdn_bwd as its derivative.

    Saves the inputs, which are usually alive anyway, and g_cum and A: 4 + 64 * 2 bytes per token
    and value head. With enable_fwd_cp_cache it also saves 4 K (K + V) bytes per segment and value
    head. While it runs, the backward needs 4 K V bytes per chunk and value head, or 3 K V where
    K = V = 128.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        cu_seqlens_cpu: Tensor | None,
        scale: float,
        use_beta_sigmoid_in_kernel: bool,
        allow_neg_eigval: bool,
        state_v_first: bool,
        output_final_state: bool,
        warm_log_bound: float,
        enable_fwd_cp_cache: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.scale = scale
        ctx.flags = {
            "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
            "allow_neg_eigval": allow_neg_eigval,
            "state_v_first": state_v_first,
            "auto_cp": True,
            "warm_log_bound": warm_log_bound,
        }
        done = GdnForward(
            *ops.gdn_fwd(
                q,
                k,
                v,
                g,
                beta,
                scale,
                initial_state,
                cu_seqlens,
                cu_seqlens_cpu,
                A_log,
                dt_bias,
                output_final_state=output_final_state,
                output_h=False,
                is_train=True,
                enable_fwd_cp_cache=enable_fwd_cp_cache,
                **ctx.flags,
            )
        )
        ctx.set_materialize_grads(False)  # an unused final state costs no tensor of zeros
        raw_g = g if A_log is not None else None
        ctx.g_dtype = g.dtype
        bounds = cu_seqlens, cu_seqlens_cpu
        ctx.save_for_backward(
            q, k, v, raw_g, beta, A_log, dt_bias, initial_state, *bounds, done.g_cum, done.A,
            *done.cp_cache,
        )  # fmt: skip
        return done.o, done.final_state

    @staticmethod
    @refuse_second_derivative(OP)
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, A_log, dt_bias, h0, cu_seqlens, cu_seqlens_cpu, g_cum, A, *cp_cache = (
            ctx.saved_tensors
        )
        if do is None:  # only the final state was used
            do = v.new_zeros(()).expand(v.shape)
        grads = GdnBackward(
            *ops.gdn_bwd(
                q,
                k,
                v,
                g_cum,
                beta,
                A,
                do,
                dht,
                ctx.scale,
                h0,
                cu_seqlens,
                cu_seqlens_cpu,
                g,
                A_log,
                dt_bias,
                cp_cache=cp_cache,
                output_dh0=ctx.needs_input_grad[7],  # of initial_state: as large as all states
                **ctx.flags,
            )
        )
        dg = grads.dg.to(ctx.g_dtype)
        dh0 = None if grads.dh0 is None else grads.dh0.to(h0.dtype)
        tensors = (grads.dq, grads.dk, grads.dv, dg, grads.dbeta, grads.dA_log, grads.ddt_bias, dh0)
        return *tensors, *[None] * 9


class ShardedGatedDeltaRule(torch.autograd.Function):
    """Applies gdn_shard_fwd, with gdn_shard_bwd as its derivative.

    Saves the inputs, g_cum, A and the state [HV, V, K] that enters this rank's first sequence.
    Gradients of A_log and dt_bias are sums over this rank's tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        cu_seqlens: Tensor,
        cu_seqlens_cpu: Tensor | None,
        scale: float,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.scale, ctx.options, ctx.g_dtype = scale, options, g.dtype
        bounds, parameters = (cu_seqlens, cu_seqlens_cpu), (A_log, dt_bias)
        done = shard_ops.ShardForward(
            *shard_ops.gdn_shard_fwd(
                q, k, v, g, beta, scale, *bounds, *parameters, is_train=True, **options
            )
        )
        raw_g = g if A_log is not None else None
        ctx.save_for_backward(
            q, k, v, raw_g, beta, *parameters, *bounds, done.entered, done.g_cum, done.A
        )
        return done.o

    @staticmethod
    @refuse_second_derivative(OP)
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, A_log, dt_bias, *bounds, entered, g_cum, A = ctx.saved_tensors
        dq, dk, dv, dbeta, dg, dA_log, ddt_bias = shard_ops.gdn_shard_bwd(
            q, k, v, g_cum, beta, A, do, ctx.scale, *bounds, entered, g, A_log, dt_bias,
            **ctx.options,
        )  # fmt: skip
        return dq, dk, dv, dg.to(ctx.g_dtype), dbeta, dA_log, ddt_bias, *[None] * 4


class L2Norm(torch.autograd.Function):
    """Applies l2norm_fwd, with l2norm_bwd as its derivative.

    Saves x and not its norm: x is often a slice of a projection that is alive anyway.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, cu_seqlens)
        y: Tensor = ops.l2norm_fwd(x)
        return y

    @staticmethod
    @refuse_second_derivative(OP)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        x, cu_seqlens = ctx.saved_tensors
        return ops.l2norm_bwd(x, dy, cu_seqlens), None
