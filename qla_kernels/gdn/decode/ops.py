"""The torch.library operators of the token-by-token form, with their CPU implementations.

    gdn_recurrent         takes initial states and returns final states
    gdn_recurrent_slots   updates states of a pool in place, in the slots that indices name

CUDA tensors go to decode/launch.py, which is imported at an operator's first call with one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qla_kernels.cpu import reference
from qla_kernels.errors import Unsupported, need
from qla_kernels.gdn import contents
from qla_kernels.gdn.ops import state_dtype
from qla_kernels.operators import define, imported_late, refuse_backward, skip_dispatcher

OP = "fused_recurrent_gated_delta_rule"

_TENSORS = """Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,
    Tensor? A_log, Tensor? dt_bias, float scale"""
_OPTIONS = """bool use_qk_l2norm_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval,
    bool state_v_first"""
SCHEMAS = {
    "gdn_recurrent": f"""(
        {_TENSORS}, Tensor? initial_state, Tensor? cu_seqlens, *,
        {_OPTIONS}, bool output_final_state
    ) -> (Tensor o, Tensor? final_state)""",
    "gdn_recurrent_slots": f"""(
        {_TENSORS}, Tensor(a!) states, Tensor state_indices, Tensor? cu_seqlens, *, {_OPTIONS}
    ) -> Tensor""",
}


@torch.no_grad()
def _recurrent_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    contents.check_bounds(OP, q.shape[1], cu_seqlens)
    gdn, wide = reference().gdn, state_dtype(q)
    q, k = q.to(wide), k.to(wide)  # a norm is not rounded
    if use_qk_l2norm_in_kernel:
        q, k = gdn.l2norm(q), gdn.l2norm(k)
    if A_log is not None:
        g = gdn.gate(g, A_log, dt_bias)
    if use_beta_sigmoid_in_kernel:
        beta = gdn.beta_sigmoid(beta, allow_neg_eigval)
    h0 = initial_state.mT if state_v_first and initial_state is not None else initial_state
    with torch.autocast("cpu", enabled=False):
        o, final = gdn.recurrent(q, k, v, g, beta, scale, h0, cu_seqlens)
    if state_v_first:
        final = final.mT.contiguous()
    return o.to(v.dtype), final if output_final_state else None


@torch.no_grad()
def _slots_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    scale: float,
    states: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor | None,
    **options: bool,
) -> Tensor:
    _check_indices(q, states, state_indices, cu_seqlens)
    live = state_indices >= 0
    slots = state_indices[live].long()
    h0 = states.new_zeros(live.shape[0], *states.shape[1:])
    h0[live] = states[slots]
    o, final = _recurrent_on_cpu(
        q, k, v, g, beta, A_log, dt_bias, scale, h0, cu_seqlens,
        **options, output_final_state=True,
    )  # fmt: skip
    assert final is not None, "it was asked for"
    states[slots] = final[live].to(states.dtype)
    if cu_seqlens is None:
        o[~live] = 0
    else:
        owner = torch.repeat_interleave(cu_seqlens.diff())
        o[0, : owner.shape[0]][~live[owner]] = 0
    return o


def _fake_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *args: Any,
    state_v_first: bool,
    output_final_state: bool,
    **_: bool,
) -> tuple[Tensor, Tensor | None]:
    cu_seqlens, K, (HV, V) = args[-1], q.shape[-1], v.shape[2:]
    num_seqs = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    size = (V, K) if state_v_first else (K, V)
    final = q.new_empty(num_seqs, HV, *size, dtype=state_dtype(q)) if output_final_state else None
    return v.new_empty(v.shape), final


def _fake_slots(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: bool) -> Tensor:
    return v.new_empty(v.shape)


def _check_gates(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *args: Any) -> None:
    contents.check_contents(OP, g, beta, args[-1])


def _check_indices(q: Tensor, *args: Any) -> None:
    """Raises ValueError if cu_seqlens is wrong, or an index is used twice or is past the pool.

    Gates are not checked, because tokens of a sequence with a negative index may hold anything.
    """
    states, state_indices, cu_seqlens = args[-3:]
    contents.check_bounds(OP, q.shape[1], cu_seqlens)
    used = [i for i in state_indices.tolist() if i >= 0]
    if len(set(used)) < len(used) or max(used, default=-1) >= states.shape[0]:
        needs = f"different ones below {states.shape[0]}, or negative"
        fix = "give each sequence a slot of its own"
        raise ValueError(need(OP, f"state_indices {state_indices.tolist()}", needs, fix))


def _checked(run: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    def checked(*args: Any, **options: bool) -> Any:
        if contents.asked_for():
            check(*args)
        return run(*args, **options)

    return checked


def _no_backward(ctx: Any, *grads: Tensor | None) -> None:
    needs = "a forward alone: it is for inference"
    raise Unsupported(need(OP, "a backward pass", needs, "train with chunk_gated_delta_rule"))


def _defined(
    op: str, on_cpu: Callable[..., Any], check: Callable[..., None], fake: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The operator, and the function that skips the dispatcher."""
    on_cuda = _checked(imported_late("qla_kernels.gdn.decode.launch", op), check)
    on_cpu = _checked(on_cpu, check)
    operator = define(op, SCHEMAS[op], fake, CUDA=on_cuda, CPU=on_cpu)
    return operator, skip_dispatcher(operator, on_cuda, on_cpu)


recorded_gdn_recurrent, gdn_recurrent = _defined(
    "gdn_recurrent", _recurrent_on_cpu, _check_gates, _fake_recurrent
)
_, gdn_recurrent_slots = _defined("gdn_recurrent_slots", _slots_on_cpu, _check_indices, _fake_slots)
refuse_backward("gdn_recurrent", _no_backward)
