"""The gated delta net's kernels on a GPU: fresh inputs, poisoned outputs, repeated runs."""

import pytest
import torch

from qla_kernels.lab.selftest import gdn_chunks
from qla_kernels.lab.selftest.gdn_inputs import inputs

pytestmark = pytest.mark.hopper

DTYPES = (torch.bfloat16, torch.float16)


def test_kkt_solve_of_strided_keys():
    """k as a slice of a fused projection: read in place."""
    from qla_kernels.gdn.launch import forward as launch

    x = inputs([200, 70], (2, 4), 128, torch.bfloat16, device="cuda")
    fused = torch.full((1, x.k.shape[1], 5, 128), torch.nan, dtype=x.k.dtype, device="cuda")
    fused[:, :, 2:4] = x.k
    out = gdn_chunks.poisoned(x)
    launch.kkt_solve(fused[:, :, 2:4], x.g, x.beta, x.cu_seqlens, out=out)
    gdn_chunks.check(x, *out, 1.1)


def test_kkt_solve_of_a_batch_is_that_of_its_rows():
    from qla_kernels.gdn.launch import forward as launch

    rows = [
        inputs([100], (2, 4), 128, torch.bfloat16, padding=0, seed=s, device="cuda")
        for s in range(3)
    ]
    k, g, beta = (torch.cat(parts) for parts in zip(*(row[:3] for row in rows), strict=True))
    g_cum, A = launch.kkt_solve(k, g, beta)
    for b, x in enumerate(rows):
        one = launch.kkt_solve(x.k, x.g, x.beta)
        assert torch.equal(g_cum[b], one[0][0])
        assert torch.equal(A[b], one[1][0])


def test_kkt_solve_repeats_bitwise():
    """200 runs that keep every SM busy: a missing fence shows as a rare difference."""
    from qla_kernels.gdn.launch import forward as launch

    x = inputs([9000, 3000, 777, 1], (4, 16), 128, torch.bfloat16, seed=5, device="cuda")
    first = launch.kkt_solve(x.k, x.g, x.beta, x.cu_seqlens, out=gdn_chunks.poisoned(x))
    for _ in range(200):
        again = launch.kkt_solve(x.k, x.g, x.beta, x.cu_seqlens, out=gdn_chunks.poisoned(x))
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a[:, : x.tokens], b[:, : x.tokens])


def test_kkt_solve_large():
    """A length that keeps every SM busy for many chunks, against fp64."""
    from qla_kernels.gdn.launch import forward as launch

    x = inputs([8192, 5000, 4097], (4, 8), 128, torch.bfloat16, seed=3, device="cuda")
    out = gdn_chunks.poisoned(x)
    launch.kkt_solve(x.k, x.g, x.beta, x.cu_seqlens, out=out)
    gdn_chunks.check(x, *out, 1.1)


def test_kkt_solve_in_a_graph_follows_new_lengths():
    """One capture at capacity; other lengths are written into cu_seqlens before each replay."""
    from qla_kernels.gdn.launch import forward as launch

    x = inputs([300, 100, 112], (2, 4), 128, torch.bfloat16, padding=0, device="cuda")
    g_cum, A = gdn_chunks.poisoned(x)
    launch.kkt_solve(x.k, x.g, x.beta, x.cu_seqlens, out=(g_cum, A))  # loads the module
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.kkt_solve(x.k, x.g, x.beta, x.cu_seqlens, out=(g_cum, A))
    for lengths in ([300, 100, 112], [1, 0, 511], [64, 448, 0], [5, 5, 5]):
        x.cu_seqlens.copy_(torch.tensor([0, *lengths]).cumsum(0))
        g_cum.fill_(torch.nan)
        A.fill_(torch.nan)
        graph.replay()
        gdn_chunks.check(x._replace(tokens=sum(lengths)), g_cum, A, 1.1)


def test_kkt_solve_does_not_synchronise():
    from qla_kernels.gdn.launch import forward as launch

    x = inputs([300, 100], (2, 4), 128, torch.bfloat16, device="cuda")
    launch.kkt_solve(x.k, x.g, x.beta, x.cu_seqlens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch.kkt_solve(x.k, x.g, x.beta, x.cu_seqlens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
