"""Tables of the host on a GPU: read by graphs long after, by other streams, first in a capture."""

import gc

import pytest
import torch
from torch import Tensor

from qla_kernels.runtime.device_tables import numbers
from qla_kernels.sparse_ring import VerticalSlash, sparse_attention

pytestmark = pytest.mark.hopper

PATTERN = VerticalSlash(0.6, 0.7, max_v=256)


def inputs(T: int) -> list[Tensor]:
    shapes = [(1, T, heads, 128) for heads in (4, 2, 2)]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]


def attend(x: list[Tensor]) -> tuple[Tensor, ...]:
    """o, dq, dk, dv, with an index of these q and k. No graph of autograd is left: its nodes belong
    to the stream that they were made on, and a capture must not meet those of another."""
    o = sparse_attention(*x, pattern=PATTERN)
    return (o.detach(), *torch.autograd.grad(o, x, torch.ones_like(o)))


def captured(x: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(x)
    return graph, found


def replayed(graph: torch.cuda.CUDAGraph, found: tuple[Tensor, ...]) -> list[Tensor]:
    for x in found:
        x.fill_(torch.nan)
    graph.replay()
    return [x.clone() for x in found]


def warm() -> None:
    """Compiles, with tables of another length."""
    attend(inputs(256))
    torch.cuda.synchronize()


def test_a_graph_replays_after_many_other_lengths():
    """The tables of an index were once dropped for those of 16 others, under the graph."""
    x = inputs(1024)
    want = attend(x)
    graph, found = captured(x)
    assert all(map(torch.equal, replayed(graph, found), want))
    for n in range(1, 33):
        if n != 8:
            attend(inputs(128 * n))
    gc.collect()
    junk = [torch.full((1 << n,), 2**30, device="cuda", dtype=torch.int32) for n in range(7, 24)]
    assert all(map(torch.equal, replayed(graph, found), want))
    assert len(junk) == 17  # until here


def test_another_stream_waits_for_tables_of_the_first():
    """It once read what lay in memory."""
    warm()
    x = inputs(128 * 37)  # of this test alone: its tables are made below
    torch.cuda.synchronize()
    slow, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(1_000_000_000)
        first = attend(x)
    with torch.cuda.stream(other):
        second = attend(x)
    torch.cuda.synchronize()
    want = attend(x)
    assert all(map(torch.equal, first, want))
    assert all(map(torch.equal, second, want))


def test_a_first_call_in_a_capture():
    """Its tables were once copied from memory of the host, which a capture refuses."""
    warm()
    x = inputs(128 * 41)  # of this test alone
    graph, found = captured(x)
    assert all(map(torch.equal, replayed(graph, found), attend(x)))
    for tensor in x:
        tensor.detach().normal_()
    assert all(map(torch.equal, replayed(graph, found), attend(x)))


def test_making_tables_does_not_wait_for_the_gpu():
    warm()
    x = inputs(128 * 43)  # of this test alone
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_numbers_in_a_capture():
    rows, gpu = [[0, 7, -1], [2**31 - 1, 0, 3]], torch.device("cuda", 0)
    assert numbers(rows, gpu).tolist() == rows
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = numbers(rows, gpu)
    x.fill_(5)
    graph.replay()
    assert x.tolist() == rows
