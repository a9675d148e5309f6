"""`recomputed_rule`: convolution and gated delta rule; the backward runs the convolution again.

q, k and v, the results of the convolution, are therefore not saved. `RecomputedRule` calls forward
and backward of the rule's own autograd.Function, with a stand-in for its ctx, and itself saves what
that function saves, apart from q, k and v.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.conv import ops
from qla_kernels.conv.autograd import convolve_sections
from qla_kernels.dualkv.plan import SharedLayout
from qla_kernels.gdn import contents
from qla_kernels.gdn.autograd import GatedDeltaRule
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.keywords import checked_flags, is_invariant, scale_of, warm_bound
from qla_kernels.gdn.tree.autograd import GatedDeltaTree
from qla_kernels.gdn.validate import Gate, check_activations, check_tensors, refusal
from qla_kernels.hybrid import delta_tables
from qla_kernels.runtime.arguments import flag
from qla_kernels.runtime.contents import checks_contents
from qla_kernels.runtime.derivatives import refuse_forward_mode, refuse_second_derivative
from qla_kernels.runtime.sm90 import require


class Convolution(NamedTuple):
    """The checked arguments of a convolution whose result is q, k and v."""

    x: Tensor  # [B, T, 2 H K + HV V]
    weight: Tensor
    bias: Tensor | None
    silu: bool
    norm: tuple[int, int]  # (heads, size): the first heads' L2 norms become 1; (0, 0) for none
    sizes: tuple[int, int, int, int]  # H, K, HV, V
    tables: list[Tensor]

    def widths(self) -> tuple[int, int, int]:
        """Returns the numbers of channels of q, k and v."""
        H, K, HV, V = self.sizes
        return H * K, H * K, HV * V

    def heads(self, sections: Sequence[Tensor]) -> list[Tensor]:
        """Splits channels into heads: returns q, k and v as [B, T, heads, size].

        `sections` are the same three as [B, T, channels].
        """
        H, K, HV, V = self.sizes
        shapes = (H, K), (H, K), (HV, V)
        pairs = zip(sections, shapes, strict=True)
        return [x.view(*x.shape[:2], *shape) for x, shape in pairs]

    def run(self) -> list[Tensor]:
        """Returns q, k and v, without autograd."""
        inputs = self.x, self.weight, self.bias, self.tables
        y = ops.conv_fwd.replayed(*inputs, self.silu, *self.norm)
        return self.heads(torch.split(y, list(self.widths()), -1))

    def sections(self) -> list[Tensor]:
        """Computes the convolution with autograd; returns q, k and v [B, T, heads, size]."""
        sections = convolve_sections(
            self.x, self.weight, self.bias, self.silu, self.tables, self.norm, self.widths()
        )
        return self.heads(sections)


def recomputed_rule(
    op: str,
    convolution: Convolution,
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    layout: SharedLayout | None,
    *,
    scale: float | None,
    output_final_state: bool,
    state_v_first: bool,
    allow_neg_eigval: bool,
    A_log: Tensor,
    dt_bias: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Runs a convolution and the gated delta rule, without saving q, k and v for the backward.

    Returns o [B, T, HV, V] and the final state. `op` is the function that errors name, and the
    other arguments are those of `gated_delta_net`.
    """
    widths = convolution.widths()
    q, _, v = convolution.heads(torch.split(convolution.x, list(widths), -1))  # of the same shapes
    gate = Gate(True, A_log, dt_bias)
    options = checked_flags(
        op,
        Options(
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            output_final_state=output_final_state,
            is_train=True,
            auto_cp=not is_invariant(op, None),
            warm_log_bound=warm_bound(op, None, None),
        ),
    )
    check_tensors(op, q, q, v, a, b, initial_state, cu_seqlens, cu_seqlens_cpu, state_v_first)
    check_activations(op, v, gate, options)
    require(refusal(q, q, v, op=op))
    call = Call(
        q, q, v, a, b, scale_of(op, scale, q), initial_state, cu_seqlens, cu_seqlens_cpu, A_log,
        dt_bias,
    )  # fmt: skip
    refuse_forward_mode(op, *call)
    if checks_contents():
        contents.check_contents(op, call)
    rule: Any = GatedDeltaRule
    tables: tuple[Tensor, ...] = ()
    if layout is not None:
        rule = GatedDeltaTree
        tables = delta_tables.prepare(layout, flag(op, "output_final_state", output_final_state))
    x, weight, bias, silu, norm, sizes, conv_tables = convolution
    plan = _Plan(rule, silu, norm, sizes, len(conv_tables))
    o, final = RecomputedRule.apply(  # type: ignore[no-untyped-call]
        plan, x, weight, bias, *conv_tables, *call[3:], *tables, options
    )
    return o, final


class _Plan(NamedTuple):
    """The arguments of RecomputedRule that are not tensors."""

    rule: Any  # GatedDeltaRule or GatedDeltaTree
    silu: bool
    norm: tuple[int, int]
    sizes: tuple[int, int, int, int]
    num_tables: int  # number of the convolution's tables

    def convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None, tables: Any) -> Any:
        return Convolution(x, weight, bias, self.silu, self.norm, self.sizes, list(tables))


class _Context:
    """Stands for the ctx of the rule's autograd.Function."""

    saved_tensors: tuple[Tensor | None, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Does nothing: RecomputedRule calls this method of its own ctx."""


class RecomputedRule(torch.autograd.Function):
    """Runs conv_fwd and the gated delta rule.

    The backward runs conv_fwd again, then the rule's backward, then conv_bwd. The arguments are a
    _Plan; x, weight, bias and the tables of the convolution; and the arguments of the rule after q,
    k and v.
    """

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *arguments: Any) -> Any:
        x, weight, bias, *others = arguments
        tables, rest = others[: plan.num_tables], others[plan.num_tables :]
        inner = _Context()
        results = plan.rule.forward(inner, *plan.convolution(x, weight, bias, tables).run(), *rest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, *tables, *inner.saved_tensors[3:])
        inner.saved_tensors = ()
        ctx.plan, ctx.inner = plan, inner
        return results

    @staticmethod
    @refuse_second_derivative("gated_delta_net")
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        x, weight, bias, *others = ctx.saved_tensors
        tables, saved_by_rule = others[: plan.num_tables], others[plan.num_tables :]
        convolution = plan.convolution(x, weight, bias, tables)
        inner = copy.copy(ctx.inner)
        inner.saved_tensors = (*convolution.run(), *saved_by_rule)
        # our arguments begin with plan, x, weight, bias and tables, the rule's with q, k and v
        inner.needs_input_grad = (True,) * 3 + ctx.needs_input_grad[4 + plan.num_tables :]
        dq, dk, dv, *rest = plan.rule.backward(inner, *incoming)
        dy, dy2, dy3 = (each.flatten(-2) for each in (dq, dk, dv))
        options = plan.silu, plan.norm[0], plan.norm[1]
        done = ops.conv_bwd.replayed(dy, x, weight, bias, tables, *options, dy2, dy3)
        return None, *done, *[None] * plan.num_tables, *rest
