"""Calls of the CUDA backward of the gated delta rule, and what they must produce."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.call import Incoming, SavedForward
from qla_kernels.gdn.launch import backward as launch
from qla_kernels.gdn.launch import forward as launch_forward
from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.gdn.shapes import leaves_values
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.compare import assert_close, relative_l2
from qla_kernels.lab.selftest.gdn_calls import Call, records, small
from qla_kernels.runtime.cpu import reference

# Errors are counted in units of what rounding the operands of every product costs by itself.
RATIO = 1.25
RATIO_OF_FEW = 2.0  # of a single head, and of sums that leave a number a head
FP32 = 1e-5  # what sums and decays in fp32 cost where no product's rounding shows
# A few tokens decide the error of dg, so what rounding costs is one draw: of eight seeds in fp16,
# 1.2e-4 to 6.8e-4 for the rounded reference, 2.4e-4 to 8.4e-4 for the kernels. An eps is 9.8e-4.
DG_UNITS = 1.0
SMALLEST = torch.finfo(torch.float16).tiny  # strong decay leaves less of dh0: in 16 bits, 0
# Where Y passes through memory in 16 bits (shapes.leaves_values), dbeta = <Y, W> has the error of a
# random walk of V steps, which the rounded reference, that keeps Y, does not have. A step is this
# share of eps times a number of Y (two roundings, measured) and one of W; three times its length is
# allowed. Few tokens decide it, so that their ratio to the reference's error says nothing.
Y_UNITS, WALKS = 0.35, 3.0


# Lengths 0, 1 and around 64; empty sequences first, in the middle, last; several chunks. And key
# and value heads: of one token, the sum over a group may be smaller than its terms' roundings.
LENGTHS = (
    ([64], (1, 2)),
    ([0, 65, 0, 1, 130, 0], (2, 4)),
    ([63, 128, 200], (1, 4)),
    ([1], (2, 2)),
    ([0, 0], (1, 1)),
    ([2, 321], (1, 2)),
)


class SavedTensors(NamedTuple):
    """What a forward keeps for its backward."""

    g_cum: Tensor  # [B, T, HV] fp32
    A: Tensor  # [B, T, HV, 64] in q's dtype


def saved(x: Call) -> SavedTensors:
    """Returns g_cum and A as the kernels leave them; rows of no sequence are NaN."""
    done = _forward(_active(x), x["q"].dtype)
    g_cum, A = done.g_cum.float(), done.A.to(x["q"].dtype)
    if (bounds := x.get("cu_seqlens")) is not None:
        g_cum[:, bounds[-1] :] = torch.nan
        A[:, bounds[-1] :] = torch.nan
    return SavedTensors(g_cum, A)


def gradients(x: Call) -> tuple[Tensor, Tensor]:
    """Returns dO, NaN for tokens of no sequence, and the gradient of the final state."""
    do = torch.randn_like(x["v"]).masked_fill(x["v"].isnan(), torch.nan)
    return do, torch.randn_like(x["initial_state"])


def backward(
    x: Call, do: Tensor, dht: Tensor | None = None, kept: SavedTensors | None = None, **changed: Any
) -> GdnBackward:
    """Launches the backward as autograd does."""
    x = x | changed
    norm, normed = x.get("use_qk_l2norm_in_kernel"), x
    if norm:
        normed = x | {name: launch_forward.l2norm_fwd(x[name]) for name in ("q", "k")}
    call, options = records(normed)
    incoming = Incoming(do, dht, x.get("output_dh0", True))
    saved_forward = SavedForward(*(kept or saved(x)), [])
    done, bounds = launch.gdn_bwd(call, saved_forward, incoming, options), call.cu_seqlens
    if not norm:
        return done
    dq, dk = (launch.l2norm_bwd(x[n], dy, bounds) for n, dy in (("q", done.dq), ("k", done.dk)))
    return done._replace(dq=dq, dk=dk)


def check(x: Call, do: Tensor, dht: Tensor | None, got: GdnBackward) -> None:
    """Compares every gradient, per tensor and per head, in its input's dtype; padding's is 0."""
    want, rounded = exact(x, do, dht), exact(x, do, dht, x["q"].dtype)
    for name in GdnBackward._fields:
        a, b, c = (getattr(each, name) for each in (got, want, rounded))
        assert (a is None) == (b is None), f"{name} is {a if a is None else 'there'}"
        if a is None:
            continue
        c = c.to(a.dtype).double()
        if (bounds := x.get("cu_seqlens")) is not None and a.shape[:2] == x["q"].shape[:2]:
            assert not a[:, bounds[-1] :].any(), f"{name}: rows of padding tokens are not 0"
        walk = _walk_of_dbeta(x, want) if name == "dbeta" else torch.zeros_like(b)
        ratio, dtype = RATIO if a.dim() > 2 else RATIO_OF_FEW, x["q"].dtype
        _compare(name, a, b, c, ratio, dtype, walk)
        if a.dim() > 2:
            head_axis = 1 if name == "dh0" else 2
            for head in range(a.shape[head_axis]):
                of_head = (t.select(head_axis, head) for t in (a, b, c, walk))
                a_head, b_head, c_head, walk_head = of_head
                _compare(name, a_head, b_head, c_head, RATIO_OF_FEW, dtype, walk_head)


def _walk_of_dbeta(x: Call, want: GdnBackward) -> Tensor:
    """Returns the error that the rounding of Y may add to each number of dbeta [B, T, HV].

    W is taken for as large as v.
    """
    (K, V), eps = (x["q"].shape[3], x["v"].shape[3]), torch.finfo(x["q"].dtype).eps
    if not leaves_values(K, V):
        return torch.zeros_like(want.dbeta)
    Y = (want.dv / _active(x)["beta"][..., None]).nan_to_num(0, 0, 0)
    sizes = Y.norm(dim=3) * x["v"].double().nan_to_num().norm(dim=3)
    walk: Tensor = WALKS * Y_UNITS * eps * sizes / V**0.5
    return walk


def _compare(
    name: str,
    got: Tensor,
    want: Tensor,
    rounded: Tensor,
    ratio: float,
    dtype: torch.dtype,
    walk: Tensor,
) -> None:
    if name == "dg":  # where the kernel rounds, by value head, the reference rounds a group's sum
        ratio *= 1.5
    limit = ratio * relative_l2(rounded, want) + FP32
    if walk.any():
        limit = math.hypot(limit, float(walk.norm() / want.norm()))
    if name == "dg":
        limit = max(limit, DG_UNITS * torch.finfo(dtype).eps)
    if name in ("dA_log", "ddt_bias"):  # sums of both signs over all tokens: FLA's tolerance
        limit = max(limit, 0.02)
    # a few numbers decide the error of dg and its sums, and of a tensor of few: no averages.
    # Zeros of padding tokens do not count.
    few = name in ("dg", "dA_log", "ddt_bias") or int(want.count_nonzero()) < 1024
    bias = limit if few else None
    at_least = SMALLEST if name == "dh0" else 0.0
    assert_close(name, got, want, limit, bias, at_least)


def exact(
    x: Call, do: Tensor, dht: Tensor | None, operand_dtype: torch.dtype | None = None
) -> GdnBackward:
    """Returns gradients in fp64 for what the kernels are given; dht like the call's states."""
    gdn = reference().gdn
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
    """Returns fp64 tensors of the call after its activations."""
    gdn = reference().gdn
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


