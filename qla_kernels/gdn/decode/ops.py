"""The torch.library operators of the token-by-token form, with their CPU implementations.

    gdn_recurrent         takes initial states and returns final states
    gdn_recurrent_slots   updates states of a pool in place, in the slots that indices name

CUDA tensors go to decode/launch.py, which is imported at an operator's first call with one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from qla_kernels.cpu import reference
from qla_kernels.direct import direct, imported_late
from qla_kernels.errors import Unsupported, need
from qla_kernels.gdn import contents
from qla_kernels.gdn.ops import LIBRARY, OPERATORS, state_dtype

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


# Strides are checked when a call is traced, so Inductor must not change them afterwards.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_PARTS: dict[str, tuple[Callable[..., Any], Callable[..., None], Callable[..., Any]]] = {
    "gdn_recurrent": (_recurrent_on_cpu, _check_gates, _fake_recurrent),
    "gdn_recurrent_slots": (_slots_on_cpu, _check_indices, _fake_slots),
}


def _implementations(op: str) -> Iterator[Callable[..., Any]]:
    """Yields an operator's function for CUDA tensors, then its function for CPU tensors."""
    on_cpu, check, _ = _PARTS[op]
    for run in (imported_late("qla_kernels.gdn.decode.launch", op), on_cpu):
        yield _checked(run, check)


for _op, (_, _, _fake) in _PARTS.items():
    LIBRARY.define(_op + SCHEMAS[_op], tags=_TAGS)
    for _device, _run in zip(("CUDA", "CPU"), _implementations(_op), strict=True):
        LIBRARY.impl(_op, _run, _device)
    torch.library.register_fake(f"qla_kernels::{_op}", _fake, lib=LIBRARY)
torch.library.register_autograd("qla_kernels::gdn_recurrent", _no_backward, lib=LIBRARY)


def _direct(op: str) -> Callable[..., Any]:
    return direct(getattr(OPERATORS, op).default, *_implementations(op))


# The operators as this package calls them where no gradients are recorded
gdn_recurrent = _direct("gdn_recurrent")
gdn_recurrent_slots = _direct("gdn_recurrent_slots")
