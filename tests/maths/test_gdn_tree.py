"""The gated delta rule over prefix trees: the algorithm, and every sequence alone."""

import pytest
import torch

from reference import gdn
from tests.compare import assert_close
from tests.gdn_trees import FORESTS, alone
from tests.maths.inputs import make

EXACT = 1e-10


def tree_of(forest):
    """nodes [n, 3] of a forest without its empty nodes, whose children go to their parents."""
    ends = torch.tensor([0, *forest.lengths]).cumsum(0).tolist()
    number, nodes = {-1: -1}, []
    for node, (length, parent) in enumerate(zip(forest.lengths, forest.parents, strict=True)):
        number[node] = len(nodes) if length else number[parent]
        if length:
            nodes.append((ends[node], ends[node + 1], number[parent]))
    return torch.tensor(nodes, dtype=torch.long).view(-1, 3)


def inputs(forest):
    x = make([forest.num_tokens], heads=(2, 4), sizes=(8, 6))
    return dict(zip(("q", "k", "v", "g", "beta"), x[:5], strict=True))


@pytest.mark.parametrize("name", FORESTS)
def test_the_algorithm_gives_what_every_sequence_alone_gives(name):
    forest = FORESTS[name]
    given, nodes = inputs(forest), tree_of(forest)
    do = torch.randn_like(given["v"])
    want_o, final, want = alone(forest, given, do)

    rows = torch.arange(len(nodes))
    done = gdn.tree_chunked(*given.values(), nodes, rows)
    q, k, v, _, beta = given.values()
    back = gdn.tree_chunked_backward(q, k, v, beta, done, do, nodes, rows)
    if not forest.num_tokens:
        assert done.o.shape == v.shape
        return
    assert_close("o", done.o, want_o, EXACT)
    for name, found in zip(want, (back.dq, back.dk, back.dv, back.dg, back.dbeta), strict=True):
        assert_close(name, found, want[name], EXACT)
    leaves = [n for n in range(len(nodes)) if n not in nodes[:, 2].tolist()]
    for n, state in zip(leaves, final, strict=True):
        assert_close("final", done.states[n], state, EXACT)

    o, states = gdn.tree_recurrent(*given.values(), nodes)
    assert_close("o, token by token", o, want_o, EXACT)
    assert_close("states, token by token", states, done.states, EXACT)


def test_gradients_of_end_states():
    """Against autograd of the definition; every node's end state has a gradient."""
    forest = FORESTS["tiny nodes"]
    nodes, given = tree_of(forest), inputs(forest)
    leaves = [x.requires_grad_() for x in given.values()]
    o, states = gdn.tree_recurrent(*leaves, nodes, 0.7)
    do, dstates = torch.randn_like(o), torch.randn_like(states)
    want = torch.autograd.grad((o * do).sum() + (states * dstates).sum(), leaves)
    rows = torch.arange(len(nodes)).flip(0)
    q, k, v, g, beta = (x.detach() for x in leaves)
    done = gdn.tree_chunked(q, k, v, g, beta, nodes, rows, 0.7, 2)
    back = gdn.tree_chunked_backward(q, k, v, beta, done, do, nodes, rows, dstates.flip(0), 0.7)
    for name, found, grad in zip(
        given, (back.dq, back.dk, back.dv, back.dg, back.dbeta), want, strict=True
    ):
        assert_close(name, found, grad, EXACT)


def test_only_states_with_a_row_are_kept():
    forest = FORESTS["a group"]
    nodes, given = tree_of(forest), inputs(forest)
    rows = torch.where(torch.arange(len(nodes)) == 0, 0, -1)
    done = gdn.tree_chunked(*given.values(), nodes, rows)
    every = gdn.tree_chunked(*given.values(), nodes, torch.arange(len(nodes)))
    assert torch.equal(done.o, every.o)
    assert torch.equal(done.states, every.states[:1])
