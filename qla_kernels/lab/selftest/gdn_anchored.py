"""Steps of a pool of anchors and tails: its kernels, and what they must produce.

A step is given as tokens that each tail has before, tokens that are new, and what was appended
before the tail: whole chunks, an odd number of which puts the tail's first chunk to place 64. None
for the tail means a sequence of padding.
"""

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.anchored import launch
from qla_kernels.gdn.anchored.extend import Slots
from qla_kernels.gdn.anchored.ops import Rejection
from qla_kernels.gdn.anchored.pool import GdnPool
from qla_kernels.gdn.call import Call as Record
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.compare import assert_close, relative_l2
from qla_kernels.lab.selftest.gdn_calls import Call, small
from qla_kernels.lab.selftest.gdn_forward import FP32, RATIO, exact
from qla_kernels.tile.constants import CHUNK

Tails = list[tuple[int | None, int]]  # tokens in each tail, chunks before it

STEPS: tuple[tuple[Tails, int], ...] = (
    ([(0, 0), (1, 1), (15, 0), (62, 3)], 1),
    ([(63, 0), (64, 1), (None, 0), (64, 0), (71, 1)], 1),
    ([(0, 0), (61, 1), (62, 0), (None, 1), (70, 2)], 4),
    ([(56, 1), (57, 0), (16, 0), (65, 1), (31, 0)], 8),
    ([(None, 0)], 2),
)


class Step(NamedTuple):
    x: Call  # each sequence's tail and new tokens end to end, from its anchor
    pool: Slots
    call: Record  # the new tokens [B, T, ..]
    state_indices: Tensor


def step(
    tails: Tails, count: int, dtype: torch.dtype, sizes: tuple[int, int], heads: tuple[int, int]
) -> Step:
    """Returns a pool whose tails are filled, with NaN in all places that hold no token."""
    lengths = [(kept or 0) + count for kept, _ in tails]
    x = small(lengths, dtype, heads=heads, sizes=sizes, padding=0)
    x["initial_state"] *= 0.3
    num_slots = 2 * len(tails) + 1
    pool = GdnPool(num_slots, *heads, *sizes, dtype, "cpu").tensors
    for t in pool[:5]:
        t.fill_(torch.nan)
    pool.anchors.nan_to_num_()  # each anchor is a state
    slots = [-3 if kept is None else 2 * n + 1 for n, (kept, _) in enumerate(tails)]
    new, first = [], 0
    for n, (kept, before) in enumerate(tails):
        end = first + lengths[n]
        new.append([x[name][0, end - count : end] for name in ("q", "k", "v", "g", "beta")])
        if kept is not None:
            slot, places = slots[n], (torch.arange(kept) + before * CHUNK) % (2 * CHUNK)
            pool.anchors[slot] = x["initial_state"][n]
            for held, name in zip(pool[1:5], ("k", "v", "g", "beta"), strict=True):
                held[slot, places] = x[name][0, first : first + kept]
            pool.anchored[slot] = before * CHUNK
            pool.lengths[slot] = before * CHUNK + kept
        first = end
    q, k, v, g, beta = (torch.stack(each) for each in zip(*new, strict=True))
    call = Record(q, k, v, g, beta, sizes[0] ** -0.5)
    return Step(x, pool, call, torch.tensor(slots, dtype=torch.int32))


def run(given: Step, device: str) -> tuple[Tensor, Slots]:
    """Launches the step on a copy; returns o [B, T, HV, V] and the pool after it, on the CPU."""
    pool = Slots(*(to(deepcopy(t), device) for t in given.pool))  # with what lies between its rows
    call = Record(*to(tuple(given.call), device))
    o = launch.decode(pool, call, to(given.state_indices, device), len(pool.lengths) - 1)
    return o.cpu(), Slots(*(t.cpu() for t in pool))


def check(given: Step, tails: Tails, count: int, o: Tensor, after: Slots) -> None:
    """Compares with fp64: o of new tokens, anchors of chunks that were whole, and the numbers."""
    want, _ = exact(given.x)
    rounded, _ = exact(given.x, given.x["q"].dtype)
    ends = given.x["cu_seqlens"][1:].tolist()
    for n, (kept, before) in enumerate(tails):
        if kept is None:
            assert not o[n].any(), "results of padding are not 0"
            continue
        slot = int(given.state_indices[n])
        assert after.lengths[slot] == before * CHUNK + kept + count
        assert after.anchored[slot] == (before + kept // CHUNK) * CHUNK
        rows = slice(ends[n] - count, ends[n])
        limit = RATIO * relative_l2(rounded[0, rows], want[0, rows]) + FP32
        assert_close(f"o of sequence {n}", o[n], want[0, rows], limit)
        anchor = given.pool.anchors[slot]
        if kept < CHUNK:
            assert torch.equal(after.anchors[slot], anchor), "an anchor was written too early"
            continue
        first = ends[n] - kept - count
        chunk = {
            name: given.x[name][:, first : first + CHUNK] for name in ("q", "k", "v", "g", "beta")
        } | {"initial_state": given.x["initial_state"][n : n + 1]}
        (_, state), (_, near) = exact(chunk), exact(chunk, given.x["q"].dtype)
        limit = RATIO * relative_l2(near, state) + FP32
        assert_close(f"anchor of sequence {n}", after.anchors[slot], state[0], limit)
    used = given.state_indices[given.state_indices >= 0].long()
    others = torch.ones(len(after.lengths), dtype=torch.bool).index_fill_(0, used, False)
    for before_, after_ in zip(given.pool, after, strict=True):
        same = torch.equal(before_[others].nan_to_num(), after_[others].nan_to_num())
        assert same, "a slot of no sequence was written"


def _anchored(variant: Any, given: tuple[Tails, int], device: str) -> None:
    tails, count = given
    x = step(tails, count, dtype_of(variant), (variant.K, variant.tile_v), (1, 2))
    check(x, tails, count, *run(x, device))


def _rejected(variant: Any, sequences: int, device: str) -> None:
    """Takes back tokens of every other slot, and of sequences of padding, in both widths."""
    num_slots = 2 * sequences + 1
    lengths = torch.randint(8, 10**6, (num_slots + 1,), dtype=getattr(torch, variant.dtype))
    live = 2 * torch.randperm(sequences)
    for dtype in (torch.int32, torch.int64):
        slots = torch.stack((live, torch.full_like(live, num_slots)), 1).to(dtype).flatten()
        slots[1::8], slots[3::8], slots[5::8] = -1, num_slots + 1, torch.iinfo(torch.int32).max
        counts = torch.randint(0, 9, (2 * sequences, 2)).to(dtype)[:, 0]
        want = lengths.index_add(0, live, -counts[::2].to(lengths.dtype))
        room = to(lengths[:, None].repeat(1, 3), device)
        after = room[:, 1]  # as in pages of an engine
        given = to(slots, device), to(counts, device)
        launch.gdn_pool_reject(Rejection(after, after, *given, num_slots))
        assert torch.equal(after.cpu(), want)
        assert torch.equal(room[:, ::2].cpu(), lengths[:, None].expand(-1, 2))


CASES = (
    Cases(("gdn.anchored_fwd", "gdn.append_tokens"), _anchored, STEPS),
    Cases(("gdn.reject_tokens",), _rejected, (5, 100)),
)
