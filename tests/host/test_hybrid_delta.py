"""`shared_prefix_gated_delta_rule` on CPU tensors: values, gradients, options, refusals."""

import copy
from itertools import pairwise

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import qla_kernels
from qla_kernels import SharedLayout, Unsupported, chunk_gated_delta_rule
from qla_kernels import shared_prefix_gated_delta_rule as rule
from qla_kernels.gdn.tree.tables import SIBLINGS, tree_tables
from qla_kernels.hybrid import prepare_gated_delta_rule
from qla_kernels.hybrid.layouts import parents
from qla_kernels.runtime.varlen import chunk_table
from tests.compare import assert_close
from tests.gdn_trees import FORESTS, Forest, alone

EXACT = 1e-10
H, HV, K, V = 2, 4, 8, 6
TINY = FORESTS["tiny nodes"]


def inputs(tokens, dtype=torch.float64):
    q, k = (normalize(torch.randn(1, tokens, H, K, dtype=dtype), dim=-1) for _ in "qk")
    v = torch.randn(1, tokens, HV, V, dtype=dtype)
    g, beta = (torch.rand(1, tokens, HV, dtype=dtype) for _ in range(2))
    return {"q": q, "k": k, "v": v, "g": -0.3 * g, "beta": beta}


def leaves(given):
    return {name: x.detach().clone().requires_grad_() for name, x in given.items()}


def gradients(loss, given):
    return dict(zip(given, torch.autograd.grad(loss, list(given.values())), strict=True))


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.usefixtures("poison")
def test_results_and_gradients_are_those_of_every_sequence_alone(name):
    forest = FORESTS[name]
    given, layout = inputs(forest.num_tokens), forest.layout
    do = torch.randn_like(given["v"])
    dfinal = torch.randn(len(forest.leaf_sequences()), HV, K, V, dtype=torch.float64)
    want_o, want_final, want = alone(forest, given, do, dfinal)
    runs = []
    for _ in range(2):
        x = leaves(given)
        o, final = rule(**x, layout=layout, output_final_state=True)
        loss = (o * do).sum()
        if len(dfinal):
            loss = loss + (final * dfinal).sum()
        runs.append([o.detach(), *gradients(loss, x).values()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    if not forest.num_tokens:
        assert o.shape == given["v"].shape
        assert final.shape == (0, HV, K, V)
        return
    assert_close("o", o.detach(), want_o, EXACT)
    assert_close("final", final.detach(), torch.stack(want_final), EXACT)
    for name, found in zip(want, runs[0][1:], strict=True):
        assert_close(name, found, want[name], EXACT)
    without = rule(**given, layout=layout)
    assert torch.equal(without[0], o)
    assert without[1] is None


def test_gradcheck():
    x = [t.requires_grad_() for t in inputs(TINY.num_tokens).values()]
    layout = TINY.layout

    def run(q, k, v, g, beta):
        return rule(q, k, v, -g.sigmoid(), beta.sigmoid(), layout, output_final_state=True)

    assert torch.autograd.gradcheck(run, x, atol=1e-6, fast_mode=True)


def test_a_tree_of_roots_is_a_packed_batch():
    lengths = [3, 70, 1]
    given = inputs(sum(lengths))
    layout = SharedLayout.from_forest(lengths, [-1] * 3)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    found = rule(**given, layout=layout, output_final_state=True)
    want = chunk_gated_delta_rule(**given, cu_seqlens=bounds, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_activations_and_layouts_of_states():
    """Every option, in a prompt that is its own only response, against the plain function."""
    given = inputs(7)
    given |= {"g": torch.randn(1, 7, HV).double(), "beta": torch.randn(1, 7, HV).double()}
    given |= {"A_log": torch.randn(HV).double(), "dt_bias": torch.randn(HV).double()}
    flags = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "state_v_first": True,
        "output_final_state": True,
        "scale": 0.3,
    }
    layout = SharedLayout.from_lengths([(3, [4])])
    found, wanted = leaves(given), leaves(given)
    got, want = rule(**found, layout=layout, **flags), chunk_gated_delta_rule(**wanted, **flags)
    assert got[1].shape == (1, HV, V, K)
    weights = [torch.randn_like(x) for x in want]
    sums = [sum((x * w).sum() for x, w in zip(y, weights, strict=True)) for y in (got, want)]
    for name, x in gradients(sums[0], found).items():
        assert_close(name, x, gradients_of(sums[1], wanted)[name], EXACT)
    assert_close("o", got[0], want[0], EXACT)
    assert_close("final", got[1], want[1], EXACT)


def gradients_of(loss, given):
    found = torch.autograd.grad(loss, list(given.values()), retain_graph=True)
    return dict(zip(given, found, strict=True))


def test_only_final_states_used():
    x, layout = leaves(inputs(TINY.num_tokens)), TINY.layout
    _, final = rule(**x, layout=layout, output_final_state=True)
    gradients(final.sum(), {"v": x["v"]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype):
    forest = FORESTS["depth 4, 1"]
    given = inputs(forest.num_tokens)
    o, _ = rule(**{n: x.to(dtype) for n, x in given.items()}, layout=forest.layout)
    want, _ = rule(**given, layout=forest.layout)
    assert o.dtype == dtype
    assert_close("o", o.double(), want, 1e-5 if dtype == torch.float32 else 2e-2)


def test_compiles_to_one_graph():
    torch._dynamo.reset()
    layout = TINY.layout
    prepare_gated_delta_rule(layout, output_final_state=True)
    given = inputs(TINY.num_tokens)
    eager, traced = leaves(given), leaves(given)

    def run(q, k, v, g, beta):
        return rule(q, k, v, g, beta, layout, output_final_state=True)

    got = torch.compile(run, fullgraph=True, backend="aot_eager")(**traced)
    want = run(**eager)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    got_sum, want_sum = (a.square().sum() + b.sum() for a, b in (got, want))
    found, wanted = gradients(got_sum, traced), gradients(want_sum, eager)
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_compiled_code_needs_its_tables():
    torch._dynamo.reset()
    given, layout = inputs(TINY.num_tokens), TINY.layout
    with pytest.raises(Exception, match=r"call prepare_gated_delta_rule\(layout\) before"):
        torch.compile(lambda: rule(**given, layout=layout), fullgraph=True, backend="eager")()


def test_operators_tell_the_truth():
    given, layout = inputs(TINY.num_tokens), TINY.layout
    with _recorded() as seen:
        x = leaves(given)
        o, final = rule(**x, layout=layout, output_final_state=True)
        gradients(o.sum() + final.sum(), x)
    for op, args in seen.items():
        torch.library.opcheck(op, args)


class _recorded(TorchDispatchMode):
    """Keeps the arguments of the operators that run under it."""

    def __enter__(self):
        self.seen = {}
        super().__enter__()
        return self.seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "qla_kernels":
            self.seen[func] = tree_map_only(Tensor, Tensor.detach, args)
        return func(*args, **(kwargs or {}))


def test_copies_of_a_layout_leave_tables_out():
    layout = TINY.layout
    prepare_gated_delta_rule(layout)
    assert layout.further
    assert not copy.deepcopy(layout).further


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"layout": 3}, "layout is of type int; need a SharedLayout; pass batch.layout"),
        ({"layout": Forest((3,), (-1,)).layout}, "q has 1 rows of 10 tokens; need 1 row of 3"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval without use_beta_sigmoid_in_kernel"),
        ({"use_gate_in_kernel": True}, "use_gate_in_kernel without A_log"),
        ({"g": torch.zeros(1, 2, HV)}, "g has shape"),
    ],
)
def test_wrong_arguments(changed, text):
    given = {**inputs(TINY.num_tokens), "layout": TINY.layout, **changed}
    with pytest.raises(ValueError, match=f"shared_prefix_gated_delta_rule: {text}"):
        rule(**given)


