"""Shared-prompt attention: what is packed equals what is replicated, values and gradients, in fp64.

The definition (a mask from tout) against each sequence alone; the node form and its hand-written
backward against the definition.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import dualkv
from tests.compare import assert_close
from tests.dualkv_inputs import (
    GROUPS,
    Forest,
    any_forest,
    any_groups,
    folded,
    forest,
    grown,
    qkv,
    replicated,
)

EXACT = 1e-12
TREES = {
    "turns": [(4, ((2, ((3, ((1, ()),)),)), (5, ())))],
    "forks of forks": [(3, ((2, ((1, ()), (4, ()), (2, ()))), (3, ((2, ()), (1, ()))), (1, ())))],
    "empty inner nodes": [(2, ((0, ((3, ()), (1, ()))), (2, ((0, ()),))))],
    "two trees": [(1, ((1, ((1, ((1, ()), (1, ()))),)),)), (6, ())],
}
FORESTS = {name: grown(groups) for name, groups in GROUPS.items()}
FORESTS |= {name: forest(trees) for name, trees in TREES.items()}


def assert_packed_is_replicated(packed: Forest, q: Tensor, k: Tensor, v: Tensor) -> None:
    """o, lse and the gradients of a loss on both, through autograd on both sides."""
    tokens = len(packed.tout)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = dualkv.attention(*leaves, packed.tout)
    outs, lses = replicated(*leaves, packed.paths)
    for path, o_alone, lse_alone in zip(packed.paths, outs, lses, strict=True):
        assert_close("o", o[path].detach(), o_alone.detach(), EXACT)
        assert_close("lse", lse[:, path].detach(), lse_alone.detach(), EXACT)
    if not tokens:
        assert o.shape == q.shape
        return
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    loss = (folded(outs, packed.paths, tokens) * do).sum()
    loss += (folded([x.T for x in lses], packed.paths, tokens).T * dlse).sum()
    want = torch.autograd.grad(loss, leaves)
    got = torch.autograd.grad((o * do).sum() + (lse * dlse).sum(), leaves)
    for name, a, b in zip("qkv", got, want, strict=True):
        assert_close(f"d{name}", a, b, EXACT)


def assert_nodes_are_definition(
    packed: Forest, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, q_shift: int = 0
) -> None:
    """The node form and its backward, against the definition and autograd."""
    leaves = [x.detach().requires_grad_() for x in (q[q_shift:], k, v)]
    want = dualkv.attention(*leaves, packed.tout, scale, q_shift)
    do, dlse = torch.randn_like(want.o), torch.randn_like(want.lse)
    with torch.no_grad():
        got = dualkv.by_nodes(*leaves, packed.nodes, scale, q_shift)
        for name, a, b in zip(got._fields, got, want, strict=True):
            assert_close(name, a, b.detach(), EXACT)
        rest = (got.lse, dlse, packed.nodes, scale, q_shift)
        grads = dualkv.by_nodes_backward(do, *leaves, got.o, *rest)
    loss = (want.o * do).sum() + (want.lse * dlse).sum()
    for name, a, b in zip(grads._fields, grads, torch.autograd.grad(loss, leaves), strict=True):
        assert_close(name, a, b, EXACT, at_least=1e-3)


@pytest.mark.parametrize("name", FORESTS)
def test_packed_is_replicated(name):
    assert_packed_is_replicated(FORESTS[name], *qkv(len(FORESTS[name].tout)))


@pytest.mark.parametrize("name", FORESTS)
def test_node_form_is_the_definition(name):
    assert_nodes_are_definition(FORESTS[name], *qkv(len(FORESTS[name].tout)))


@pytest.mark.parametrize("group", range(1, 17))
def test_any_number_of_query_heads_to_a_key_head(group):
    packed = FORESTS["one of each"]
    tensors = qkv(len(packed.tout), heads=(2, 2 * group), size=4)
    assert_packed_is_replicated(packed, *tensors)
    assert_nodes_are_definition(packed, *tensors)


@settings(max_examples=30, deadline=None)
@given(groups=any_groups, seed=st.integers(0, 99))
def test_any_groups(groups, seed):
    torch.manual_seed(seed)
    packed = grown(groups)
    tensors = qkv(len(packed.tout), heads=(1, 2), size=3)
    assert_packed_is_replicated(packed, *tensors)
    assert_nodes_are_definition(packed, *tensors)


@settings(max_examples=30, deadline=None)
@given(trees=any_forest, seed=st.integers(0, 99))
def test_any_forest(trees, seed):
    torch.manual_seed(seed)
    packed = forest(trees)
    tensors = qkv(len(packed.tout), heads=(1, 2), size=3)
    assert_packed_is_replicated(packed, *tensors)
    assert_nodes_are_definition(packed, *tensors)


@pytest.mark.parametrize("block", [1, 2, 7])
def test_blocks_of_a_node_may_have_any_size(block, monkeypatch):
    monkeypatch.setattr(dualkv, "BLOCK", block)
    for name in ("unequal groups", "forks of forks"):
        assert_nodes_are_definition(FORESTS[name], *qkv(len(FORESTS[name].tout)))


@pytest.mark.parametrize("q_shift", [0, 2, 5, 7, 13])
def test_queries_may_begin_at_any_token(q_shift):
    """5 is the end of the prompt: queries of responses alone; 13 is the end: none at all."""
    packed = FORESTS["one of each"]
    assert_nodes_are_definition(packed, *qkv(13), scale=0.3, q_shift=q_shift)


@pytest.mark.parametrize("spread", [0.0, 50.0])
def test_scores_that_are_equal_or_far_apart(spread):
    packed = FORESTS["unequal groups"]
    tensors = qkv(len(packed.tout), spread=spread)
    assert_packed_is_replicated(packed, *tensors)
    assert_nodes_are_definition(packed, *tensors)


def test_gradients_by_finite_differences():
    packed = grown([(3, [2, 1]), (1, [1])])
    leaves = [x.requires_grad_() for x in qkv(len(packed.tout), heads=(1, 2), size=2)]

    class Nodes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            done = dualkv.by_nodes(q, k, v, packed.nodes)
            ctx.save_for_backward(q, k, v, *done)
            return done.o, done.lse

        @staticmethod
        def backward(ctx, do, dlse):
            return tuple(dualkv.by_nodes_backward(do, *ctx.saved_tensors, dlse, packed.nodes))

    assert torch.autograd.gradcheck(Nodes.apply, leaves)


def test_the_order_of_responses_is_nobodys_business():
    """Permuted responses: permuted results, and the same gradients of the prompt."""
    lengths, order = [3, 1, 4], [2, 0, 1]
    one, other = grown([(5, lengths)]), grown([(5, [lengths[i] for i in order])])
    starts = [5, 8, 9]
    moved = list(range(5)) + [starts[i] + t for i in order for t in range(lengths[i])]
    q, k, v = qkv(13)
    do = torch.randn_like(q)

    def run(packed: Forest, rows: list[int]) -> list[Tensor]:
        tensors = [x[rows] for x in (q, k, v)]
        done = dualkv.by_nodes(*tensors, packed.nodes)
        grads = dualkv.by_nodes_backward(do[rows], *tensors, *done, None, packed.nodes)
        return [done.o, *grads]

    for a, b in zip(run(other, moved), run(one, list(range(13))), strict=True):
        assert_close("permuted", a, b[moved], EXACT)


def test_a_group_may_be_split_over_calls():
    """Each call has the prompt; its queries' gradient is given to one, dk and dv are added."""
    whole, left, right = grown([(5, [3, 4])]), grown([(5, [3])]), grown([(5, [4])])
    q, k, v = qkv(12)
    do = torch.randn_like(q)
    done = dualkv.by_nodes(q, k, v, whole.nodes)
    want = dualkv.by_nodes_backward(do, q, k, v, *done, None, whole.nodes)
    total = [torch.zeros_like(x) for x in (q, k, v)]
    for packed, rows in ((left, [*range(8)]), (right, [*range(5), *range(8, 12)])):
        tensors = [x[rows] for x in (q, k, v)]
        upstream = do[rows]
        if packed is right:
            upstream = upstream.index_fill(0, torch.arange(5), 0)
        done = dualkv.by_nodes(*tensors, packed.nodes)
        grads = dualkv.by_nodes_backward(upstream, *tensors, *done, None, packed.nodes)
        for sum_of, part in zip(total, grads, strict=True):
            sum_of[rows] += part
    for name, a, b in zip("qkv", total, want, strict=True):
        assert_close(f"d{name}", a, b, EXACT)


