"""Raw gates and betas on a GPU: their kernels alone, and what a training step launches for them."""

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.lab.selftest.gdn_activations import (
    MIXES,
    gradients,
    raw,
)
from tests.gdn_calls import Call, on_gpu

pytestmark = pytest.mark.hopper

GPU = "cuda"


def test_repeats_bitwise():
    x = raw((1, 30_000, 32), MIXES[0], GPU, True)
    dg, dbeta = torch.randn(2, 1, 30_000, 32, device=GPU)
    want = gradients(x, dg, dbeta, 1.0)
    for _ in range(200):
        got = gradients(x, dg, dbeta, 1.0)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def launched(x: Call) -> list[str]:
    """The names of what a training step runs on the GPU."""
    torch.use_deterministic_algorithms(False)  # which fill fresh memory, by launches of their own
    of = [t.requires_grad_() for t in x.values() if torch.is_tensor(t) and t.is_floating_point()]

    def step() -> None:
        o, _ = chunk_gated_delta_rule(**x, use_qk_l2norm_in_kernel=True)
        torch.autograd.grad(o, of, x["v"].detach())

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as ran:
        step()
        torch.cuda.synchronize()
    return [event.name for event in ran.events() if event.device_type == DeviceType.CUDA]


@pytest.mark.parametrize("gates", [torch.float32, torch.bfloat16])
def test_a_step_launches_four_kernels_for_them(gates):
    x = on_gpu([300, 100], activations=True, gates=torch.float32)
    del x["use_qk_l2norm_in_kernel"], x["initial_state"]
    plain = {n: t for n, t in x.items() if n not in ("A_log", "dt_bias") and n[:4] != "use_"}
    x |= {n: x[n].to(gates) for n in ("g", "beta")}
    without, names = launched(plain), launched(x)
    if not names:
        pytest.skip("torch's profiler sees no kernels here")
    ours = [n.split("_fp32")[0] for n in names if "activate" in n or "gate_sums" in n]
    assert ours == ["gdn_activate", "gdn_activate", "gdn_activate_bwd", "gdn_gate_sums"]
    assert len(names) == len(without) + len(ours)
