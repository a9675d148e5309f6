"""Calls that verify draft tokens, and what they must produce.

Everything is fp32, as in gdn_recurrent.py. Where a pool has 16 bits, a token whose parent is not
the token before starts from a rounded state, so that its truth starts from what was kept.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from qla_kernels import verify_gated_delta_rule
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.compare import assert_close
from qla_kernels.lab.selftest.gdn_calls import Call
from qla_kernels.lab.selftest.gdn_recurrent import ROUNDING, STATE, decode
from qla_kernels.runtime.cpu import reference

ROUNDED_PARENTS = 4 * ROUNDING[torch.bfloat16]  # a few rounded states, one after the other


def drafted(
    x: Call,
    slots: list[list[int]] | list[int],
    num_slots: int,
    dtype: torch.dtype = torch.float32,
    **others: Any,
) -> Call:
    """Returns the call `x` on a pool; `slots` is state_indices, of one dimension or two."""
    h0 = x["initial_state"]
    pool = torch.randn(num_slots, *h0.shape[1:]).to(dtype)
    found = {**x, "initial_state": pool, "state_indices": torch.tensor(slots)}
    if (accepted := others.pop("accepted", None)) is not None:
        found["num_accepted_tokens"] = torch.tensor(accepted)
    if (rows := others.pop("rows", None)) is not None:
        steps = others.pop("steps")
        found["checkpoints"] = torch.randn(max(rows) + 2, steps, *h0.shape[1:]).to(dtype)
        found["checkpoint_indices"] = torch.tensor(rows)
    if (parents := others.pop("parents", None)) is not None:
        found["parents"] = torch.tensor(parents)
    return {**found, **others}


def spans(x: Call) -> list[tuple[int, int, int]]:
    """Returns the batch row, the first token and the end of each sequence."""
    if (bounds := x.get("cu_seqlens")) is None:
        return [(n, 0, x["q"].shape[1]) for n in range(x["q"].shape[0])]
    ends = bounds.tolist()
    return [(0, a, b) for a, b in itertools.pairwise(ends)]


def check_drafts(x: Call, before: Call, o: Tensor) -> None:
    """Compares with fp64, on the CPU; `before` has what x's tensors held before the call."""
    gdn, null, v_first = reference().gdn, x.get("null_slot", -1), x.get("state_v_first")
    pool, kept = before["initial_state"], x.get("checkpoints")
    indices, parents = x["state_indices"], x.get("parents")
    limit = STATE if pool.dtype == torch.float32 else ROUNDING[pool.dtype]
    if parents is not None and pool.dtype != torch.float32:
        limit = ROUNDED_PARENTS
    o_limit = max(ROUNDING[o.dtype], limit if parents is not None else 0)
    want_pool = pool.clone()
    want_kept = None if kept is None else before["checkpoints"].clone()
    owned = torch.zeros(o.shape[:2], dtype=torch.bool)
    truth = torch.zeros(o.shape, dtype=torch.float64)
    for n, (b, first, end) in enumerate(spans(x)):
        table = indices[n].tolist() if indices.dim() == 2 else [int(indices[n])]
        start = table[int(x["num_accepted_tokens"][n]) - 1 if "num_accepted_tokens" in x else 0]
        row = int(x["checkpoint_indices"][n]) if kept is not None else 0
        if not null < start < len(pool) or row < 0:
            continue
        owned[b, first:end] = True
        at = slice(b, b + 1), slice(first, end)
        q, k, v, g, beta = (x[name][at].double() for name in ("q", "k", "v", "g", "beta"))
        if x.get("use_qk_l2norm_in_kernel"):
            q, k = gdn.l2norm(q), gdn.l2norm(k)
        if x.get("use_gate_in_kernel"):
            bias = x.get("dt_bias")
            g = gdn.gate(g, x["A_log"].double(), None if bias is None else bias.double())
        if x.get("use_beta_sigmoid_in_kernel"):
            beta = gdn.beta_sigmoid(beta)
        h0 = pool[start : start + 1].double()
        tree = None if parents is None else parents[n : n + 1]
        truth[at], states = gdn.draft_recurrent(
            q, k, v, g, beta, tree, x.get("scale"), h0.mT if v_first else h0
        )
        after = (states[0].mT if v_first else states[0]).float()
        if want_kept is not None:
            assert kept is not None, "they come together"
            assert_close("checkpoints", kept[row, : end - first], after, limit)
            want_kept[row, : end - first] = kept[row, : end - first]
        elif indices.dim() == 2:
            for t, slot in enumerate(table[: end - first]):
                if null < slot < len(pool):
                    assert_close(f"slot {slot}", x["initial_state"][slot], after[t], limit)
                    want_pool[slot] = x["initial_state"][slot]
    assert_close("o", o[owned], truth[owned], o_limit)
    assert not o[~owned].any(), "rows of skipped sequences, or of none, are not 0"
    same = torch.equal(x["initial_state"], want_pool)
    assert same, "a slot of the pool was written that no token names"
    if want_kept is not None:
        assert torch.equal(x["checkpoints"], want_kept), "another entry was written"


def run(x: Call, device: str = "cpu") -> None:
    """Runs a call and checks it."""
    before = {n: t.clone() if torch.is_tensor(t) else t for n, t in x.items()}
    given: Call = to(x, device)
    o = verify_gated_delta_rule(**given)
    done = to(given, "cpu")
    check_drafts(done, before, o.cpu())


def _verify(variant: Any, given: tuple[Any, ...], device: str) -> None:
    lengths, V, slots, options, v_first = given
    x = decode(lengths, dtype_of(variant), (variant.K, V), tokens=3, state_v_first=v_first)
    run(drafted(x, slots, 14, getattr(torch, variant.state), **options), device)


CHAINS = [[3, 4, 5, 6, 7], [0, 1, 2, 8, 9], [-1] * 5, [10, -1, 11, 12, -1]]
TREE = [[-1, -1, 0, 1, -1, 2], [-1, 0, 1, 2, 3, 4], [0] * 6]

INPUTS: tuple[tuple[Any, ...], ...] = (
    ([5, 2, 1, 3], 128, CHAINS, {"accepted": [2, 1, 1, 3]}),
    ([5, 5, 5], 64, CHAINS[:3], {"null_slot": 0, "accepted": [5, 3, 1]}),
    (None, 128, CHAINS[:3], {}),
    ([4, 0, 6], 64, [7, -1, 2], {"rows": [1, 0, 2], "steps": 6}),
    ([6, 5, 3], 128, [7, 3, 0], {"rows": [2, 0, -1], "steps": 6, "parents": TREE}),
    (None, 64, [0, 3, 2], {"null_slot": 0}),
)

CASES = (
    Cases(
        ("gdn.verify",),
        _verify,
        [(*given, v_first) for given in INPUTS for v_first in (False, True)],
    ),
)