def test_two_calls_and_a_merge_are_the_same():
    """Every node on itself, and responses on their prompt: what libraries without this mask can do.

    Outputs merge by their lse. Both backwards get the whole o and lse, and their results are added.
    """
    packed = grown([(5, [3, 1, 4])])
    q, k, v = qkv(13)
    do = torch.randn_like(q)
    want = dualkv.by_nodes(q, k, v, packed.nodes)
    want_grads = dualkv.by_nodes_backward(do, q, k, v, *want, None, packed.nodes)

    own = packed.nodes.clone()
    own[:, 2] = own[:, 1]  # nobody sees another node
    alone = dualkv.by_nodes(q, k, v, own)
    query, upstream = (x[5:].unflatten(1, (2, 2)) for x in (q, do))
    S = torch.einsum("qjgd,kjd->jgqk", query, k[:5]) * 8**-0.5
    across = torch.einsum("jgqk,kjd->qjgd", S.softmax(-1), v[:5]).flatten(1, 2)
    lse_across = S.logsumexp(-1).flatten(0, 1)
    lse = torch.logaddexp(alone.lse[:, 5:], lse_across)
    of_alone, of_across = ((x - lse).exp().T[..., None] for x in (alone.lse[:, 5:], lse_across))
    assert_close("o", of_alone * alone.o[5:] + of_across * across, want.o[5:], EXACT)
    assert_close("lse", lse, want.lse[:, 5:], EXACT)

    grads = [x.clone() for x in dualkv.by_nodes_backward(do, q, k, v, *want, None, own)]
    P = (S - lse.unflatten(0, (2, 2))[..., None]).exp()
    delta = (do * want.o).sum(-1)[5:].unflatten(1, (2, 2))
    dP = torch.einsum("qjgd,kjd->jgqk", upstream, v[:5])
    dS = P * (dP - delta.permute(1, 2, 0)[..., None]) * 8**-0.5
    grads[0][5:] += torch.einsum("jgqk,kjd->qjgd", dS, k[:5]).flatten(1, 2)
    grads[1][:5] += torch.einsum("jgqk,qjgd->kjd", dS, query)
    grads[2][:5] += torch.einsum("jgqk,qjgd->kjd", P, upstream)
    for name, a, b in zip("qkv", grads, want_grads, strict=True):
        assert_close(f"d{name}", a, b, EXACT)


