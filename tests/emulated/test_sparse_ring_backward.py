"""The kernels of the backward, emulated: all launches of all ranks of a ring."""

import pytest
import torch

from qla_kernels.lab.selftest.sparse_ring_backward import backward, case, check
from qla_kernels.sparse_ring import ContiguousLayout, StripedLayout, launch_backward

pytestmark = [pytest.mark.usefixtures("seeds"), pytest.mark.usefixtures("poison")]

ALONE = StripedLayout(1)


def test_more_ranks_and_heads():
    for layout, heads in (
        (ContiguousLayout(3), (3, 3)),
        (StripedLayout(3), (8, 1)),
        (ALONE, (34, 1)),
    ):
        x = case(layout, 128, heads, dtype=torch.float16, B=2)
        check(x, backward(x))


@pytest.mark.parametrize("seed", range(6))
def test_interleavings(seed, seeds):
    """Single diagonals: the halves of a tile mostly see different blocks."""
    seeds["seed"] = seed
    x = case(ALONE, 768, dtype=torch.float16, share=0.25)
    check(x, backward(x))


@pytest.mark.parametrize("seqlen", [1, 63, 65, 128, 129])
def test_any_length(seqlen):
    x = case(ALONE, 256, dtype=torch.float16, seqlen=seqlen)
    check(x, backward(x))


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("columns", [0, 1, 384])
def test_any_lines(share, columns):
    """The diagonal alone, or every one; no columns, or all."""
    x = case(ALONE, 384, dtype=torch.float16, share=share, columns=columns)
    check(x, backward(x))


@pytest.mark.parametrize("slices", [2, 4])
def test_slices_of_the_queries(slices, monkeypatch):
    monkeypatch.setattr(launch_backward, "ROWS_A_SLICE", 384 // slices)
    x = case(ALONE, 384, dtype=torch.float16, columns=200)
    check(x, backward(x))


def test_scores_far_above_and_below_those_seen():
    """What is not seen may be infinite before it is hidden."""
    x = case(ALONE, 256, dtype=torch.float16, columns=100, size=200.0)
    check(x, backward(x))


def test_strides_are_read_in_place():
    x = case(ALONE, 256, (2, 2), dtype=torch.float16)
    want = backward(x)
    q, k, v = torch.cat([x.q, x.k, x.v], 2).split((2, 2, 2), 2)
    do = x.do.transpose(1, 2).contiguous().transpose(1, 2)
    assert all(map(torch.equal, backward(x._replace(q=q, k=k, v=v, do=do)), want))


def test_a_gradient_comes_in_any_strides():
    x = case(ALONE, 128, dtype=torch.float16)
    one = x.do.new_ones(()).expand(x.do.shape)  # o.sum().backward()
    want = backward(x._replace(do=one.contiguous()))
    assert all(map(torch.equal, backward(x._replace(do=one)), want))
