"""Vertical-slash attention: its gradients by hand, who holds what, and a ring of ranks, in fp64."""

from typing import NamedTuple

import pytest
import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reference import sparse_ring, sparse_ring_emulated
from reference.sparse_ring import BLOCK, Index
from tests.compare import assert_close

EXACT = 1e-12
LAYOUTS = ("contiguous", "zigzag", "striped-1", "striped-64", "striped-128")


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    index: Index
    seqlen: int


def make(T: int, heads: tuple[int, int] = (2, 1), density: float = 0.2, seqlen: int = 0) -> Case:
    """Each head has its own lines, many or few; every one has diagonal 0."""
    H, Hk = heads
    q, k, v, do = (torch.randn(1, T, h, 8, dtype=torch.float64) for h in (H, Hk, Hk, H))
    chance = density * torch.arange(1, H + 1)[:, None] / H
    columns = torch.rand(1, H, T) < chance / 4
    diagonals = torch.rand(1, H, T // BLOCK) < chance
    diagonals[..., 0] = True
    dlse = torch.randn(1, H, T, dtype=torch.float64)
    dlse[..., seqlen or T :] = 0  # the LSE of a row that sees nothing is a constant
    return Case(q, k, v, do, dlse, Index(columns, diagonals), seqlen or T)


def by_autograd(x: Case) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    o, lse = sparse_ring.attention(*leaves, sparse_ring.mask(x.index, x.seqlen))
    seen = lse > -torch.inf
    loss = (o * x.do).sum() + (lse[seen] * x.dlse[seen]).sum()
    return o.detach(), lse.detach(), torch.autograd.grad(loss, leaves)


def check_ring(x: Case, held: Tensor, inner: int | None = None) -> None:
    want_o, want_lse, want = by_autograd(x)
    done = sparse_ring_emulated.ring(x.q, x.k, x.v, x.index, held, inner, x.seqlen)
    assert_close("o", done.o, want_o, EXACT)
    torch.testing.assert_close(done.lse, want_lse, rtol=EXACT, atol=EXACT)
    got = sparse_ring_emulated.ring_backward(
        x.q, x.k, x.v, x.index, held, done, x.do, x.dlse, inner, x.seqlen
    )
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert_close(name, a, b, EXACT)


def test_all_diagonals_are_causal_attention():
    x = make(192, heads=(4, 2), density=10)
    assert x.index.diagonals[:, -1].all()
    o, _ = sparse_ring.attention(x.q, x.k, x.v, sparse_ring.mask(x.index))
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    want = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    last = x.index.diagonals.all(-1).all(0)  # the heads that are dense
    assert_close("o", o.transpose(1, 2)[:, last], want[:, last], EXACT)


def test_the_mask_is_what_its_words_say():
    x = make(256)
    seen = sparse_ring.mask(x.index, 200)
    for h, i, j in torch.randint(256, (500, 3)).remainder(torch.tensor([2, 256, 256])).tolist():
        line = x.index.diagonals[0, h, max(0, i // 64 - j // 64)] or x.index.columns[0, h, j]
        assert seen[0, h, i, j] == (j <= i < 200 and bool(line))


@pytest.mark.parametrize("seqlen", [0, 1, 100])
def test_gradients_by_hand_are_those_of_autograd(seqlen):
    x = make(128, heads=(4, 2), seqlen=seqlen)
    o, lse, want = by_autograd(x)
    delta = sparse_ring.delta(o, x.do, x.dlse)
    seen = sparse_ring.mask(x.index, x.seqlen)
    got = sparse_ring.attention_backward(x.q, x.k, x.v, seen, lse, delta, x.do)
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert_close(name, a, b, EXACT)


def test_autograd_agrees_with_finite_differences():
    x = make(64, heads=(2, 1), seqlen=5)
    seen = sparse_ring.mask(x.index, 5)[..., :6, :6]
    leaves = [t[:, :6, :, :3].clone().requires_grad_() for t in (x.q, x.k, x.v)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = sparse_ring.attention(q, k, v, seen)
        return o, lse[..., :5]

    assert torch.autograd.gradcheck(run, leaves)


def test_the_parts_of_a_row_merge_to_the_whole_however_they_are_cut():
    x = make(128, density=1)
    seen = sparse_ring.mask(x.index)
    want = sparse_ring.attention(x.q, x.k, x.v, seen)
    o, lse = torch.zeros_like(x.q), torch.full((1, 2, 128), -torch.inf, dtype=torch.float64)
    for keys in torch.arange(128).split([1, 63, 0, 64]):  # many rows see nothing of the last part
        part = sparse_ring.attention(x.q, x.k[:, keys], x.v[:, keys], seen[..., keys])
        o, lse = sparse_ring_emulated.merge(o, lse, *part)
    assert_close("o", o, want[0], EXACT)
    assert_close("lse", lse, want[1], EXACT)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", range(1, 9))
def test_every_token_has_one_place(layout, world):
    T = 256 * world
    held = sparse_ring.positions(layout, world, T)
    assert held.shape == (world, 256)
    assert held.flatten().sort().values.tolist() == list(range(T))
    x = torch.randn(2, T, 3)
    assert torch.equal(sparse_ring.unshard(sparse_ring.shards(x, held), held), x)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("contiguous", "0011"), ("zigzag", "0110"), ("striped-64", "0101"), ("striped-128", "0011")],
)
def test_blocks_are_dealt_as_the_layout_says(layout, ranks):
    held = sparse_ring.positions(layout, 2, 256)
    assert [int((held == b * BLOCK).nonzero()[0, 0]) for b in range(4)] == [int(r) for r in ranks]


RINGS = [(world, n) for world in range(1, 9) for n in range(1, world + 1) if world % n == 0]


@pytest.mark.parametrize(("world", "inner"), RINGS)
def test_each_rank_meets_each_chunk_once_and_the_diagonal_first(world, inner):
    steps = list(sparse_ring_emulated.turns(list(range(world)), inner))
    for r in range(world):
        met = [owners[r] for _, _, owners in steps]
        assert sorted(met) == list(range(world))
        assert met[0] == r
        for (o, i, _), owner in zip(steps, met, strict=True):
            node = (r // inner - o) % (world // inner)
            assert owner == node * inner + (r % inner - i) % inner


@pytest.mark.parametrize("stripe", [64, 128])
@pytest.mark.parametrize(("world", "inner"), RINGS)
def test_a_ring_of_stripes_is_attention(world, inner, stripe):
    T = world * 128
    check_ring(make(T, seqlen=T - 70), sparse_ring.positions(f"striped-{stripe}", world, T), inner)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped-1"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_ring_of_other_layouts_is_attention(world, layout):
    T = world * 128
    check_ring(make(T, heads=(4, 2)), sparse_ring.positions(layout, world, T))


@pytest.mark.parametrize("density", [0, 0.05, 10])
def test_few_lines_and_all_lines(density):
    """With one diagonal most steps of a ring see nothing; with all of them no column is alone."""
    x = make(256, density=density)
    check_ring(x, sparse_ring.positions("striped-64", 4, 256), 2)


def test_columns_everywhere():
    x = make(256)
    x.index.columns[:] = True
    check_ring(x, sparse_ring.positions("striped-64", 4, 256), 2)
    x.index.diagonals[:] = True  # each pair counts once
    check_ring(x, sparse_ring.positions("striped-64", 4, 256), 2)


def test_the_order_of_a_gradients_sum_around_a_double_ring():
    """Rank 4 of 2 x 3: its own node first, each node's part from zero."""
    order = [
        r
        for _, _, owners in sparse_ring_emulated.turns(list(range(6)), 3)
        for r in range(6)
        if owners[r] == 4
    ]
    assert order == [4, 5, 3, 1, 2, 0]


def test_heads_of_a_group_share_their_keys():
    x = make(128, heads=(4, 2))
    o, _ = sparse_ring.attention(x.q, x.k, x.v, sparse_ring.mask(x.index))
    per_head = [rearrange(t, "b t h d -> h b t 1 d") for t in (x.q, x.k, x.v)]
    for h in range(4):
        q, k, v = per_head[0][h], per_head[1][h // 2], per_head[2][h // 2]
        alone, _ = sparse_ring.attention(q, k, v, sparse_ring.mask(x.index)[:, h : h + 1])
        assert_close(f"head {h}", o[:, :, h : h + 1], alone, EXACT)