def test_rounding_of_low_precision_is_that_of_the_results():
    packed = FORESTS["unequal groups"]
    exact = qkv(len(packed.tout), dtype=torch.bfloat16)
    done = dualkv.by_nodes(*exact, packed.nodes)
    want = dualkv.by_nodes(*(x.double() for x in exact), packed.nodes)
    assert done.o.dtype == torch.bfloat16
    assert done.lse.dtype == torch.float32
    assert_close("o", done.o, want.o, 2**-8)
    assert_close("lse", done.lse, want.lse, 1e-6)


def test_what_a_response_holds_does_not_reach_another():
    """NaN in one response: its own results and the prompt's dk and dv; nothing else changes."""
    packed = grown([(5, [3, 4])])
    q, k, v = qkv(12)
    do = torch.randn_like(q)
    clean = dualkv.by_nodes(q, k, v, packed.nodes)
    clean_grads = dualkv.by_nodes_backward(do, q, k, v, *clean, None, packed.nodes)
    for x in (q, k, v):
        x[5:8] = torch.nan
    done = dualkv.by_nodes(q, k, v, packed.nodes)
    grads = dualkv.by_nodes_backward(do, q, k, v, *done, None, packed.nodes)
    spared = [*range(5), *range(8, 12)]
    assert torch.equal(done.o[spared], clean.o[spared])
    assert torch.equal(grads.dq[spared], clean_grads.dq[spared])
    assert grads.dk[:5].isnan().all()
    assert torch.equal(grads.dk[8:], clean_grads.dk[8:])
    assert torch.equal(grads.dv[8:], clean_grads.dv[8:])