def _forward(active: Call, operand_dtype: torch.dtype | None) -> Any:
    return reference().gdn.chunked(**active, operand_dtype=operand_dtype)


def _chunk_grads(variant: Any, i: int, device: str) -> None:
    """Checks LENGTHS[i], every other one without initial state."""
    lengths, heads = LENGTHS[i]
    x = small(lengths, dtype_of(variant), heads=heads, sizes=(variant.K, variant.V))
    do, dht = gradients(x)
    if i % 2:
        x["initial_state"] = None
    got = backward(*to((x, do, dht, saved(x)), device))
    check(x, do, dht, to(got, "cpu"))


def _l2norm_bwd(variant: Any, shape: tuple[int, ...], device: str) -> None:
    """Checks rows that are head-major and slices of wider ones, some 0; dy in any strides."""
    B, H, T, size = shape
    room = 4 * torch.randn(B, H, T, 2 * size).to(dtype_of(variant))
    room[:, :, T // 2 : T // 2 + 10] = 0
    x, dy = room[..., size:].transpose(1, 2), torch.randn(B, T, H, size).to(room.dtype)
    want = reference().gdn.l2norm_backward(x.double(), dy.double())
    limit = 1.01 * relative_l2(want.to(dy.dtype), want)
    x, dy = room.to(device)[..., size:].transpose(1, 2), dy.to(device)
    for strided in (dy, dy.mT.contiguous().mT, room.new_zeros((), device=device)):
        dx = launch.l2norm_bwd(x, strided.expand(dy.shape), None).cpu()
        assert dx.is_contiguous(), "dx is not contiguous"
        if strided.dim():
            assert_close("dx", dx, want, limit)
        else:
            assert not dx.any(), "dx of no gradient is not 0"


CASES = (
    Cases(
        ("gdn.chunk_grads",),
        _chunk_grads,
        range(len(LENGTHS)),
        emulated=("bf16-k128-v128", "fp16-k64-v64", "bf16-k64-v128", "fp16-k128-v64"),
    ),
    Cases(
        ("gdn.l2norm_bwd",),
        _l2norm_bwd,
        [(2, 3, 90, 64), (2, 3, 90, 128)],
        [(3, 8, 5000, 64), (3, 8, 5000, 128)],
        of=lambda variant: not variant.wide,
    ),
    Cases(
        ("gdn.l2norm_bwd",),
        _l2norm_bwd,
        [(2, 3, 90, 256)],
        [(3, 8, 5000, 256)],
        of=lambda variant: variant.wide,
    ),
)
