"""Sequences cut over ranks: 2 and 4 processes over gloo against one; contexts and refusals."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from qla_kernels import Unsupported, chunk_gated_delta_rule, chunk_gated_delta_rule_fwd
from qla_kernels.gdn import ShardError, build_cp_context
from qla_kernels.gdn.sharded import ops as shard_ops
from qla_kernels.integrations import fla
from tests.gdn_calls import Call, call, gradients, leaves
from tests.gdn_shard_ranks import LENGTHS
from tests.ranks import DEADLINE, WORLD, start

CASES = [f"{name}, {n} ranks" for n in (2, 4) for name in (*LENGTHS, "FLA's context")]
RAISED = {
    "dtype": "dtype is float64 on rank 0 and float32 on rank 2",
    "gradients": "gradients is False on rank 0 and True on rank 2",
    "malformed": "g has shape (1, 5, 2)",
    "contents": "beta is NaN, first at token 0",
    "missing": "q is of type NoneType",
    "flags": "use_qk_l2norm_in_kernel is False on rank 0 and True on rank 2",
    "whole batch": "280 tokens, and cp_context says that 70 are here; need this rank's tokens",
    "states": "initial_state or output_final_state with cp_context",
    "bound": "warm_log_bound is -12.0 on rank 0 and -104.0 on rank 2",
    "context": "ranks after rank 1 and",
    "chunk size": "chunk_size is 7; need 16, 32 or 64",
    "keyword": "unknown keyword head_dim",
    "both bounds": "exact and warm_log_bound",
    "scale": "scale is [1] of type list; need a number",
    "flag": "allow_neg_eigval is 'no' of type str; need True or False",
    "layout": "cp_context with layout 'striped'; need 'contiguous' or 'zigzag'",
    "place": "cp_context with 3 ranks before and 1 behind rank 2 of 4; need at most 2 and 1",
    "no bounds": "cp_context without cu_seqlens",
    "total": "the number of tokens is 70 on rank 0 and 140 on rank 2",
}
COMPARED = ("dtype", "gradients", "flags", "bound", "context", "total")  # none is wrong by itself
OWN = ("TypeError: ", "Unsupported: ")  # what the rank itself raises may be these


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return start("tests.gdn_shard_ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_ranks_are_one(said, case):
    errors = [rank.get(case, rank.get("no end")) for rank in said]
    assert all(isinstance(e, float) and e < 1e-10 for e in errors), errors


@pytest.mark.parametrize("case", RAISED)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(said, case):
    assert len(said) == WORLD
    for n, rank in enumerate(said):
        assert rank[case].startswith(("ValueError: ", *(OWN if n == 2 else ()))), rank[case]
        assert RAISED[case] in rank[case]
        if case not in COMPARED:  # the one that knows says it to the others
            assert ("rank 2: " in rank[case]) == (n != 2)


def test_ranks_go_on_after_an_error(said):
    assert [rank["nothing"] for rank in said] == [None] * WORLD


def test_a_lost_rank_is_an_error_in_time(said):
    for rank in said[: WORLD - 1]:
        assert rank["a death"].startswith(ShardError.__name__), rank["a death"]
        assert rank["seconds until it is noticed"] < 5 * DEADLINE


@pytest.fixture(scope="module")
def after_batches(tmp_path_factory):
    return start("tests.gdn_shard_batches", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("world", [3, 4])
def test_batches_may_differ_where_ranks_compare_once(after_batches, world):
    """As on GPUs. Whether to compare had depended on what else differs from rank to rank."""
    for rank in after_batches[:world]:
        assert rank.get(f"changing, {world} ranks", rank.get("no end")) < 1e-10
        assert rank[f"exchanges, {world} ranks"] == 1


@pytest.mark.parametrize("case", ["scale", "exact", "norm", "line"])
def test_what_is_mixed_after_it_was_agreed_on_is_an_error(after_batches, case):
    """On each rank that is told something by one that made another call."""
    for n, rank in enumerate(after_batches):
        text = rank[f"mixed {case}"]
        if n < 2:  # the line passes them first
            assert text is None
        else:
            assert text.startswith("RankError: cp_context: the link of rank "), text
        assert rank["afterwards"] is None


def test_backwards_in_another_order_are_an_error(after_batches):
    for n, rank in enumerate(after_batches):
        text = rank["a backward"]
        assert text is None if n == 3 else "RankError: cp_context: the link of rank " in text


@pytest.fixture
def alone():
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_compiles_to_one_graph(alone):
    x = call([30, 40], activations=True)
    del x["initial_state"]
    x["cp_context"] = build_cp_context(x.pop("cu_seqlens"))

    def layer(x: Call) -> tuple[torch.Tensor, None]:
        return chunk_gated_delta_rule(**x)

    eager, traced = leaves(x), leaves(x)
    want, got = layer(eager), torch.compile(layer, fullgraph=True, backend="aot_eager")(traced)
    assert torch.equal(got[0], want[0])
    got_grads, want_grads = gradients(got, traced), gradients(want, eager)
    assert all(torch.equal(got_grads[n], want_grads[n]) for n in want_grads)


def keep(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    ours = operator is torch.ops.qla_kernels.gdn_shard_fwd.default
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


def test_checkpointing_by_operator_name_exchanges_once(alone, monkeypatch):
    operator = shard_ops.gdn_shard_fwd
    runs, run = [], operator.on_cpu

    def counted(*given: object) -> object:
        runs.append(1)
        return run(*given)

    monkeypatch.setattr(operator, "on_cpu", counted)
    x = call([30, 40], activations=True)
    del x["initial_state"]
    x["cp_context"] = build_cp_context(x.pop("cu_seqlens"))
    whole, again = leaves(x), leaves(x)
    want = gradients(chunk_gated_delta_rule(**whole), whole)
    runs.clear()
    contexts = functools.partial(create_selective_checkpoint_contexts, keep)
    options = {"use_reentrant": False, "context_fn": contexts}
    got = gradients(checkpoint(chunk_gated_delta_rule, **again, **options), again)
    assert len(runs) == 1
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=str)
def test_ranks_without_a_token(alone, lengths):
    x = call(lengths, activations=True)
    del x["initial_state"]
    x["cp_context"] = build_cp_context(x.pop("cu_seqlens"))
    x = leaves(x)
    result = chunk_gated_delta_rule(**x)
    assert result[0].shape == x["v"].shape
    assert all(dx.shape == x[n].shape and not dx.any() for n, dx in gradients(result, x).items())


def test_contexts_that_say_too_little():
    x = call([70])
    del x["initial_state"], x["cu_seqlens"]
    for context, text in (
        (SimpleNamespace(), "without cu_seqlens, pre_num_ranks, post_num_ranks"),
        (
            SimpleNamespace(cu_seqlens=torch.tensor([0, 70]), pre_num_ranks=0, post_num_ranks=0),
            "without a process group",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            chunk_gated_delta_rule(**x, cp_context=context)


@pytest.mark.parametrize("bounds", [[], [1, 70], [0, 40, 30, 70]], ids=str)
def test_contexts_of_bounds_that_are_none(bounds, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    with pytest.raises(ValueError, match=r"cu_seqlens .* need to start at 0 and never fall"):
        build_cp_context(torch.tensor(bounds, dtype=torch.int32))


def test_contexts_where_the_default_is_a_gpu(alone):
    bounds = torch.tensor([0, 70])
    with torch.device("meta"):  # as one, but there
        context = build_cp_context(bounds)
    assert context.cu_seqlens.is_cpu
    assert context.cu_seqlens_cpu.is_cpu


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_fla_hands_us_a_context_of_the_whole_job(alone, layout):
    """It had no group, so that we declined it, and FLA would have run each rank alone."""
    context = build_cp_context(torch.tensor([0, 70]), layout=layout)
    assert context.group is dist.group.WORLD
    assert replace(context, group=None).group is dist.group.WORLD
    x = call([70])
    del x["initial_state"], x["cu_seqlens"]
    assert fla.declined(**x, cp_context=context) is None


def test_a_group_of_others(alone):
    """torch hands one to a process that is not in it."""
    text = "a group without this process; need one that it is in"
    with pytest.raises(ValueError, match=text):
        build_cp_context(torch.tensor([0, 70]), dist.GroupMember.NON_GROUP_MEMBER)
    x = call([70])
    del x["initial_state"]
    context = build_cp_context(x.pop("cu_seqlens"))
    outside = replace(context, group=dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match=text):
        chunk_gated_delta_rule(**x, cp_context=outside)


def test_a_forward_alone_takes_no_context():
    x = call([70])
    with pytest.raises(Unsupported, match="call chunk_gated_delta_rule"):
        chunk_gated_delta_rule_fwd(
            *(x[n] for n in ("q", "k", "v", "g", "beta")), cp_context=SimpleNamespace()
        )
