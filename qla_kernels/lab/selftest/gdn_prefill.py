"""Calls of prefill on a pool of states, and what they must produce."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from qla_kernels import prefill_gated_delta_rule
from qla_kernels.gdn import plan
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.lab.selftest.cases import Cases, to
from qla_kernels.lab.selftest.compare import assert_close, relative_l2
from qla_kernels.lab.selftest.gdn_calls import Call, small
from qla_kernels.lab.selftest.gdn_forward import FP32, RATIO
from qla_kernels.lab.selftest.gdn_recurrent import ROUNDING
from qla_kernels.runtime.cpu import reference
from qla_kernels.tile.constants import CHUNK


def in_pool(
    x: Call,
    ends: list[int],
    num_slots: int,
    starts: list[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Call:
    """Returns the call `x` on a pool, between whose slots lies other memory."""
    h0 = x.pop("initial_state")
    size = h0[0].numel()
    room = torch.randn(num_slots, size + 24).to(dtype or h0.dtype)
    x["initial_state"] = room[:, :size].view(num_slots, *h0.shape[1:])
    x["state_indices"] = torch.tensor(ends, dtype=torch.int32)
    if starts is not None:
        x["start_indices"] = torch.tensor(starts, dtype=torch.int32)
    return x


def kept(x: Call, entries: int, dtype: torch.dtype | None = None, **others: Any) -> Call:
    """Returns the call `x` with room for checkpoints; `others` say which."""
    pool = x["initial_state"]
    room = torch.randn(entries, *pool.shape[1:]).to(dtype or pool.dtype)
    return {**x, "checkpoints": room, **others}


def check(x: Call, before: Call, o: Tensor) -> None:
    """Compares with fp64, on the CPU; `before` has what x's tensors held before the call."""
    null, v_first = x.get("null_slot", -1), x.get("state_v_first")
    pool, places = before["initial_state"], x["state_indices"].tolist()
    starts = x["start_indices"].tolist() if "start_indices" in x else places
    bounds = x["cu_seqlens"].tolist() if "cu_seqlens" in x else None
    want_pool, entries = pool.clone(), x.get("checkpoints")
    want_entries = None if entries is None else before["checkpoints"].clone()
    assert bounds is None or not o[:, bounds[-1] :].any(), "rows of padding tokens are not 0"
    for n, (end, start) in enumerate(zip(places, starts, strict=True)):
        at = (slice(n, n + 1), slice(None))
        if bounds is not None:
            at = slice(0, 1), slice(bounds[n], bounds[n + 1])
        q, k, v, g, beta = (x[name][at].double() for name in ("q", "k", "v", "g", "beta"))
        h0 = None
        if null < start < len(pool):
            h0 = pool[start : start + 1].double()
            h0 = h0.mT if v_first else h0

        length, given = q.shape[1], (q, k, v, g, beta)
        want_o, want, limits = after(x, given, h0, length)
        if length:
            assert_close(f"o of sequence {n}", o[at], want_o, limits[0] + ROUNDING[o.dtype])
        if null < end < len(pool):
            got = x["initial_state"][end]
            assert_close(f"slot {end}", got, want, limits[1] + ROUNDING[pool.dtype])
            want_pool[end] = got
        if entries is None or want_entries is None:
            continue
        for entry, tokens in stops(x, n, length):
            _, want, limits = after(x, given, h0, tokens)
            limit = limits[1] + ROUNDING[entries.dtype]
            assert_close(f"entry {entry}", entries[entry], want, limit)
            want_entries[entry] = entries[entry]
    assert torch.equal(x["initial_state"], want_pool), "a slot was written that nobody named"
    if want_entries is not None:
        assert torch.equal(x["checkpoints"], want_entries), "another entry was written"


