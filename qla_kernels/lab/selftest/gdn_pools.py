"""The cases of the kernels around a pool of states whose sequences are cut into segments."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn.launch import pools, segments
from qla_kernels.lab.selftest.cases import Cases
from qla_kernels.tile.constants import CHUNK

SLOTS = [4, -1, 6, 0, 9, -7, 2]  # of a pool of 9
SIZES = [(2, 128, 64, False), (3, 96, 192, True)]  # HV, K, V, and whether V comes first
LARGE = [(32, 128, 128, True), (64, 128, 128, False)]
LENGTHS = [600, 0, 64, 1300, 1]  # of sequences; tokens follow that are of none


def _pool_states(variant: Any, sizes: tuple[Any, ...], device: str) -> None:
    """Checks that states are gathered and put, bit for bit, and that no other number changes."""
    HV, K, V, v_first = sizes
    size, last = HV * K * V, (V, K) if v_first else (K, V)
    room = torch.randn(9, size + 24).to(getattr(torch, variant.pool))
    given, slots = room.to(device), torch.tensor(SLOTS, dtype=torch.int32)
    for null in (-1, 0):
        pool = given[:, :size].view(9, HV, *last)
        pool = pool.mT if v_first else pool
        known = (slots > null) & (slots < 9)
        places = pools.Places(pool, slots.to(device), slots.to(device), null, None)
        got = places.start_states()
        want = pool.cpu()[torch.where(known, slots, 0).long()].float()
        want[~known] = 0
        assert got.dtype == torch.float32
        assert torch.equal(got.cpu(), want)
        final = torch.randn(len(slots), HV, *last)
        final = final.mT if v_first else final
        changed = room[:, :size].view(9, HV, *last).clone()
        changed = changed.mT if v_first else changed
        changed[slots[known].long()] = final[known].to(room.dtype)
        places.take(final.to(device))
        assert torch.equal(pool.cpu(), changed)
        assert torch.equal(given[:, size:].cpu(), room[:, size:]), "a page has more than its state"
        room = given.cpu().clone()


def _segment_places(_: Any, given: tuple[Any, ...], device: str) -> None:
    most, every, first = given
    N, tokens = len(LENGTHS), sum(LENGTHS) + 30
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32 if every else torch.int64)
    ends, entries = (torch.randperm(20)[:N].int() for _ in range(2))
    chunks = None if first is None else torch.tensor(first, dtype=torch.int32)
    cut = segments.cut(torch.zeros(1, tokens, 2, device=device), bounds.to(device), most)
    first_chunks = None if chunks is None else chunks.to(device)
    state = torch.zeros(20, 2, 8, 8, device=device)
    kept = pools.Checkpoints(state, entries.to(device), first_chunks, every or 1 << 30)
    places = pools.Places(state, None, ends.to(device), -1, kept)
    found = places.of_segments(cut, bounds.to(device), tokens)
    assert found.kept is not None
    assert found.kept.chunks is not None
    got = [x.cpu() for x in (found.ends, found.kept.chunks, found.kept.entries)]
    where, last = cut.bounds.cpu(), cut.first_segment.cpu()
    for n, (a, b) in enumerate(pairwise(last.tolist())):
        for p in range(a, b):
            before = int(where[p] - bounds[n]) // CHUNK
            stop = kept.every if first is None else first[n]
            done = 0
            while 0 <= stop <= before > 0:
                stop, done = stop + kept.every, done + 1
            assert got[0][p] == (ends[n] if p == b - 1 else -1)
            assert got[1][p] == (stop - before if stop >= 0 else -1)
            assert stop < 0 or got[2][p] == entries[n] + done
    assert (got[0][last[-1] :] == -1).all()
    assert (got[1][last[-1] :] == -1).all()
    nothing: Tensor = places._replace(kept=None).of_segments(cut, bounds.to(device), tokens).ends
    assert torch.equal(nothing.cpu(), got[0])


PLACES = [(2, 4, None), (3, 0, [1, -1, 0, 7, 0]), (4, 2, [0, 1, -1, 3, 1])]
CASES = (
    Cases(("gdn.pool_states",), _pool_states, SIZES, LARGE),
    Cases(("gdn.segment_places",), _segment_places, PLACES),
)
