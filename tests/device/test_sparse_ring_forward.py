"""The sparse forward on a GPU: every rank of a ring in turn, on one device."""

import pytest
import torch

from qla_kernels.lab.selftest.sparse_ring_forward import (
    ALONE,
    AttentionCall,
    check,
    forward,
    lines,
    problem,
)
from qla_kernels.sparse_ring import Dense, FixedVerticalSlash, sparse_attention
from qla_kernels.sparse_ring.index import known_index
from qla_kernels.sparse_ring.layouts import ContiguousLayout, Layout, StripedLayout, ZigZagLayout

pytestmark = pytest.mark.hopper

LAYOUTS = [
    *(StripedLayout(world, stripe) for world in (1, 2, 3, 4, 8) for stripe in (64, 128)),
    *(layout(world) for world in (2, 3, 4, 8) for layout in (ContiguousLayout, ZigZagLayout)),
]


def on_gpu(T: int, pattern: FixedVerticalSlash | None = None, **others) -> AttentionCall:
    return problem(T, pattern, device="cuda", **others)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_ring(layout: Layout):
    x = on_gpu(layout.pad_len(1600), heads=(4, 2), D=128, seqlen=1570)
    for per_launch in (1, 3):
        check(x, *forward(x, layout, per_launch))


def test_error_does_not_grow_with_the_number_of_ranks():
    x = on_gpu(4096, heads=(2, 1), D=128)
    whole = forward(x, ALONE)[0].double()
    for world in (2, 8):
        o = forward(x, StripedLayout(world), 1)[0].double()
        assert ((o - whole).norm() / whole.norm()).item() < 2.5e-3  # of two roundings to bf16


@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 127, 128, 200, 1000])
def test_short_sequences(seqlen):
    x = on_gpu(-(-seqlen // 128) * 128, heads=(2, 2), D=128, seqlen=seqlen)
    check(x, *forward(x, ALONE))


def test_dense_is_causal_attention():
    q, k, v = (torch.randn(2, 1024, h, 128, device="cuda").bfloat16() for h in (4, 2, 2))
    o = sparse_attention(q, k, v, pattern=Dense())
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert ((o.transpose(1, 2).double() - want).norm() / want.norm()).item() < 3.5e-3


def test_a_head_of_each_kind():
    """Columns and diagonals very different by head: none, few, all."""
    x = on_gpu(2048, lines(2048, 4, (0, 0.001, 0.5, 1), (0, 1, 0.03, 0)), heads=(4, 1), D=128)
    check(x, *forward(x, ALONE))


def test_twice_the_same_bits():
    x = on_gpu(3072, heads=(4, 2), D=128)
    first = forward(x, StripedLayout(4), 2)
    for _ in range(20):
        again = forward(x, StripedLayout(4), 2)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_offsets_past_32_bits():
    """q has 2.2e9 elements; the last rows are those of a short call with the same keys."""
    T, H, tail = (1 << 20) + (1 << 15), 16, 1024
    pattern = FixedVerticalSlash(((),), ((0, 1),))
    q = torch.randn(1, T, H, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, T, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    whole = AttentionCall(q, k, v, known_index(pattern, 1, H, T, "cuda"), T)
    end = AttentionCall(
        *(x[:, -tail:] for x in (q, k, v)), known_index(pattern, 1, H, tail, "cuda"), tail
    )
    got, want = forward(whole, ALONE)[0][:, -tail:], forward(end, ALONE)[0]
    assert torch.equal(got[:, 128:], want[:, 128:])  # the first block of the short call sees less


def test_no_launch_waits_for_the_host_and_a_graph_records_it():
    x = on_gpu(1024, heads=(4, 2), D=128)
    index = x.lines
    want = sparse_attention(x.q, x.k, x.v, index=index)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = sparse_attention(x.q, x.k, x.v, index=index)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = sparse_attention(x.q, x.k, x.v, index=index)
    o.fill_(torch.nan)
    graph.replay()
    assert torch.equal(o, want)
