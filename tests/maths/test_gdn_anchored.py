"""A sequence as an anchor and a tail: however it is cut, the definition's results."""

import random

import pytest
import torch

from reference import gdn
from tests.compare import assert_close
from tests.maths.inputs import make

EXACT = 1e-10
CHUNK = 16


@pytest.mark.parametrize("seed", range(6))
def test_any_cut_gives_what_one_call_gives(seed):
    rng = random.Random(seed)
    x = make([200], heads=(2, 4), sizes=(8, 6))
    q, k, v, g, beta = (t[0] for t in x[:5])
    want, final = gdn.recurrent(*x[:5])
    sequence = gdn.Anchored(torch.zeros_like(final[0]), k[:0], v[:0], g[:0], beta[:0])
    at = 0
    while at < 200:
        n = min(rng.choice([0, 1, 3, 15, 16, 17, 40]), 200 - at)
        drafts = n <= 8 and rng.random() < 0.5
        rows = slice(at, at + n)
        o, sequence = gdn.appended(
            sequence, q[rows], k[rows], v[rows], g[rows], beta[rows], None, drafts, CHUNK
        )
        assert_close("o", o, want[0, rows], EXACT)
        back = rng.randint(0, n) if drafts else 0
        sequence = gdn.rejected(sequence, back)
        at += n - back
        assert len(sequence.k) <= CHUNK + 8


@pytest.mark.parametrize("fixed", [False, True])
def test_a_scan_by_pairs_of_tokens_and_the_token_after(fixed):
    """The kernels' scan in fp32. (x + (a + b)) - b is not x + a: a row would see the next one."""
    g = -torch.rand(500, 64) * 0.3

    def scan(g):
        pairs = g.view(-1, 32, 2)
        total = pairs.sum(-1)
        for reach in (1, 2, 4, 8, 16):
            below = torch.zeros_like(total)
            below[:, reach:] = total[:, :-reach]
            total = total + below
        before = torch.cat([torch.zeros_like(total[:, :1]), total[:, :-1]], 1)
        first = before + pairs[..., 0] if fixed else total - pairs[..., 1]
        return torch.stack([first, total], -1).flatten(1)

    whole, differ = scan(g), 0
    assert_close("gamma", whole, g.double().cumsum(1), 1e-6)
    for length in range(1, 64):
        cut = g.clone()
        cut[:, length:] = 0
        differ += int((scan(cut)[:, :length] != whole[:, :length]).sum())
    assert (differ == 0) == fixed