def after(
    x: Call, given: tuple[Tensor, ...], h0: Tensor | None, tokens: int
) -> tuple[Tensor, Tensor, list[float]]:
    """Returns o and the state after some tokens of a sequence in fp64, and limits of their errors.

    The limits are those of products whose operands are rounded to x's dtype.
    """
    part, gdn = [y[:, :tokens] for y in given], reference().gdn
    exact = gdn.chunked(*part, x.get("scale"), h0)
    state, limits = exact.final_state[0], [FP32, FP32]
    if x["q"].dtype.itemsize == 2:
        rounded = gdn.chunked(*part, x.get("scale"), h0, operand_dtype=x["q"].dtype)
        pairs = (rounded.o, exact.o), (rounded.final_state, exact.final_state)
        limits = [RATIO * relative_l2(a, b) + FP32 for a, b in pairs]
    return exact.o, state.mT if x.get("state_v_first") else state, limits


def stops(x: Call, n: int, length: int) -> list[tuple[int, int]]:
    """Returns the entries of sequence n's checkpoints, and after how many tokens they are."""
    every: Any = x.get("checkpoint_every")
    first, starts = x.get("first_checkpoints"), x.get("checkpoint_starts")
    begin = every if first is None else int(first[n]) * CHUNK
    if begin < 0:
        return []
    entry = n if starts is None else int(starts[n])
    tokens = range(begin, length + 1, every or length + 1)
    return [(entry + i, stop) for i, stop in enumerate(tokens)]


LENGTHS = [130, 0, 64, 200, 1]
# of LENGTHS: ends, starts, checkpoints, other arguments
INPUTS: tuple[tuple[Any, ...], ...] = (
    ([4, 1, 6, 0, 2], None, {}, {}),
    ([4, 1, 6, -1, 2], [3, -1, 3, 5, -2], {}, {"state_v_first": True}),
    ([4, 1, 6, 0, 2], [4, 1, 0, 7, 2], {}, {"null_slot": 0, "state_v_first": True}),
    (
        [4, 1, 6, 0, 2],
        [-1, 1, 6, 0, -1],
        {"checkpoint_every": 64, "checkpoint_starts": [0, 2, 2, 3, 6, 6]},
        {"state_v_first": True},
    ),
    (
        [4, 1, 6, 0, 2],
        None,
        {"first_checkpoints": [1, -1, 1, 0, 0], "checkpoint_every": None},
        {},
    ),
    (
        [4, 1, 6, 0, 2],
        None,
        {
            "first_checkpoints": [0, 0, -1, 1, 3],
            "checkpoint_every": 128,
            "checkpoint_starts": [2, 0, 1, 5, 1],
        },
        {"state_v_first": True},
    ),
)


def run(
    given: tuple[Any, ...],
    sizes: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    pool: torch.dtype,
    entries: torch.dtype,
    keeps: bool = True,
) -> None:
    """Runs one of INPUTS, without its checkpoints unless `keeps`, and checks it."""
    ends, starts, checkpoints, others = given
    x = in_pool(small(LENGTHS, dtype, sizes=sizes, **others), ends, 9, starts, pool)
    if checkpoints and keeps:
        tables = {
            n: torch.tensor(t, dtype=torch.int32) if isinstance(t, list) else t
            for n, t in checkpoints.items()
        }
        x = kept(x, 8, entries, **tables)
    before = {n: t.clone() if torch.is_tensor(t) else t for n, t in x.items()}
    on_device: Call = to(x, device)
    if device != "cpu":  # a copy to a GPU lies end to end
        states = on_device["initial_state"]
        room = torch.zeros(len(states), states[0].numel() + 24, dtype=states.dtype, device=device)
        on_device["initial_state"] = room[:, :-24].view(states.shape).copy_(states)
    o = prefill_gated_delta_rule(**on_device)
    check(to(on_device, "cpu"), before, o.cpu())


def _prefill(variant: Any, i: int, device: str) -> None:
    V = 64 if variant.tile_v == 64 and i % 2 else 128
    pool, entries = getattr(torch, variant.pool), (torch.float32, torch.bfloat16)[i % 2]
    whole = plan.Plan(ForwardChoice(variant.tile_v, variant.solves))
    with mock.patch.object(plan, "forward", return_value=whole):
        run(INPUTS[i], (variant.K, V), torch.bfloat16, device, pool, entries, variant.keeps)


CASES = (
    Cases(("gdn.fused_fwd",), _prefill, range(len(INPUTS)), of=lambda variant: variant.pool != ""),
)
