"""Sequences cut over ranks: links alone tell a rank what it needs of the others."""

import pytest
import torch

from reference import gdn
from reference.gdn_shards import entering
from tests.compare import assert_close
from tests.maths.inputs import make

EXACT = 1e-12


class Rank:
    """A run of tokens of a packed batch."""

    def __init__(self, ends: list[int], rank: int, size: int):
        self.begin, self.end = rank * size, (rank + 1) * size
        inside = [x for x in ends if self.begin < x < self.end]
        self.local = torch.tensor([0, *(x - self.begin for x in inside), size])
        first = max((x for x in [0, *ends] if x <= self.begin), default=0)
        last = min(x for x in ends if x >= self.end)
        self.before = range(first // size, rank)
        self.after = range((last - 1) // size, rank, -1)
        self.through = not inside and bool(self.before) and bool(self.after)

    def of(self, *tensors):
        return [x[:, self.begin : self.end] for x in tensors]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "lengths", [[280], [140, 140], [30, 170, 80], [3, 4, 200, 1, 72], [141, 0, 139]], ids=str
)
@pytest.mark.parametrize("gate", ["mild", "zero"])
def test_ranks_that_know_links_are_one(world, lengths, gate):
    x = make(lengths, heads=(1, 2), sizes=(8, 5), gate=gate)
    tensors = [t.requires_grad_() for t in x[:5]]
    o, _ = gdn.recurrent(*tensors, None, None, x.cu_seqlens)
    do = torch.randn_like(o)
    wanted = torch.autograd.grad(o, tensors, do)
    ends, total = x.cu_seqlens[1:].tolist(), sum(lengths)
    ranks = [Rank(ends, r, total // world) for r in range(world)]

    def link(r):
        _, *others = r.of(*(t.detach() for t in tensors))
        return gdn.forward_link(*others, r.local, r.through)

    links = torch.stack([link(r) for r in ranks])
    saved, h0 = [], []
    for r in ranks:
        start = torch.zeros(len(r.local) - 1, 2, 8, 5, dtype=torch.float64)
        start[0] = entering(links, r.before)
        local = r.of(*(t.detach() for t in tensors))
        done = gdn.chunked(*local, None, start, r.local)
        assert_close("o", done.o, o[:, r.begin : r.end].detach(), EXACT)
        saved.append((local[:3], (done.g_cum, local[4], done.A)))
        h0.append(start)

    def link_back(r, kept):
        qkv, rest = kept
        return gdn.backward_link(*qkv, *rest, *r.of(do), None, r.local, r.through)

    links = torch.stack([link_back(r, kept) for r, kept in zip(ranks, saved, strict=True)])
    for r, (qkv, rest), start in zip(ranks, saved, h0, strict=True):
        end = torch.zeros_like(start)
        end[-1] = entering(links, r.after)
        got = gdn.chunked_backward(*qkv, *rest, *r.of(do), end, None, start, r.local)
        for name, want in zip(("dq", "dk", "dv", "dg", "dbeta"), wanted, strict=True):
            assert_close(name, getattr(got, name), want[:, r.begin : r.end], 1e-11)
