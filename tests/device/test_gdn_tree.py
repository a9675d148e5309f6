"""The gated delta rule over prefix trees on a GPU: every result, repeated, in graphs, compiled."""

import pytest
import torch
from torch.nn.functional import normalize

from qla_kernels import SharedLayout, chunk_gated_delta_rule
from qla_kernels import shared_prefix_gated_delta_rule as rule
from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.kernels import child_sums
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.hybrid import prepare_gated_delta_rule
from qla_kernels.runtime import jit
from tests import gdn_tree_check
from tests.compare import assert_close
from tests.gdn_tree_check import KERNEL_FORESTS, tree_case
from tests.gdn_trees import Forest

pytestmark = pytest.mark.hopper

BF16, FP16 = torch.bfloat16, torch.float16
# Several groups; one of many short responses (three blocks of siblings); turns of a dialogue.
FORESTS = {
    **KERNEL_FORESTS,
    "groups": Forest(
        (1000, 130, 64, 7, 500, *[65] * 8, 2049, 640, 1), (-1, 0, 0, 0, -1, *[4] * 8, -1, 13, 13)
    ),
    "300 leaves": Forest((200, *[3] * 300), (-1, *[0] * 300)),
    "8 turns": Forest((256,) * 8, tuple(range(-1, 7))),
}


def run(x):
    from qla_kernels.gdn.tree import launch
    from qla_kernels.gdn.tree.ops import IncomingTree, SavedTree

    done = launch.gdn_tree_fwd(x.call, x.tables, x.options)
    saved = SavedTree(done.g_cum, done.A, done.states)
    incoming = IncomingTree(x.do, x.dfinal)
    return done, launch.gdn_tree_bwd(x.call, x.tables, saved, incoming, x.options)


def same(one, other) -> bool:
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("final", [True, False])
@pytest.mark.usefixtures("poison")
def test_a_tree(name, dtype, final):
    x = tree_case(FORESTS[name], dtype, (2, 4), final=final, state_v_first=final, device="cuda")
    gdn_tree_check.check(x, *run(x))


