"""Sequences cut over ranks: 2 and 4 processes over gloo against one; contexts and refusals."""

from types import SimpleNamespace

import pytest
import torch

from qla_kernels import Unsupported, chunk_gated_delta_rule, chunk_gated_delta_rule_fwd
from qla_kernels.gdn import ShardError
from tests.gdn_calls import call
from tests.gdn_shard_ranks import LENGTHS
from tests.ranks import DEADLINE, WORLD, start

CASES = [f"{name}, {n} ranks" for n in (2, 4) for name in (*LENGTHS, "FLA's context")]
RAISED = {
    "dtype": "dtype is float64 on rank 0 and float32 on rank 2",
    "gradients": "gradients is False on rank 0 and True on rank 2",
    "malformed": "g has shape (1, 5, 2)",
    "states": "initial_state or output_final_state with cp_context",
    "bound": "warm_log_bound is -12.0 on rank 0 and -inf on rank 2",
    "context": "ranks after rank 1 and",
}


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
        assert rank[case].startswith("ValueError: "), rank[case]
        assert RAISED[case] in rank[case]
        if case in ("malformed", "states"):  # the one that knows says it to the others
            assert ("rank 2: " in rank[case]) == (n != 2)


def test_ranks_go_on_after_an_error(said):
    assert [rank["nothing"] for rank in said] == [None] * WORLD


def test_a_lost_rank_is_an_error_in_time(said):
    for rank in said[: WORLD - 1]:
        assert rank["a death"].startswith(ShardError.__name__), rank["a death"]
        assert rank["seconds until it is noticed"] < 3 * DEADLINE


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


def test_a_forward_alone_takes_no_context():
    x = call([70])
    with pytest.raises(Unsupported, match="call chunk_gated_delta_rule"):
        chunk_gated_delta_rule_fwd(
            *(x[n] for n in ("q", "k", "v", "g", "beta")), cp_context=SimpleNamespace()
        )
