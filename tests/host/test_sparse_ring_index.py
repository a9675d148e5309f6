"""The choice of lines by sorts and sums, against the loops of the reference; and the index."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qla_kernels.sparse_ring import (
    Dense,
    FixedVerticalSlash,
    StripedLayout,
    VerticalSlash,
    VSIndex,
    build_index,
)
from qla_kernels.sparse_ring.select import Candidates, cut, select
from qla_kernels.sparse_ring.shapes import BLOCK
from reference import sparse_ring, sparse_ring_index
from reference.sparse_ring_index import Budget

UNIT = 1 << 30


def some_masses(T: int, seqlen: int, kind: str) -> Tensor:
    """int32 [1, 4, T] as of a window: nothing after it, 2^30 together."""
    generator = torch.Generator().manual_seed(T + seqlen)
    x = torch.rand(1, 4, T, generator=generator).double()
    if kind == "outliers":
        x += 30 * (torch.rand(1, 4, T, generator=generator) < 0.02)
    if kind == "one sink":
        x[..., 2] += 20 * T
    if kind == "ties":
        x = x.round()
    x[..., sparse_ring_index.observed(seqlen).stop :] = 0
    return (x / x.sum(-1, keepdim=True).clamp(min=1e-9) * UNIT).round().int()


def lines(index: VSIndex) -> tuple[Tensor, Tensor]:
    columns = torch.zeros(*index.v_idx.shape[:2], index.T + 1, dtype=torch.bool)
    return columns.scatter(-1, index.v_idx.long(), True)[..., : index.T], index.diagonals()


def selected(mass: Tensor, seqlen: int, pattern: VerticalSlash, world: int) -> VSIndex:
    """As `world` ranks do it: each cuts its own columns, and all are put together."""
    T, layout = mass.shape[-1], StripedLayout(world)
    found, tiles = [], []
    for rank in range(world):
        position = layout.positions(T, rank)
        mine = mass[..., position]
        tile = mine.view(*mine.shape[:2], -1, BLOCK).sum(-1, dtype=torch.int32)
        found.append(cut(mine, position, tile, T, pattern))
        tiles.append(tile)
    together = Candidates(*(torch.cat(x, -1) for x in zip(*found, strict=True)))
    order = layout.perm(T)[::BLOCK].argsort()
    return select(together, torch.cat(tiles, -1)[..., order], seqlen, T, pattern)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    T=st.sampled_from([512, 1024]),
    seqlen=st.sampled_from([1, 63, 64, 65, 200, 512]),
    kind=st.sampled_from(["flat", "outliers", "one sink", "ties"]),
    recall=st.sampled_from([(0.0, 0.0), (0.3, 0.9), (0.9, 0.3), (1.0, 1.0)]),
    estimator=st.sampled_from(["residual", "independent"]),
    caps=st.sampled_from([(4096, None), (8, 3), (1, 1)]),
    forced=st.sampled_from([(4, 2), (0, 0)]),
    gap_close=st.sampled_from([0, 2, 1000]),
    world=st.sampled_from([1, 2, 4]),
)
def test_sorts_choose_what_loops_choose(
    T, seqlen, kind, recall, estimator, caps, forced, gap_close, world
):
    sink, window = min(forced[0], caps[0]), min(forced[1], caps[1] or forced[1])
    options = (*recall, *caps, sink, window, estimator, 8, gap_close)
    mass = some_masses(T, seqlen, kind)
    want = sparse_ring_index.select(mass.long(), seqlen, Budget(*options))
    index = selected(mass, seqlen, VerticalSlash(*options), world)
    columns, active = lines(index)
    assert torch.equal(columns, want.columns)
    assert torch.equal(active, want.diagonals)
    assert torch.equal(index.v_cnt, columns.sum(-1, dtype=torch.int32))
    index.check("test")


@pytest.mark.parametrize("seqlen", [1, 64, 100, 256])
def test_an_index_is_built_of_what_the_reference_measures(seqlen):
    mean = torch.randn(4, 16).double()
    q, k = torch.randn(2, 256, 4, 16) + mean, torch.randn(2, 256, 2, 16) + mean[::2]
    index = build_index(q, k, VerticalSlash(0.5, 0.7), seqlen=seqlen)
    mass = sparse_ring_index.masses(q, k.repeat_interleave(2, 2), seqlen)
    want = sparse_ring_index.select(mass, seqlen, Budget(0.5, 0.7))
    assert torch.equal(lines(index)[0], want.columns)
    assert torch.equal(lines(index)[1], want.diagonals)
    rows = sparse_ring_index.observed(seqlen)
    S = sparse_ring.scores(q, k.repeat_interleave(2, 2), None)
    P = S.masked_fill(~torch.ones(256, 256).tril().bool(), -torch.inf).softmax(-1)
    held = (P * index.to_mask())[:, :, rows.start : rows.stop].sum((-1, -2)) / len(rows)
    torch.testing.assert_close(index.window_recall.double(), held, atol=1e-5, rtol=0)


def test_an_index_says_what_its_mask_is():
    index = build_index(*torch.randn(2, 2, 512, 3, 8), VerticalSlash(0.3, 0.4))
    want = sparse_ring.Index(*lines(index))
    mask = sparse_ring.mask(want)
    assert torch.equal(index.to_mask(), mask)
    causal = 512 * 513 // 2
    torch.testing.assert_close(index.density(), mask.sum((-1, -2)).double() / causal)
    for b, row in enumerate(index.to_lists()):
        for h, (columns, active) in enumerate(row):
            assert columns == want.columns[b, h].nonzero()[:, 0].tolist()
            assert active == want.diagonals[b, h].nonzero()[:, 0].tolist()
            runs = sum(d - 1 not in active for d in active)
            assert index.runs()[b, h] == len(active) / runs


def test_an_index_of_half_a_million_tokens_is_below_a_megabyte():
    T, H = 524288, 32
    v_idx = torch.empty(1, H, 4096, dtype=torch.int32)
    d_bits = torch.empty(1, H, T // BLOCK // 32, dtype=torch.int32)
    head = torch.empty(1, H, dtype=torch.int32)
    assert VSIndex(v_idx, head, d_bits, head.float(), T).num_bytes == H * 17416


def test_lines_as_given():
    q, k = torch.randn(2, 2, 256, 2, 8)
    index = build_index(q, k, FixedVerticalSlash([[7, 3], []], [1]))
    assert index.to_lists()[1] == [([3, 7], [0, 1]), ([], [0, 1])]
    for kind in (torch.tensor, np.array):  # as an index or a file has them
        lines = FixedVerticalSlash([kind([7, 3]), kind([0])[:0]], kind([1]))
        assert lines == FixedVerticalSlash([[7, 3], []], [1])
        assert FixedVerticalSlash(kind([[7, 3], [5, 5]]), []).v_idx == ((3, 7), (5,))
    dense = build_index(q, k, Dense())
    assert dense.v_idx.shape == (2, 2, 0)
    assert (dense.density() == 1).all()
    assert (dense.window_recall == 1).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"recall_v": 1.1}, "recall_v is 1.1; need a number from 0 to 1"),
        ({"estimator": "both"}, "estimator is 'both'; need residual or independent"),
        ({"max_v": 3}, "max_v is 3; need at least 1, at least sink = 4, and at most 16384"),
        ({"max_v": 20000}, "max_v is 20000"),
        ({"max_s": 1}, "max_s is 1; need at least 1, and at least window = 2"),
        ({"kappa": -1}, "kappa is -1; need 0 to 1073741824; pass 0 for none"),
        ({"window": 1 << 31}, "window is 2147483648; need 0 to 1073741824; pass a smaller number"),
    ],
)
def test_a_budget_that_makes_no_sense(options, text):
    with pytest.raises(ValueError, match="VerticalSlash: ") as error:
        VerticalSlash(**options)
    assert text in str(error.value)


def test_contents_are_checked_when_asked(monkeypatch):
    from qla_kernels.sparse_ring import sparse_attention

    q, k, v = torch.randn(3, 1, 128, 2, 8)
    index = build_index(q, k, VerticalSlash())
    monkeypatch.setenv("QLA_CHECK", "1")
    sparse_attention(q, k, v, index=index)
    with pytest.raises(ValueError, match="v_idx is out of order"):
        sparse_attention(q, k, v, index=index._replace(v_idx=index.v_idx.flip(-1)))
    with pytest.raises(ValueError, match="a head without diagonal 0"):
        sparse_attention(q, k, v, index=index._replace(d_bits=index.d_bits & -2))