@pytest.mark.parametrize(
    "sizes", [(64, 64), (64, 128), (128, 64), (96, 192), (48, 256), (256, 512)], ids=str
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_head_sizes(sizes, dtype):
    x = tree_case(FORESTS["groups"], dtype, (2, 4), sizes, device="cuda")
    gdn_tree_check.check(x, *run(x))


@pytest.mark.parametrize("gate", ["none", "strong", "total"])
def test_gates(gate):
    x = tree_case(FORESTS["groups"], BF16, (1, 3), gate=gate, device="cuda")
    gdn_tree_check.check(x, *run(x))


@pytest.mark.parametrize("choice", [(64, True), (128, True), (128, False)], ids=str)
def test_each_forward_kernel(choice, monkeypatch):
    monkeypatch.setattr(gdn_plan, "tree", lambda *_: ForwardChoice(*choice))
    x = tree_case(FORESTS["groups"], BF16, (2, 4), device="cuda")
    gdn_tree_check.check(x, *run(x))


@pytest.mark.parametrize("name", ["groups", "300 leaves", "8 turns"])
def test_repeats_bitwise(name):
    x = tree_case(FORESTS[name], BF16, (4, 16), device="cuda")
    first = run(x)
    for _ in range(50):
        assert all(same(a, b) for a, b in zip(first, run(x), strict=True))


def model_call(tokens: int, heads=(2, 4), size=128):
    H, HV = heads
    given = {name: torch.randn(1, tokens, H, size) for name in "qk"}
    given["v"] = torch.randn(1, tokens, HV, size)
    given = {name: x.to("cuda", BF16).requires_grad_() for name, x in given.items()}
    for name in ("g", "beta"):
        given[name] = torch.randn(1, tokens, HV, device="cuda", dtype=BF16).requires_grad_()
    given["A_log"] = torch.linspace(-2, 2, HV).cuda().requires_grad_()
    given["dt_bias"] = torch.randn(HV).cuda().requires_grad_()
    return given


FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


def test_a_group_is_its_sequences_as_a_model_calls():
    """The public function against the plain one on copies of the prompt; all gradients."""
    prompt, responses = 500, [130, 64, 7]
    layout = SharedLayout.from_lengths([(prompt, responses)], device="cuda")
    given = model_call(layout.num_tokens)
    starts = torch.tensor([prompt, *responses]).cumsum(0).tolist()
    order, bounds = [], [0]
    for start, length in zip(starts, responses, strict=False):
        order += [*range(prompt), *range(start, start + length)]
        bounds.append(len(order))
    names = [n for n in given if n not in ("A_log", "dt_bias")]
    whole = {n: x[:, order] if n in names else x for n, x in given.items()}
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    want, states = chunk_gated_delta_rule(**whole, **FLAGS, cu_seqlens=cu, output_final_state=True)
    got, final = rule(**given, **FLAGS, layout=layout, output_final_state=True)
    assert_close("o", got[:, order], want, 1e-2)
    assert_close("final", final, states, 1e-2)
    do, dfinal = torch.randn_like(got), torch.randn_like(final)
    share = torch.ones(layout.num_tokens, device="cuda")
    share[:prompt] = len(responses)
    of_copies = (do / share[None, :, None, None])[:, order]
    wanted = torch.autograd.grad((want * of_copies).sum() + (states * dfinal).sum(), given.values())
    found = torch.autograd.grad((got * do).sum() + (final * dfinal).sum(), given.values())
    for name, a, b in zip(given, found, wanted, strict=True):
        assert_close(name, a, b, 4e-2, 4e-2)


def test_a_graph_of_a_tree_follows_new_inputs():
    layout = SharedLayout.from_lengths([(300, [65, 130]), (64, [1])], device="cuda")
    given = model_call(layout.num_tokens)

    def step():
        o, _ = rule(**given, **FLAGS, layout=layout)
        return o.detach(), *torch.autograd.grad(o.float().square().sum(), given.values())

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    for _ in range(2):
        with torch.no_grad():
            given["v"].copy_(torch.randn_like(given["v"]))
            given["q"].copy_(torch.randn_like(given["q"]))
        graph.replay()
        assert same(kept, step())


def test_does_not_synchronise():
    layout = SharedLayout.from_lengths([(300, [65, 130])], device="cuda")
    given = model_call(layout.num_tokens)

    def step():
        o, _ = rule(**given, **FLAGS, layout=layout)
        torch.autograd.grad(o, given.values(), torch.ones_like(o))

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiles():
    torch._dynamo.reset()
    layout = SharedLayout.from_lengths([(70, [65, 3])], device="cuda")
    prepare_gated_delta_rule(layout)
    given = model_call(layout.num_tokens)

    def layer(**x):
        return rule(**x, **FLAGS, layout=layout)[0]

    want, got = layer(**given), torch.compile(layer, fullgraph=True)(**given)
    assert torch.equal(got, want)
    for a, b in zip(
        *(torch.autograd.grad(o.float().square().sum(), given.values()) for o in (got, want)),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_two_thousand_leaves_leave_no_states():
    """Of 2 MiB each; tests/host/test_gdn_memory.py counts what there is instead."""
    layout = SharedLayout.from_lengths([(64, [1] * 2000)], device="cuda")
    given = model_call(layout.num_tokens, (8, 32))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, _ = rule(**given, **FLAGS, layout=layout)
    assert torch.cuda.max_memory_allocated() - before < 2**28
    torch.autograd.grad(o.float().sum(), given.values())
    assert torch.cuda.max_memory_allocated() - before < 4.5 * 2**30


def test_keys_of_a_fused_projection_are_read_in_place():
    layout = SharedLayout.from_lengths([(70, [65, 3])], device="cuda")
    given = model_call(layout.num_tokens)
    given = {n: x.detach() for n, x in given.items()}
    fused = torch.full((1, layout.num_tokens, 5, 128), torch.nan, dtype=BF16, device="cuda")
    fused[:, :, 2:4] = normalize(given["k"].float(), dim=-1)
    given["k"] = fused[:, :, 2:4]
    want = rule(**{**given, "k": given["k"].contiguous()}, layout=layout)[0]
    assert torch.equal(rule(**given, layout=layout)[0], want)


@pytest.mark.parametrize("variant", child_sums.VARIANTS, ids=jit.variant_id)
def test_child_sums(variant):
    from qla_kernels.gdn.tree import launch

    x, into = torch.randn(130, 4, 128, 128).cuda(), torch.randn(5, 4, 128, 128).cuda()
    runs = torch.tensor([(0, 3, 1), (1, 0, 100), (101, 4, 29)], dtype=torch.int32).cuda()
    want = into.clone()
    for first, row, count in runs.tolist():
        for child in range(first, first + count):
            want[row] += x[child]
    launch.child_sums(x, runs, into)
    assert torch.equal(into, want)
