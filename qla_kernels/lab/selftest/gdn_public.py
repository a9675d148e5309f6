"""Checks chunk_gated_delta_rule and its gradients against the token recurrence and autograd."""

import torch

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn.validate import refusal
from qla_kernels.lab.selftest.cases import Result, checked
from qla_kernels.lab.selftest.compare import assert_close
from qla_kernels.lab.selftest.gdn_calls import call, definition, gradients, leaves

LIMITS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 2e-2)}  # of values, of gradients


def run(where: str, dtype: torch.dtype, sizes: tuple[int, int] = (128, 128)) -> Result:
    """Checks a call of two sequences on the device `where`, with sizes = (K, V)."""
    K, V = sizes
    name = f"chunk_gated_delta_rule on {where}, {str(dtype).removeprefix('torch.')}, K={K}, V={V}"
    q, v = (torch.empty(1, 1, 2, size, dtype=dtype, device=where) for size in sizes)
    if reason := refusal(q, q, v):
        return Result(name, None, f"refused, {reason}")
    return checked(name, _check, where, dtype, sizes)


def _check(where: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    x = call([65, 1], sizes=sizes, dtype=dtype, gates=torch.float32)
    given, exact = (
        leaves(
            {n: t.to(where, wide) if t.is_floating_point() else t.to(where) for n, t in x.items()}
        )
        for where, wide in ((where, None), ("cpu", torch.float64))
    )
    got = chunk_gated_delta_rule(**given, output_final_state=True)
    want = definition(exact)
    forward, backward = LIMITS[dtype]
    for name, a, b in zip(("o", "final state"), got, want, strict=True):
        assert a is not None, name
        assert_close(name, a.detach().cpu(), b.detach(), forward)
    got_gradients = gradients(got, given)
    for name, b in gradients(want, exact).items():
        assert_close(f"d{name}", got_gradients[name].cpu(), b, backward)
