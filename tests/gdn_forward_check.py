"""What a forward must produce: shared by the emulated and the device tier."""

import torch
from torch import Tensor

from reference import gdn
from tests.compare import assert_close, relative_l2
from tests.gdn_calls import Call

# Errors are counted in units of what rounding the operands of every product costs by itself.
RATIO = 1.5
RATIO_OF_A_HEAD = 2.0
FP32 = 1e-5  # what sums and decays in fp32 cost where no product's rounding shows


def exact(x: Call, operand_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """o and the final state in fp64, from what the kernels are given: norms are rounded."""
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
    """Per tensor and per head; rows of no sequence are 0."""
    want_o, want_state = exact(x)
    rounded_o, rounded_state = exact(x, x["q"].dtype)
    if (bounds := x.get("cu_seqlens")) is not None:
        assert not o[:, bounds[-1] :].any(), "rows of padding tokens are not 0"
    _compare("o", o, want_o, rounded_o, 2)
    if final_state is not None:
        state = final_state.mT if x.get("state_v_first") else final_state
        _compare("final state", state, want_state, rounded_state, 1)


def check_saved(x: Call, g_cum: Tensor, A: Tensor) -> None:
    """What the backward will want, of calls with activated gates and normalised keys."""
    bounds = x.get("cu_seqlens")
    live = slice(None, x["q"].shape[1] if bounds is None else int(bounds[-1]))
    for name, value in (("g_cum", g_cum), ("A", A)):
        assert not value[:, live.stop :].any(), f"rows of padding tokens of {name} are not 0"
    q, k, v, g, beta = (x[name][:, live].double() for name in ("q", "k", "v", "g", "beta"))
    want = gdn.chunked(q, k, v, g, beta, cu_seqlens=bounds)
    assert_close("g_cum", g_cum[:, live], want.g_cum, FP32)
    rounding = relative_l2(want.A.to(A.dtype), want.A)
    assert_close("A", A[:, live], want.A, RATIO * rounding + FP32)


def _compare(name: str, got: Tensor, want: Tensor, rounded: Tensor, head_axis: int) -> None:
    assert_close(name, got, want, RATIO * relative_l2(rounded, want) + FP32)
    for head in range(want.shape[head_axis]):
        a, b, c = (t.select(head_axis, head) for t in (got, want, rounded))
        assert_close(f"{name} of head {head}", a, b, RATIO_OF_A_HEAD * relative_l2(c, b) + FP32)
