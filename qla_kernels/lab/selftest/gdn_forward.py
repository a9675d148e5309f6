"""Calls of the CUDA forward of the gated delta rule, and what they must produce."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from qla_kernels.gdn import plan
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.ops import GdnForward
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.compare import assert_close, relative_l2
from qla_kernels.lab.selftest.gdn_calls import Call, records, small
from qla_kernels.runtime.cpu import reference

# Errors are counted in units of what rounding the operands of every product costs by itself.
RATIO = 1.5
RATIO_OF_A_HEAD = 2.0
FP32 = 1e-5  # what sums and decays in fp32 cost where no product's rounding shows

# Lengths 0, 1 and around 64; empty sequences first, in the middle, last; several chunks.
LENGTHS = ([64], [0, 65, 0, 1, 130, 0], [63, 128, 200], [1], [0, 0], [2, 321])


def forward(x: Call, **changed: Any) -> GdnForward:
    """Launches the forward as the operator does."""
    x = {"output_final_state": True} | x | changed
    if x.get("use_qk_l2norm_in_kernel"):
        x |= {name: launch.l2norm_fwd(x[name]) for name in ("q", "k")}
    return launch.gdn_fwd(*records(x))


def exact(x: Call, operand_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Returns o and the final state in fp64 for what the kernels are given: norms are rounded."""
    gdn = reference().gdn
    q, k, v, g, beta = (x[name].nan_to_num() for name in ("q", "k", "v", "g", "beta"))
    if x.get("use_qk_l2norm_in_kernel"):
        q, k = gdn.l2norm(q), gdn.l2norm(k)
    g = x["g"].double().nan_to_num(neginf=-torch.inf)
    if x.get("use_gate_in_kernel"):
        bias = x.get("dt_bias")
        g = gdn.gate(g, x["A_log"].double(), None if bias is None else bias.double())
    if x.get("use_beta_sigmoid_in_kernel"):
        beta = gdn.beta_sigmoid(beta.double(), x.get("allow_neg_eigval", False))
    h0 = x.get("initial_state")
    if h0 is not None:
        h0 = (h0.mT if x.get("state_v_first") else h0).double()
    done = gdn.chunked(
        q.double(), k.double(), v.double(), g, beta.double(), x.get("scale"), h0,
        x.get("cu_seqlens"), operand_dtype=operand_dtype,
    )  # fmt: skip
    o = done.o if operand_dtype is None else done.o.to(operand_dtype).double()
    return o, done.final_state


def check(x: Call, o: Tensor, final_state: Tensor | None = None) -> None:
    """Compares per tensor and per head with fp64; rows of no sequence are 0."""
    want_o, want_state = exact(x)
    rounded_o, rounded_state = exact(x, x["q"].dtype)
    if (bounds := x.get("cu_seqlens")) is not None:
        assert not o[:, bounds[-1] :].any(), "rows of padding tokens are not 0"
    _compare("o", o, want_o, rounded_o, 2)
    if final_state is not None:
        state = final_state.mT if x.get("state_v_first") else final_state
        _compare("final state", state, want_state, rounded_state, 1)


def check_saved(x: Call, g_cum: Tensor, A: Tensor) -> None:
    """Compares what the backward reads, for activated gates and normalised keys."""
    bounds = x.get("cu_seqlens")
    live = slice(None, x["q"].shape[1] if bounds is None else int(bounds[-1]))
    for name, value in (("g_cum", g_cum), ("A", A)):
        assert not value[:, live.stop :].any(), f"rows of padding tokens of {name} are not 0"
    q, k, v, g, beta = (x[name][:, live].double() for name in ("q", "k", "v", "g", "beta"))
    want = reference().gdn.chunked(q, k, v, g, beta, cu_seqlens=bounds)
    assert_close("g_cum", g_cum[:, live], want.g_cum, FP32)
    rounding = relative_l2(want.A.to(A.dtype), want.A)
    assert_close("A", A[:, live], want.A, RATIO * rounding + FP32)


def _compare(name: str, got: Tensor, want: Tensor, rounded: Tensor, head_axis: int) -> None:
    assert_close(name, got, want, RATIO * relative_l2(rounded, want) + FP32)
    for head in range(want.shape[head_axis]):
        a, b, c = (t.select(head_axis, head) for t in (got, want, rounded))
        assert_close(f"{name} of head {head}", a, b, RATIO_OF_A_HEAD * relative_l2(c, b) + FP32)


def _fused_fwd(variant: Any, i: int, device: str) -> None:
    """Checks LENGTHS[i]: every other one without initial state, the first three in training."""
    V = 64 if variant.tile_v == 64 and i % 2 else 128
    x = small(LENGTHS[i], dtype_of(variant), sizes=(variant.K, V))
    if i % 2:
        x["initial_state"] = None
    kernel = ForwardChoice(variant.tile_v, variant.solves)
    whole = plan.Plan(kernel, None, shares=variant.shares)
    with mock.patch.object(launch, "planned", return_value=(whole, False)):
        done = to(forward(to(x, device), is_train=i < 3), "cpu")
    check(x, done.o, done.final_state)
    if i < 3:
        check_saved(x, done.g_cum, done.A)


def _l2norm(variant: Any, shape: tuple[int, ...], device: str) -> None:
    """Checks rows that are head-major and slices of wider ones; some are 0, some hold NaN."""
    B, H, T, size = shape
    room = 4 * torch.randn(B, H, T, 2 * size).to(dtype_of(variant))
    room[:, :, T // 2 : T // 2 + 10] = 0
    live = slice(None, T - 10)
    room[:, :, live.stop :] = torch.nan
    y = launch.l2norm_fwd(room.to(device)[..., size:].transpose(1, 2)).cpu()
    assert y.is_contiguous(), "y is not contiguous"
    assert y[:, live.stop :].isnan().all(), "rows with NaN"
    want = reference().gdn.l2norm(room[..., size:].transpose(1, 2)[:, live].double())
    assert_close("y", y[:, live], want, 1.01 * relative_l2(want.to(y.dtype), want))


CASES = (
    Cases(("gdn.fused_fwd",), _fused_fwd, range(len(LENGTHS)), of=lambda variant: not variant.pool),
    Cases(
        ("gdn.l2norm",),
        _l2norm,
        [(2, 3, 90, 64), (2, 3, 90, 96), (2, 3, 90, 128)],
        [(3, 8, 5000, 64), (3, 8, 5000, 96), (3, 8, 5000, 128)],
        of=lambda variant: not variant.wide,
    ),
    Cases(
        ("gdn.l2norm",),
        _l2norm,
        [(2, 3, 90, 256)],
        [(3, 8, 5000, 256)],
        of=lambda variant: variant.wide,
    ),
)
