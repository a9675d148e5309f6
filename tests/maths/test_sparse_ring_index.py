"""Which lines are chosen: as few as hold the target, whatever the masses look like."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference.sparse_ring import BLOCK, mask, scores
from reference.sparse_ring_index import Budget, masses, need, observed, select

TOTAL = 1 << 30


def inputs(T: int, outliers: int = 3, H: int = 2) -> tuple[Tensor, Tensor]:
    """Keys and queries around a mean, and a few keys that every query likes."""
    generator = torch.Generator().manual_seed(T)
    mean = torch.randn(H, 16, generator=generator, dtype=torch.float64)
    q, k = (mean + torch.randn(1, T, H, 16, generator=generator).double() for _ in range(2))
    k[:, torch.randperm(T, generator=generator)[:outliers]] += 2 * mean
    return q, k


def test_the_window_is_the_last_complete_block():
    assert [observed(n) for n in (1, 63, 64, 127, 128, 200)] == [
        range(1), range(63), range(64), range(64), range(64, 128), range(128, 192)
    ]  # fmt: skip


@pytest.mark.parametrize("seqlen", [1, 63, 64, 100, 256])
def test_masses_are_the_windows_attention(seqlen):
    q, k = inputs(256)
    m = masses(q, k, seqlen)
    rows = observed(seqlen)
    causal = torch.ones(256, 256).tril().bool()
    P = scores(q, k, None).masked_fill(~causal, -torch.inf).softmax(-1)
    want = P[:, :, rows.start : rows.stop].mean(2) * TOTAL
    assert (m - want).abs().max() <= 0.5
    assert (m.sum(-1) - TOTAL).abs().max() <= 128  # 256 roundings of at most a half
    assert not m[..., rows.stop :].any()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    T=st.sampled_from([64, 128, 320]),
    cut=st.integers(0, 63),
    recall=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    estimator=st.sampled_from(["residual", "independent"]),
    max_v=st.sampled_from([4, 9, 4096]),
    sink=st.sampled_from([0, 4]),
)
def test_fewest_lines_that_hold_the_target(T, cut, recall, estimator, max_v, sink):
    m = masses(*inputs(T), T - cut)
    budget = Budget(recall, recall, max_v, sink=sink, window=0, estimator=estimator)
    index = select(m, T - cut, budget)
    last = observed(T - cut).start // BLOCK
    for mine, columns, diagonals in zip(m[0], index.columns[0], index.diagonals[0], strict=True):
        tile = mine.unflatten(-1, (-1, BLOCK))
        target = need(int(mine.sum()), recall)
        of_columns, chosen = mine * columns, columns.nonzero()[:, 0].tolist()
        assert chosen[:sink] == list(range(min(sink, len(chosen))))
        assert len(chosen) <= max_v
        free = [j for j in chosen if j >= sink]
        if free:  # without its lightest free column it would not reach the target
            assert of_columns.sum() - min(int(mine[j]) for j in free) < max(target, 1)
        left, start = tile.sum(-1), 0
        if estimator == "residual":
            left, start = left - of_columns.unflatten(-1, (-1, BLOCK)).sum(-1), of_columns.sum()
        at = [last - d for d in diagonals.nonzero()[:, 0].tolist()]
        assert at[0] == last  # the block itself
        held = start + sum(int(left[b]) for b in at if b >= 0)
        assert held >= target
        further = [int(left[b]) for b in at[1:] if b >= 0]  # without diagonal 0, which is free
        if len(further) > 1:
            assert start + sum(further) - min(further) < target


def test_the_line_that_crosses_the_target_is_taken():
    m = torch.zeros(1, 1, 128, dtype=torch.long)
    m[..., 10], m[..., 20], m[..., 30] = 50, 25, 25
    for recall, want in ((0.5, [10]), (0.51, [10, 20]), (0.75, [10, 20]), (0.76, [10, 20, 30])):
        index = select(m, 128, Budget(recall, 0.0, sink=0, estimator="independent"))
        assert index.columns[0, 0].nonzero()[:, 0].tolist() == want


def test_a_head_that_looks_at_one_key_gets_it():
    """A count of sums below the target would be no line at all here."""
    m = torch.zeros(1, 1, 128, dtype=torch.long)
    m[..., 7] = TOTAL
    index = select(m, 128, Budget(sink=0))
    assert index.columns.nonzero()[:, 2].tolist() == [7]
    assert index.diagonals.nonzero()[:, 2].tolist() == [0, 1]  # the window; nothing is left over


def test_ties_go_to_the_lower_index():
    m = torch.full((1, 1, 256), 1 << 20)
    m[..., 3:] = 0
    m[..., [70, 100, 150]] = 1 << 22
    index = select(m, 256, Budget(recall_v=0.5, sink=0, estimator="independent"))
    assert index.columns.nonzero()[:, 2].tolist() == [70, 100]


def test_a_vertical_leaves_no_ghost_diagonal():
    """Pooled over a tile, a column looks like a diagonal; what is left without it does not."""
    m = torch.full((1, 1, 1024), TOTAL // 2**14)
    m[..., 5 * 64 + 9] = TOTAL // 2
    diagonal = 1024 // 64 - 1 - 5
    ghost = select(m, 1024, Budget(0.5, 0.5, estimator="independent"))
    clean = select(m, 1024, Budget(0.5, 0.5, estimator="residual"))
    assert ghost.diagonals[0, 0, diagonal]
    assert not clean.diagonals[0, 0, diagonal]
    assert clean.columns[0, 0, 5 * 64 + 9]


def test_forced_lines_are_kept_whatever_the_caps():
    m = masses(*inputs(256), 256)
    index = select(m, 256, Budget(0.0, 0.0, max_v=4, max_s=1, sink=4, window=3))
    for columns, diagonals in zip(index.columns[0], index.diagonals[0], strict=True):
        assert columns.nonzero()[:, 0].tolist() == [0, 1, 2, 3]
        assert diagonals.nonzero()[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("gap", [0, 1, 3])
def test_short_holes_are_closed(gap):
    m = torch.zeros(1, 1, 640, dtype=torch.long)
    for d, mass in ((1, 8), (4, 8), (9, 8)):  # holes of 2 and 4 diagonals
        m[..., (9 - d) * 64] = mass
    budget = Budget(0.0, 1.0, sink=0, window=1, estimator="independent", gap_close=gap)
    found = select(m, 640, budget).diagonals.nonzero()[:, 2].tolist()
    holes = [b - a - 1 for a, b in pairwise(found)]
    assert {0, 1, 4, 9} <= set(found)
    assert [h for h in holes if h] == [h for h in (2, 4) if h > gap]


def test_the_recall_of_the_window_is_that_of_its_mask():
    q, k = inputs(512, outliers=6)
    m = masses(q, k)
    index = select(m, 512, Budget(0.8, 0.9))
    causal = torch.ones(512, 512).tril().bool()
    P = scores(q, k, None).masked_fill(~causal, -torch.inf).softmax(-1)
    got = (P * mask(index))[:, :, -64:].sum((-1, -2)) / 64
    assert (got >= 0.9 - 1e-6).all()
    assert (mask(index).float().mean((-1, -2)) < 0.4).all()  # and not by taking everything
