"""The backward's kernels on a GPU: all launches of all ranks of a ring, in turn on one device."""

import pytest
import torch

from qla_kernels.lab.selftest.sparse_ring_backward import backward, case, check
from qla_kernels.sparse_ring import StripedLayout, launch_backward
from qla_kernels.sparse_ring.index import known_index
from qla_kernels.sparse_ring.patterns import FixedVerticalSlash
from qla_kernels.sparse_ring.route import Chunk
from qla_kernels.sparse_ring.shard import Saved, shard_of

pytestmark = pytest.mark.hopper

GPU = "cuda"
ALONE = StripedLayout(1)


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (6, 2), (3, 3)])
def test_heads_and_batches(heads):
    x = case(ALONE, 640, heads, 128, B=2, device=GPU)
    check(x, backward(x))


@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 127, 128, 129, 1000])
def test_any_length(seqlen):
    x = case(ALONE, 1024, D=128, seqlen=seqlen, device=GPU)
    check(x, backward(x))


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("columns", [0, 1, 127, 1280])
def test_any_lines(share, columns):
    x = case(ALONE, 1280, D=128, share=share, columns=columns, device=GPU)
    check(x, backward(x))


@pytest.mark.parametrize("slices", [2, 3, 4])
def test_slices_of_the_queries(slices, monkeypatch):
    monkeypatch.setattr(launch_backward, "ROWS_A_SLICE", 1536 // slices)
    x = case(ALONE, 1536, D=128, columns=300, device=GPU)
    check(x, backward(x))


@pytest.mark.parametrize("size", [0.0, 20.0, 200.0])
def test_scores_of_any_size(size):
    x = case(ALONE, 1024, D=128, columns=200, size=size, device=GPU)
    check(x, backward(x))


def test_strides_are_read_in_place():
    x = case(ALONE, 512, (2, 2), 128, device=GPU)
    want = backward(x)
    q, k, v = torch.cat([x.q, x.k, x.v], 2).split((2, 2, 2), 2)
    do = x.do.transpose(1, 2).contiguous().transpose(1, 2)
    assert all(map(torch.equal, backward(x._replace(q=q, k=k, v=v, do=do)), want))
    one = x.do.new_ones(()).expand(x.do.shape)  # o.sum().backward()
    want = backward(x._replace(do=one.contiguous()))
    assert all(map(torch.equal, backward(x._replace(do=one)), want))


@pytest.mark.parametrize("layout", [ALONE, StripedLayout(4, 64)], ids=str)
def test_repeats_bitwise(layout):
    """200 runs that keep every SM busy: a missing fence shows as a rare difference."""
    x = case(layout, 2048 // layout.world, (16, 2), 128, columns=500, share=0.4, device=GPU)
    want = backward(x)
    check(x, want)
    for _ in range(200):
        assert all(map(torch.equal, backward(x), want))


def test_more_than_two_to_the_31_elements():
    """Of q, of dQ and of dK: the last tile, as if it were alone."""
    if torch.cuda.mem_get_info()[0] < 64 * 2**30:
        pytest.skip("needs 64 GiB")
    heads, tile = 64, 128
    L = 2**31 // (heads * 128) + tile
    q, k, v, do = (torch.randn(1, L, heads, 128, device=GPU, dtype=torch.bfloat16) for _ in "qkvo")
    lines = known_index(FixedVerticalSlash([], [0]), 1, heads, L, GPU)

    def last(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = [t[:, -rows:] for t in (q, k, v, do)]
        bits = lines.d_bits[..., : -(-rows // 2048)].contiguous()
        shard = shard_of(ALONE, 0, rows, rows, 0.1, (lines.v_idx, lines.v_cnt, bits))
        lse, delta = (torch.full((1, heads, rows), n, device=GPU) for n in (10.0, 0.5))
        around = (x[1][None], x[2][None], Saved(lse, delta, x[3]))
        dq = torch.empty(x[0].shape, device=GPU)
        dkv = torch.empty(1, 2, *x[1].shape, device=GPU)
        own = [Chunk(0, 0, 0, 0)]
        visits = shard.visits(0)
        launch_backward.backward_queries(shard, x[0], *around, visits, dq, True, None, None)
        launch_backward.backward_keys(shard, x[0], *around, own, dkv, True)
        return dq[:, -tile:], dkv[:, :, :, -tile:]

    assert all(map(torch.equal, last(L), last(tile)))


def test_does_not_synchronise():
    x = case(ALONE, 512, D=128, device=GPU)
    want = backward(x)  # compiles, and copies small tables
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = backward(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, got, want))
