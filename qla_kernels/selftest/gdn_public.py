"""Cases of chunk_gated_delta_rule and its gradients, against the token recurrence and autograd."""

import torch

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.cpu import reference
from qla_kernels.gdn.validate import refusal
from qla_kernels.selftest.cases import Result, error_of, inputs, label

LIMITS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 2e-2)}  # of values, of gradients


def run(where: str, dtype: torch.dtype) -> list[Result]:
    x = inputs()
    name = label(f"chunk_gated_delta_rule on {where},", dtype)
    given = [*x.tensors(dtype, where), x.initial_state.to(where, torch.float32)]
    exact = [*x.tensors(torch.float64), x.initial_state]
    if reason := refusal(*given[:3]):
        return [Result(name, None, 0, f"refused, {reason}")]
    given, exact = ([t.clone().requires_grad_() for t in each] for each in (given, exact))
    q, k, v, g, beta, h0 = given
    o, state = chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=h0,
        output_final_state=True,
        cu_seqlens=x.cu_seqlens.to(where),
    )
    assert state is not None, "it was asked for"
    q, k, v, g, beta, h0 = exact
    want = reference().gdn.recurrent(q, k, v, g, beta, initial_state=h0, cu_seqlens=x.cu_seqlens)
    do, dht = x.v, x.initial_state  # any values will do
    gradients = torch.autograd.grad((o, state), given, (do.to(o), dht.to(state)))
    want_gradients = torch.autograd.grad(want, exact, (do, dht))
    forward, backward = (
        max(error_of(a.detach(), b.detach()) for a, b in zip(*pair, strict=True))
        for pair in (((o, state), want), (gradients, want_gradients))
    )
    return [
        Result(f"{name}, forward", forward, LIMITS[dtype][0]),
        Result(f"{name}, backward", backward, LIMITS[dtype][1]),
    ]
