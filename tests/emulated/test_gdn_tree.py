"""The gated delta rule over prefix trees, emulated: the launches of a tree on CPU tensors."""

import pytest
import torch

from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.kernels import child_sums
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.gdn.tree import launch
from qla_kernels.gdn.tree.ops import IncomingTree, SavedTree
from qla_kernels.runtime import jit
from tests import gdn_tree_check
from tests.gdn_tree_check import KERNEL_FORESTS, TreeCase, tree_case

pytestmark = pytest.mark.usefixtures("seeds", "poison")

BF16, FP16 = torch.bfloat16, torch.float16
CHOICES = {
    "64 columns, solves": ForwardChoice(64, True),
    "128 columns, solves": ForwardChoice(128, True),
    "128 columns, A is given": ForwardChoice(128, False),
}


def both(x: TreeCase):
    done = launch.gdn_tree_fwd(x.call, x.tables, x.options)
    saved = SavedTree(done.g_cum, done.A, done.states)
    incoming = IncomingTree(x.do, x.dfinal)
    return done, launch.gdn_tree_bwd(x.call, x.tables, saved, incoming, x.options)


def same(one, other) -> bool:
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", KERNEL_FORESTS)
@pytest.mark.parametrize(("dtype", "final"), [(BF16, True), (FP16, False)])
def test_a_tree(name, dtype, final):
    x = tree_case(KERNEL_FORESTS[name], dtype, final=final, state_v_first=final)
    gdn_tree_check.check(x, *both(x))


@pytest.mark.parametrize("choice", CHOICES)
def test_each_forward_kernel(choice, monkeypatch):
    monkeypatch.setattr(gdn_plan, "tree", lambda *_: CHOICES[choice])
    x = tree_case(KERNEL_FORESTS["two groups"], BF16, heads=(1, 3))
    gdn_tree_check.check(x, *both(x))


@pytest.mark.parametrize("sizes", [(64, 64), (64, 128), (128, 64)], ids=str)
def test_head_sizes(sizes):
    x = tree_case(KERNEL_FORESTS["turns"], BF16, sizes=sizes)
    gdn_tree_check.check(x, *both(x))


@pytest.mark.parametrize("gate", ["none", "strong", "total"])
def test_gates(gate):
    x = tree_case(KERNEL_FORESTS["two groups"], BF16, gate=gate)
    gdn_tree_check.check(x, *both(x))


def test_blocks_of_siblings(monkeypatch):
    """Any division of siblings into blocks gives the same sums, in the same order."""
    from qla_kernels.gdn.tree import tables

    found = []
    for siblings in (128, 2):
        monkeypatch.setattr(tables, "SIBLINGS", siblings)
        found.append(both(tree_case(KERNEL_FORESTS["a group"], BF16, heads=(1, 1))))
    assert all(same(a, b) for a, b in zip(*found, strict=True))


def test_any_schedule_gives_the_same_bits(seeds):
    x = tree_case(KERNEL_FORESTS["two groups"], BF16, heads=(1, 1))
    found = []
    for seed in range(3):
        seeds["seed"] = seed
        found.append(both(x))
    assert all(same(a, b) for run in found[1:] for a, b in zip(found[0], run, strict=True))


def test_a_tree_of_roots_is_a_packed_batch(monkeypatch):
    from qla_kernels.gdn.call import Incoming, Options, SavedForward
    from qla_kernels.gdn.launch import forward

    plan = gdn_plan.Plan(ForwardChoice(64, True))
    monkeypatch.setattr(gdn_plan, "tree", lambda *_: plan.kernel)
    monkeypatch.setattr(gdn_plan, "forward", lambda *_: plan)
    x = tree_case(KERNEL_FORESTS["no tree"], BF16)
    done, grads = both(x)
    call = x.call._replace(cu_seqlens=x.tables.bounds)
    options = Options(is_train=True, output_final_state=True)
    want = forward.gdn_fwd(call, options)
    saved = SavedForward(want.g_cum, want.A, [])
    wanted = forward.gdn_bwd(call, saved, Incoming(x.do, x.dfinal, False), options)
    assert same(done, (want.o, want.final_state, want.g_cum, want.A))
    assert same(grads, wanted)


def test_no_tokens():
    x = tree_case(gdn_tree_check.Forest((), ()), BF16, final=False)
    done, grads = both(x)
    assert done.o.shape == x.call.v.shape
    assert grads.dq.shape == x.call.q.shape


@pytest.mark.parametrize("variant", child_sums.VARIANTS, ids=jit.variant_id)
@pytest.mark.parametrize("counts", [[1], [8, 9], [3, 20, 1]], ids=str)
@pytest.mark.kernels("gdn.child_sums")
def test_child_sums(variant, counts):
    """Bit for bit the sum of one child after the other; other rows are left alone."""
    x = torch.randn(sum(counts), 1, 64, 68)
    into = torch.randn(len(counts) + 2, 1, 64, 68)
    rows = torch.randperm(len(into))[: len(counts)].tolist()
    runs, want, first = [], into.clone(), 0
    for row, count in zip(rows, counts, strict=True):
        runs.append((first, row, count))
        for child in range(first, first + count):
            want[row] += x[child]
        first += count
    launch.child_sums(x, torch.tensor(runs, dtype=torch.int32), into)
    assert torch.equal(into, want)


@pytest.mark.kernels("gdn.wide_fwd", "gdn.wide_states", "gdn.wide_dstate", "gdn.wide_grads")
@pytest.mark.parametrize(
    ("name", "dtype", "final"),
    [("two groups", BF16, True), ("turns", FP16, False), ("no tree", BF16, False)],
)
def test_wide_heads(name, dtype, final):
    x = tree_case(KERNEL_FORESTS[name], dtype, sizes=(256, 64), final=final, state_v_first=final)
    gdn_tree_check.check(x, *both(x))


@pytest.mark.kernels("gdn.wide_fwd", "gdn.wide_states", "gdn.wide_dstate", "gdn.wide_grads")
def test_interleavings_with_wide_heads(seeds):
    x = tree_case(KERNEL_FORESTS["equal leaves"], BF16, sizes=(256, 128), gate="none")
    want = both(x)
    gdn_tree_check.check(x, *want)
    for seeds["seed"] in range(1, 4):
        assert all(map(same, both(x), want))
