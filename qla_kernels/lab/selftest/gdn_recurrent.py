"""Calls of the token-by-token form, and what they must produce.

Everything is fp32, so o is the exact result rounded once, and a state is right to fp32's last bits.
"""

from typing import Any

import torch
from torch import Tensor

from qla_kernels import fused_recurrent_gated_delta_rule
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.compare import assert_close
from qla_kernels.lab.selftest.gdn_calls import Call, call, definition

ROUNDING = {
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
    torch.float32: 1e-6,
    torch.float64: 1e-12,
}
STATE = 2e-6  # fp32 sums over K, token after token, and approximate exponentials


def decode(
    lengths: list[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int] = (128, 128),
    gates: torch.dtype = torch.float32,
    **others: Any,
) -> Call:
    """Returns a dense batch of few tokens, or packed sequences and tokens of none: NaN."""
    others = {"batch": 3, "tokens": 2, **others}
    return call(
        lengths, sizes=sizes, dtype=dtype, gates=gates, padding=3 if lengths else 0, **others
    )


def pooled(x: Call, slots: list[int], num_slots: int, dtype: torch.dtype = torch.float32) -> Call:
    """Returns the same call on a pool of states in which sequence n has slot slots[n], or none."""
    h0 = x["initial_state"]
    pool = torch.randn(num_slots, *h0.shape[1:]).to(h0.device, dtype)
    for n, slot in enumerate(slots):
        if slot >= 0:
            pool[slot] = h0[n]
    return {**x, "initial_state": pool, "state_indices": torch.tensor(slots, device=h0.device)}


def truth(x: Call) -> tuple[Tensor, Tensor]:
    """Returns o and the final states in fp64, for what the kernel is given."""
    wide = {
        n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in x.items()
    }
    return definition(wide)


def check(x: Call, o: Tensor, final_state: Tensor | None) -> None:
    """Compares with fp64; rows of no sequence are 0."""
    want_o, want_state = truth(x)
    if (bounds := x.get("cu_seqlens")) is not None:
        assert not o[:, bounds[-1] :].any(), "rows of padding tokens are not 0"
    assert_close("o", o, want_o, ROUNDING[o.dtype])
    if final_state is not None:
        assert_close("final state", final_state, want_state, STATE)


def check_pool(x: Call, before: Tensor, o: Tensor) -> None:
    """Compares with fp64; x["initial_state"] is the pool after the call, `before` before it."""
    pool, slots, null = x["initial_state"], x["state_indices"].tolist(), x.get("null_slot", -1)
    live = [n for n, slot in enumerate(slots) if slot > null]
    used = [slots[n] for n in live]
    h0 = torch.zeros(len(slots), *pool.shape[1:], dtype=torch.float64, device=pool.device)
    h0[live] = before[used].double()
    want_o, want_state = truth({**x, "initial_state": h0})
    rows = torch.zeros(o.shape[:2], dtype=torch.bool, device=o.device)  # of sequences that run
    ends = x["cu_seqlens"].tolist() if "cu_seqlens" in x else None
    for n in live:
        rows[(n,) if ends is None else (0, slice(ends[n], ends[n + 1]))] = True
    assert not o[~rows].any(), "rows of skipped sequences, or of none, are not 0"
    assert_close("o", o[rows], want_o[rows], ROUNDING[o.dtype])
    limit = STATE if pool.dtype == torch.float32 else ROUNDING[pool.dtype]
    assert_close("states", pool[used], want_state[live], limit)
    untouched = [slot for slot in range(len(pool)) if slot not in used]
    assert torch.equal(pool[untouched], before[untouched]), "a slot of no sequence was written"


def _recurrent(variant: Any, given: tuple[Any, ...], device: str) -> None:
    """Checks a call with states of its own, and without; or one that updates a pool of states."""
    lengths, V, slots, v_first = given
    x = decode(lengths, dtype_of(variant), (variant.K, V), state_v_first=v_first)
    if slots is not None:
        _pool(pooled(x, slots, 9, getattr(torch, variant.state)), device)
    elif variant.state == "float32":  # only a pool may have states of 16 bits
        for y in (x, x | {"initial_state": None}):
            with torch.no_grad():
                done = fused_recurrent_gated_delta_rule(**to(y, device), output_final_state=True)
            check(y, *to(done, "cpu"))


def _pool(x: Call, device: str) -> None:
    before = x["initial_state"].clone()
    on_device = to(x, device)
    states = on_device["initial_state"]
    version = states._version
    with torch.no_grad():
        o, pool = fused_recurrent_gated_delta_rule(**on_device, output_final_state=True)
    assert pool is states, "the pool was copied"
    assert pool._version > version, "autograd was not told of the change"
    check_pool(to(on_device, "cpu"), before, o.cpu())


CASES = (
    Cases(
        ("gdn.recurrent",),
        _recurrent,
        [
            (*given, v_first)
            for given in (
                ([1, 1, 1], 128, None),
                ([0, 4, 0, 1, 9, 0], 64, None),
                ([3, 5], 128, None),
                ([0, 0], 64, None),
                (None, 64, None),
                ([1, 2, 0, 1, 5, 1], 128, [7, -1, 2, 0, 5, -3]),
                (None, 128, [2, -1, 0]),
                ([1, 1], 128, [-1, -1]),
            )
            for v_first in (False, True)
        ],
    ),
)
