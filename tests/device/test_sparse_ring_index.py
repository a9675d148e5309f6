"""An index on a GPU: what fp64 and sorts find, the same bits each time, and no sync."""

import pytest
import torch
from torch import Tensor

from qla_kernels.lab.selftest.sparse_ring_index import (
    ONE,
    check_window,
    window,
)
from qla_kernels.sparse_ring import VerticalSlash, build
from qla_kernels.sparse_ring.groups import ALONE

pytestmark = pytest.mark.hopper

GPU = "cuda"


def index(q: Tensor, k: Tensor, pattern: VerticalSlash, seqlen: int) -> tuple[Tensor, ...]:
    return build.build(q, k, pattern, ONE, seqlen, q.shape[-1] ** -0.5, ALONE)[:4]


def heads(T: int, H: int = 4, Hk: int = 2, D: int = 128) -> tuple[Tensor, Tensor]:
    """Keys and queries around a mean, and some keys that every query likes."""
    mean = torch.randn(H, D)
    q = torch.randn(1, T, H, D) + mean
    k = torch.randn(1, T, Hk, D) + mean[:: H // Hk]
    k[:, torch.randperm(T)[: T // 200]] += mean[:: H // Hk]
    return q.bfloat16().to(GPU), k.bfloat16().to(GPU)


@pytest.mark.parametrize("size", [4.0, 20.0])
def test_scores_that_fp32_has_to_be_careful_with(size):
    check_window(window(8192, (1, 4), 128, torch.bfloat16, size=size, device=GPU))


def test_batches_and_less_than_a_block():
    check_window(window(4096, (2, 4), B=3, device=GPU))
    check_window(window(256, (2, 4), rows=17, blocks=[0, 1, 2, 3], device=GPU))


def test_an_index_has_the_same_bits_each_time():
    q, k = heads(16384, 8, 2)
    want = index(q, k, VerticalSlash(), 16300)
    for _ in range(100):
        got = index(q, k, VerticalSlash(), 16300)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_graph_follows_new_inputs_without_a_sync():
    pattern, (q, k) = VerticalSlash(0.8, 0.9), heads(8192)
    index(q, k, pattern, 8192)
    torch.cuda.set_sync_debug_mode("error")
    try:
        index(q, k, pattern, 8192)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = index(q, k, pattern, 8192)
    for _ in range(3):
        for x, y in zip((q, k), heads(8192), strict=True):
            x.copy_(y)
        graph.replay()
        want = index(q, k, pattern, 8192)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_half_a_million_tokens():
    q, k = heads(524288, 2, 1, 64)
    *_, recall = index(q, k, VerticalSlash(0.5, 0.8), 524288)
    assert (recall >= 0.8).all()
