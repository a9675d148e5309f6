"""Drafts of the gated delta rule: every token alone, along its path from the root of its tree."""

import pytest
import torch

from reference import gdn
from tests.compare import assert_close
from tests.maths.inputs import make

PARENTS = {
    "chain": None,
    "one chain, written out": [[-1, 0, 1, 2, 3], [-1, 0, 1, 2, 3], [-1, 0, 1, 2, 3]],
    "star": [[-1, 0, 0, 0, 0], [-1, -1, -1, -1, -1], [7, -1, 0, 0, 1]],
}


def path(t, parents):
    """Tokens from the first after the initial state to t."""
    before = t - 1 if parents is None or t == 0 else parents[t]
    return [t] if before < 0 else [*path(before, parents), t]


@pytest.mark.parametrize("name", PARENTS)
def test_a_token_is_the_end_of_its_path(name):
    lengths = [5, 0, 3]
    x = make(lengths, heads=(2, 4), sizes=(8, 6))
    q, k, v, g, beta = x[:5]
    h0 = torch.randn(3, 4, 8, 6, dtype=q.dtype)
    bounds = torch.tensor([0, 5, 5, 8])
    table = PARENTS[name]
    parents = None if table is None else torch.tensor(table)
    o, states = gdn.draft_recurrent(q, k, v, g, beta, parents, None, h0, bounds)
    for n, length in enumerate(lengths):
        first = int(bounds[n])
        for t in range(length):
            path = [t]
            while (
                path[0] > 0 and (before := path[0] - 1 if table is None else table[n][path[0]]) >= 0
            ):
                path.insert(0, before)
            at = torch.tensor(path) + first
            given = (y[:, at] for y in (q, k, v, g, beta))
            want_o, want = gdn.recurrent(*given, None, h0[n : n + 1])
            assert_close("o", o[:, first + t], want_o[:, -1], 1e-12)
            assert_close("state", states[:, first + t], want, 1e-12)


def test_a_dense_batch_and_tokens_of_no_sequence():
    x = make([8], heads=(1, 2), sizes=(4, 4))[:5]
    halves = [y.view(2, 4, *y.shape[2:]) for y in x]
    o, states = gdn.draft_recurrent(*halves)
    want, final = gdn.recurrent(*halves)
    assert_close("o", o, want, 1e-12)
    assert_close("state", states[:, -1], final, 1e-12)
    o, states = gdn.draft_recurrent(*x, cu_seqlens=torch.tensor([0, 3]))
    assert not o[:, 3:].any()
    assert not states[:, 3:].any()
