"""What sparse attention is compared with: a dense ring, any number of ranks, and a dense row."""

from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
import torch
from torch import Tensor

from benchmarks import dense_ring, tables
from benchmarks.records import OK, Result, Row
from benchmarks.ring import parse
from qla_kernels.sparse_ring import ZigZagLayout
from reference import sparse_ring
from tests.host.made_up_runs import run_of
from tests.mail import Mail


class Plain:
    """A kernel as the libraries' are, of the definition."""

    name = "definition"

    def _visible(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        seen = torch.ones(q.shape[2], q.shape[1], k.shape[1], dtype=torch.bool)
        return seen.tril()[None] if causal else seen[None]

    def forward(self, q, k, v, causal):
        return sparse_ring.attention(q, k, v, self._visible(q, k, causal))

    def backward(self, do, q, k, v, o, lse, causal):
        delta = sparse_ring.delta(o, do)
        return sparse_ring.attention_backward(q, k, v, self._visible(q, k, causal), lse, delta, do)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_number_of_ranks_is_one_call(world):
    layout, kernel = ZigZagLayout(world), Plain()
    q, k, v, do = (torch.randn(1, 256 * world, h, 8) for h in (2, 1, 1, 2))
    boxes: dict[object, Queue] = {}

    def one(rank: int) -> list[Tensor]:
        ring = Mail(boxes, list(range(world)), rank)
        mine = [layout.shard(x, 1, rank) for x in (q, k, v)]
        o, lse = dense_ring.forward(kernel, ring, *mine)
        return [o, *dense_ring.backward(kernel, ring, layout.shard(do, 1, rank), *mine, o, lse)]

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(one, range(world)))
    o, lse = kernel.forward(q, k, v, True)
    want = [o, *kernel.backward(do, q, k, v, o, lse, True)]
    for rank, got in enumerate(found):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, layout.shard(b, 1, rank), atol=2e-5, rtol=0)


def test_what_is_asked_for():
    options = parse(["--tokens", "65536,131072", "--heads", "8x32"])
    assert options.tokens == [65536, 131072]
    assert options.heads == (8, 32)


def test_rows_under_a_mask_stand_beside_the_best_rival_without_one():
    labels = {"ours": "ours", "fa4": "flash-attn-4", "flex": "FlexAttention"}
    times = {"5% dense": {"ours": 2.0, "flex": 6.0}, "dense": {"ours": 33.0, "fa4": 30.0}}
    rows = tuple(
        Row(
            name=what, family="sparse_ring", kind="fwd", heads="8/32", layout=what, tokens=131072,
            what=what, flops=1.0, bytes=1.0, floor_ms=1.0, input_sets=1,
            results=tuple(Result(n, OK, p50_ms=t, graph=True) for n, t in times[what].items()),
        )
        for what in times
    )  # fmt: skip
    run = run_of([], family="sparse_ring", rows=rows, labels=labels)
    header, _, sparse, dense, mean = tables.summary(run).splitlines()[2:7]
    assert [header.split("|")[-2].strip(), sparse.split("|")[-2].strip()] == [
        "dense rival / ours",
        "15.00",
    ]
    assert dense.split("|")[-2].strip() == "0.91"
    assert len({line.count("|") for line in (header, sparse, dense, mean)}) == 1
