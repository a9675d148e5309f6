"""Raw gates and betas on a GPU: their kernels alone, and what a training step launches for them."""

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from qla_kernels import chunk_gated_delta_rule
from tests.gdn_activations_check import (
    MIXES,
    SHAPES,
    check_backward,
    check_every_size,
    check_forward,
    check_no_nan,
    gradients,
    raw,
)
from tests.gdn_calls import Call, on_gpu

pytestmark = pytest.mark.hopper

GPU = "cuda"
MORE = ((1, 8192, 32), (1, 40_000, 48), (4, 2048, 8), (700, 3, 16))


@pytest.mark.parametrize("shape", [*SHAPES, *MORE], ids=str)
@pytest.mark.parametrize("dtypes", MIXES, ids=["as models", "fp32", "mixed", "other mix"])
def test_any_dtypes_and_strides(shape, dtypes):
    for beta_range in (0.0, 1.0, 2.0):
        x = raw(shape, dtypes, GPU, with_bias=beta_range < 2)
        check_forward(x, beta_range)
        check_backward(x, beta_range)


@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [2000, 0, 500], [2996, 4]], ids=str)
def test_tokens_of_no_sequence(lengths):
    check_backward(raw((1, 3000, 6), MIXES[0], GPU, True), 1.0, lengths)


def test_numbers_of_every_size():
    check_every_size(GPU)


def test_what_overflows_is_no_nan():
    check_no_nan(GPU)


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