def test_there_are_no_initial_states_and_no_bounds():
    for name in ("initial_state", "cu_seqlens", "cp_context"):
        with pytest.raises(TypeError, match=name):
            rule(**inputs(TINY.num_tokens), layout=TINY.layout, **{name: None})


def test_second_derivatives_are_refused():
    x = leaves(inputs(TINY.num_tokens))
    o, _ = rule(**x, layout=TINY.layout)
    (dq,) = torch.autograd.grad(o.sum(), x["q"], create_graph=True)
    with pytest.raises(Unsupported, match="shared_prefix_gated_delta_rule"):
        dq.sum().backward()


def test_a_gpu_without_kernels_is_refused(monkeypatch):
    assert "shared_prefix_gated_delta_rule" in qla_kernels.__all__
    x = inputs(3, torch.float64)
    with pytest.raises(ValueError, match="one dtype"):
        rule(**{**x, "k": x["k"].float()}, layout=Forest((3,), (-1,)).layout)


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize("final", [False, True])
def test_tables_say_what_a_tree_is(name, final):
    forest = FORESTS[name]
    layout = forest.layout
    up, bounds = parents(layout.nodes), [*layout.nodes[:, 0].tolist(), layout.num_tokens]
    found = tree_tables(bounds, up, final)
    spans, starts, ends = (x.tolist() for x in (found.spans, found.level_starts, found.level_ends))
    number = {first: n for n, (first, _, _) in enumerate(layout.nodes.tolist())}
    row_of: dict[int, int] = {}
    seen = []
    edges = found.levels.tolist()
    for a, b in pairwise(edges):
        level = [number[spans[i][0]] for i in range(a, b)]
        for i, node in zip(range(a, b), level, strict=True):
            # a start state was kept by an earlier launch
            assert starts[i] == (-1 if up[node] < 0 else row_of[up[node]])
            assert spans[i] == bounds[node : node + 2]
            assert found.starts[node] == starts[i]
            assert found.level_chunks[i] == found.first_chunk[node]
        row_of |= {n: ends[i] for i, n in zip(range(a, b), level, strict=True) if ends[i] >= 0}
        seen += level
    assert sorted(seen) == list(range(len(up)))
    inner = {p for p in up if p >= 0}
    leaves = [n for n in range(len(up)) if n not in inner]
    assert sorted(row_of.values()) == list(range(found.num_rows))
    assert set(row_of) == inner | set(leaves if final else ())
    if final:
        assert [row_of[n] for n in leaves] == list(range(len(inner), found.num_rows))
    # sums over children: every node but roots once, in order, into its parent's row
    children: dict[int, list[int]] = {}
    for a, b, r0, r1 in found.blocks.tolist():
        assert b - a <= SIBLINGS
        assert len({row for _, row, _ in found.runs[r0:r1].tolist()}) == r1 - r0
        for first, row, count in found.runs[r0:r1].tolist():
            children.setdefault(row, []).extend(seen[a + first : a + first + count])
    assert {row_of[p]: [n for n in range(len(up)) if up[n] == p] for p in inner} == children
    # chunks, as the kernels' own table has them
    cu = torch.tensor(bounds)
    want = chunk_table(layout.num_tokens, cu)
    count = int(found.num_chunks)
    assert torch.equal(found.chunks, want.chunks[:count])
    assert torch.equal(found.first_chunk, want.first_chunk)
    assert [seen[i] for i in found.owner.tolist()] == [
        n for n in range(len(up)) for _ in range(-(-(bounds[n + 1] - bounds[n]) // 64))
    ]
