"""What a backward must produce: shared by the emulated and the device tier."""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.ops import GdnBackward
from reference import gdn
from tests.compare import assert_close, relative_l2
from tests.gdn_calls import Call

# Errors are counted in units of what rounding the operands of every product costs by itself.
RATIO = 1.25
RATIO_OF_FEW = 2.0  # of a single head, and of sums that leave a number a head
FP32 = 1e-5  # what sums and decays in fp32 cost where no product's rounding shows
SMALLEST = torch.finfo(torch.float16).tiny  # strong decay leaves less of dh0: in 16 bits, 0


class Saved(NamedTuple):
    """What a forward keeps for its backward."""

    g_cum: Tensor  # [B, T, HV] fp32
    A: Tensor  # [B, T, HV, 64] in q's dtype


def saved(x: Call) -> Saved:
    """As the kernels leave it; nobody writes the rows of no sequence."""
    done = _forward(_active(x), x["q"].dtype)
    g_cum, A = done.g_cum.float(), done.A.to(x["q"].dtype)
    if (bounds := x.get("cu_seqlens")) is not None:
        g_cum[:, bounds[-1] :] = torch.nan
        A[:, bounds[-1] :] = torch.nan
    return Saved(g_cum, A)


def check(x: Call, do: Tensor, dht: Tensor | None, got: GdnBackward) -> None:
    """Every gradient, per tensor and per head, in the dtype of its input; padding's is 0."""
    want, rounded = exact(x, do, dht), exact(x, do, dht, x["q"].dtype)
    for name in GdnBackward._fields:
        a, b, c = (getattr(each, name) for each in (got, want, rounded))
        assert (a is None) == (b is None), f"{name} is {a if a is None else 'there'}"
        if a is None:
            continue
        c = c.to(a.dtype).double()
        if (bounds := x.get("cu_seqlens")) is not None and a.shape[:2] == x["q"].shape[:2]:
            assert not a[:, bounds[-1] :].any(), f"{name}: rows of padding tokens are not 0"
        _compare(name, a, b, c, RATIO if a.dim() > 2 else RATIO_OF_FEW)
        if a.dim() > 2:
            head_axis = 1 if name == "dh0" else 2
            for head in range(a.shape[head_axis]):
                of_head = (t.select(head_axis, head) for t in (a, b, c))
                _compare(name, *of_head, RATIO_OF_FEW)


def _compare(name: str, got: Tensor, want: Tensor, rounded: Tensor, ratio: float) -> None:
    if name == "dg":  # where the kernel rounds, by value head, the reference rounds a group's sum
        ratio *= 1.5
    limit = ratio * relative_l2(rounded, want) + FP32
    if name in ("dA_log", "ddt_bias"):  # sums of both signs over all tokens: FLA's tolerance
        limit = max(limit, 0.02)
    # a few numbers decide the error of dg and its sums, and of a tensor of few: no averages
    few = name in ("dg", "dA_log", "ddt_bias") or want.numel() < 1024
    bias = limit if few else None
    at_least = SMALLEST if name == "dh0" else 0.0
    assert_close(name, got, want, limit, bias, at_least)


def exact(
    x: Call, do: Tensor, dht: Tensor | None, operand_dtype: torch.dtype | None = None
) -> GdnBackward:
    """In fp64, from what the kernels are given; dht like the states of the call."""
    active = _active(x)
    done = _forward(active, operand_dtype)
    bounds, h0 = x.get("cu_seqlens"), active["initial_state"]
    v_first = x.get("state_v_first", False)
    end = None if dht is None else (dht.mT if v_first else dht).double()
    grads = gdn.chunked_backward(
        active["q"], active["k"], active["v"], done.g_cum, active["beta"], done.A,
        do.double().nan_to_num(), end, x.get("scale"), h0, bounds, operand_dtype=operand_dtype,
    )  # fmt: skip
    dq, dk, dbeta, dg, dA_log, ddt_bias = grads.dq, grads.dk, grads.dbeta, grads.dg, None, None
    if x.get("use_qk_l2norm_in_kernel"):
        dq, dk = (
            gdn.l2norm_backward(x[name].double().nan_to_num(), dy.to(operand_dtype).double())
            for name, dy in (("q", dq), ("k", dk))
        )
    if x.get("use_beta_sigmoid_in_kernel"):
        raw = x["beta"].double().nan_to_num()
        dbeta = gdn.beta_sigmoid_backward(raw, dbeta, x.get("allow_neg_eigval", False))
    if x.get("use_gate_in_kernel"):
        A_log, dt_bias = (None if x.get(n) is None else x[n].double() for n in ("A_log", "dt_bias"))
        raw = x["g"].double().nan_to_num()
        dg, dA_log, ddt_bias = gdn.gate_backward(raw, A_log, dt_bias, dg)
    dh0 = None if grads.dh0 is None else (grads.dh0.mT if v_first else grads.dh0)
    return GdnBackward(dq, dk, grads.dv, dbeta, dg, dh0, dA_log, ddt_bias)


def _active(x: Call) -> Call:
    """fp64 tensors of the call after its activations."""
    q, k, v, beta = (x[name].double().nan_to_num() for name in ("q", "k", "v", "beta"))
    if x.get("use_qk_l2norm_in_kernel"):  # what comes out of the norm is rounded
        q, k = (gdn.l2norm(x[name].nan_to_num()).double() for name in ("q", "k"))
    g = x["g"].double().nan_to_num(neginf=-torch.inf)
    if x.get("use_gate_in_kernel"):
        bias = x.get("dt_bias")
        g = gdn.gate(g, x["A_log"].double(), None if bias is None else bias.double())
    if x.get("use_beta_sigmoid_in_kernel"):
        beta = gdn.beta_sigmoid(beta, x.get("allow_neg_eigval", False))
    h0 = x.get("initial_state")
    if h0 is not None:
        h0 = (h0.mT if x.get("state_v_first") else h0).double()
    return {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": h0,
        "scale": x.get("scale"), "cu_seqlens": x.get("cu_seqlens"),
    }  # fmt: skip


def _forward(active: Call, operand_dtype: torch.dtype | None) -> gdn.Forward:
    return gdn.chunked(**active, operand_dtype=operand_dtype)
