"""Calls of a decoding step with its norm, and what they must produce.

As in gdn_recurrent.py everything is fp32, so the result is the exact one rounded once. With a
convolution its results are rounded, so that the truth starts from those of the same kernel.
"""

from typing import Any

import torch
from torch import Tensor

from qla_kernels import causal_conv1d_update, decode_gated_delta_net, packed_decode_gated_delta_rule
from qla_kernels.gdn.decode.packed import split
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.compare import assert_close, relative_l2
from qla_kernels.lab.selftest.gdn_calls import Call
from qla_kernels.lab.selftest.gdn_recurrent import ROUNDING, STATE, decode, pooled, truth
from qla_kernels.runtime.cpu import reference

CONVOLUTION = ("conv_state", "conv_weight", "conv_bias", "conv_activation")


def step(
    slots: list[int],
    dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int] = (128, 128),
    heads: tuple[int, int] = (1, 2),
    state: torch.dtype = torch.float32,
    gates: torch.dtype | None = None,
    num_slots: int = 9,
    **others: Any,
) -> Call:
    """Returns a packed step with a norm, whose rows and gates are slices of projections."""
    x = pooled(
        decode(
            None, dtype, sizes, gates or dtype, batch=len(slots), tokens=1, heads=heads,
            activations=True, state_v_first=others.pop("state_v_first", True),
        ),
        slots, num_slots, state,
    )  # fmt: skip
    rows = torch.cat([x[name].flatten(1) for name in ("q", "k", "v")], 1)
    count, width, size = len(slots), rows.shape[1], heads[1] * sizes[1]
    both = torch.cat([rows, torch.randn(count, size + 16).to(dtype)], 1)
    gated = torch.stack([x["g"][:, 0], x["beta"][:, 0]], 1)
    return {
        "mixed_qkv": both[:, :width],
        "a": gated[:, 0],
        "b": gated[:, 1],
        **{n: x[n] for n in ("A_log", "dt_bias", "initial_state", "state_indices")},
        "state_v_first": x["state_v_first"],
        "z": torch.unflatten(both[:, width : width + size], 1, (heads[1], sizes[1])),
        "norm_weight": torch.rand(sizes[1]) + 0.5,
        **others,
    }


def convolved(x: Call, width: int = 4, by_channels: bool = False) -> Call:
    """Returns the step with a convolution before it, in a pool between other data."""
    rows, slots = x["mixed_qkv"], len(x["initial_state"])
    channels = rows.shape[1]
    size = (channels, width) if by_channels else (width, channels)
    room = torch.unflatten(torch.randn(slots, width * channels + 8).to(rows)[:, 8:], 1, size)
    return {
        **x,
        "conv_state": room if by_channels else room.mT,
        "conv_weight": torch.randn(channels, width).to(rows),
        "conv_bias": torch.randn(channels).to(rows),
        "conv_activation": "silu",
    }


def check_step(x: Call, before: Call, y: Tensor) -> None:
    """Compares with fp64, on the CPU; `before` has what x's pools held, and the rule's rows."""
    rows, pool, slots = before["mixed_qkv"], before["initial_state"], x["state_indices"].tolist()
    null, v_first, N = x.get("null_slot", -1), x["state_v_first"], len(slots)
    q, k, v = split("gdn_step", rows, pool, v_first)
    live = [n for n, slot in enumerate(slots) if null < slot < len(pool)]
    used = [slots[n] for n in live]
    h0 = torch.zeros(N, *pool.shape[1:])
    h0[live] = pool[used].float()
    want, states = truth(
        {
            "q": q, "k": k, "v": v, "g": x["a"][:, None], "beta": x["b"][:, None],
            "A_log": x["A_log"], "dt_bias": x["dt_bias"], "scale": x.get("scale"),
            "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True, "state_v_first": v_first, "initial_state": h0,
        }
    )  # fmt: skip
    exact = (t.double() for t in (x["z"][:, None], x["norm_weight"]))
    eps, sigmoid = x.get("norm_eps", 1e-6), x.get("z_activation") == "sigmoid"
    want = reference().gdn.gated_rms_norm(want, *exact, eps, sigmoid)
    padding = [n for n in range(N) if n not in live]
    assert not y[padding].any(), "rows of padding are not 0"
    # Of a few large numbers, the error of one rounding is no average: it is measured, too.
    once = relative_l2(want[live].to(y.dtype), want[live])
    assert_close("y", y[live], want[live], 1.05 * once)
    limit = STATE if pool.dtype == torch.float32 else ROUNDING[pool.dtype]
    assert_close("states", x["initial_state"][used], states[live], limit)
    same = [slot for slot in range(len(pool)) if slot not in used]
    assert torch.equal(x["initial_state"][same], pool[same]), "a slot of no sequence was written"


def run(x: Call, device: str = "cpu") -> None:
    """Runs a step, with its convolution if it has one, and checks it."""
    before = {n: t.clone() if torch.is_tensor(t) else t for n, t in x.items()}
    given: Call = to(x, device)
    if "conv_state" not in x:
        y = packed_decode_gated_delta_rule(**given)
    else:
        pool = given["conv_state"].clone()
        weight, bias, activation = (given[name] for name in CONVOLUTION[1:])
        null, slots = x.get("null_slot", -1), given["state_indices"]
        rows = causal_conv1d_update(
            given["mixed_qkv"], pool, weight, bias, activation, slots, null_slot=null
        )
        y = decode_gated_delta_net(**given)
        before["mixed_qkv"] = rows.cpu()
        same = torch.equal(given["conv_state"].cpu(), pool.cpu())
        assert same, "the convolution's pool is not that of the convolution alone"
    check_step(to(given, "cpu"), before, y.cpu())


def _step(variant: Any, given: tuple[Any, ...], device: str) -> None:
    slots, heads, options, width, v_first = given
    x = step(
        slots, dtype_of(variant), (variant.K, variant.V), heads, getattr(torch, variant.state),
        state_v_first=v_first, **options,
    )  # fmt: skip
    run(convolved(x, width) if width else x, device)


INPUTS: tuple[tuple[Any, ...], ...] = (
    ([5, -1, 0, 8, 3], (1, 2), {}, 0),
    ([0, 4, 2, 0], (2, 2), {"null_slot": 0, "z_activation": "sigmoid", "norm_eps": 1e-5}, 0),
    ([-1, 7, 0], (1, 3), {"gates": torch.float32, "scale": 1.0}, 4),
)

CASES = (
    Cases(
        ("gdn.recurrent_norm",),
        _step,
        [(*given, v_first) for given in INPUTS for v_first in (False, True)],
        emulated=("bf16-k128-v128-fp32", "fp16-k64-v64-fp32", "bf16-k64-v64-bf16"),
    ),
)
