"""`recomputed_rule`: convolution and gated delta rule, of which the backward runs the first again.

The rule's autograd.Function runs inside of `RecomputedRule`, on a stand-in for its ctx: what it
saves is saved by RecomputedRule, but for q, k and v.
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
    """The arguments of a convolution, checked, and the heads of its result."""

    x: Tensor  # [B, T, 2 H K + HV V]
    weight: Tensor
    bias: Tensor | None
    silu: bool
    norm: tuple[int, int]  # heads, and their size, whose L2 norm becomes 1; (0, 0): none
    sizes: tuple[int, int, int, int]  # H, K, HV, V
    tables: list[Tensor]

    def widths(self) -> tuple[int, int, int]:
        """Returns the channels of q, k and v."""
        H, K, HV, V = self.sizes
        return H * K, H * K, HV * V

    def heads(self, sections: Sequence[Tensor]) -> list[Tensor]:
        """Returns q, k and v [B, T, heads, size] of the sections of the result."""
        H, K, HV, V = self.sizes
        shapes = (H, K), (H, K), (HV, V)
        found = zip(sections, shapes, strict=True)
        return [x.view(*x.shape[:2], *shape) for x, shape in found]

    def run(self) -> list[Tensor]:
        """Returns q, k and v, without autograd."""
        inputs = self.x, self.weight, self.bias, self.tables
        y = ops.conv_fwd.replayed(*inputs, self.silu, *self.norm)
        return self.heads(torch.split(y, list(self.widths()), -1))

    def sections(self) -> list[Tensor]:
        """Returns q, k and v, with autograd."""
        found = convolve_sections(
            self.x, self.weight, self.bias, self.silu, self.tables, self.norm, self.widths()
        )
        return self.heads(found)


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
    """Returns o [B, T, HV, V] and the final state of a call that records gradients.

    The convolution has been checked; the other arguments are those of `gated_delta_net`.
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
    """What RecomputedRule needs besides tensors."""

    rule: Any  # GatedDeltaRule or GatedDeltaTree
    silu: bool
    norm: tuple[int, int]
    sizes: tuple[int, int, int, int]
    num_tables: int  # of the convolution

    def convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None, tables: Any) -> Any:
        return Convolution(x, weight, bias, self.silu, self.norm, self.sizes, list(tables))


class _Context:
    """Stands for the ctx of the rule's Function."""

    saved_tensors: tuple[Tensor | None, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """RecomputedRule sets it for its own ctx."""


class RecomputedRule(torch.autograd.Function):
    """Runs conv_fwd and a rule; conv_fwd again, the rule's backward and conv_bwd in the backward.

    The arguments are a _Plan, x, weight, bias and tables of the convolution, and those of the rule
    after q, k and v.
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
        tables, kept = others[: plan.num_tables], others[plan.num_tables :]
        convolution = plan.convolution(x, weight, bias, tables)
        inner = copy.copy(ctx.inner)
        inner.saved_tensors = (*convolution.run(), *kept)
        # of the plan, x, weight, bias and tables there are one more than of q, k and v
        inner.needs_input_grad = (True,) * 3 + ctx.needs_input_grad[4 + plan.num_tables :]
        dq, dk, dv, *rest = plan.rule.backward(inner, *incoming)
        dy, dy2, dy3 = (each.flatten(-2) for each in (dq, dk, dv))
        options = plan.silu, plan.norm[0], plan.norm[1]
        done = ops.conv_bwd.replayed(dy, x, weight, bias, tables, *options, dy2, dy3)
        return None, *done, *[None] * plan.num_tables, *rest
