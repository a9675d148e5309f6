"""The named shapes: all that was asked for is there, names are unique, totals as designed."""

from functools import partial

import pytest
import torch

from benchmarks.attention.problem import attention_work
from benchmarks.attention.workloads import DUALKV, SPARSE_RING, VerticalSlash
from benchmarks.gdn.problem import gdn_inputs, gdn_work
from benchmarks.gdn.workloads import (
    BACKWARD_HEADS,
    FORWARD_LENGTHS,
    GDN,
    HEADS,
    Gdn,
    label_lengths,
    parse_lengths,
    random_lengths,
    short_responses,
)
from benchmarks.harness.problems import num_input_sets, others
from benchmarks.harness.workload import Ceilings

CPU = torch.device("cpu")


def test_names_are_unique_and_stable():
    for families in (GDN, DUALKV, SPARSE_RING):
        for workloads in families.values():
            names = [w.name for w in workloads]
            assert len(set(names)) == len(names)
            assert not any(" " in name for name in names)
    assert Gdn((16, 64), (24576, 8192), "fwd", "published", True).name == (
        "gdn-fwd-16x64-24576+8192-published-h0"
    )


def test_forward_set_is_every_length_by_every_head_configuration():
    shapes = {(w.heads, w.layout) for w in GDN["forward"]}
    assert shapes == {(h, text) for h in HEADS for text in FORWARD_LENGTHS}
    assert len(FORWARD_LENGTHS) == 19
    assert {w.initial_state for w in GDN["published"]} == {False}
    assert {w.initial_state for w in GDN["published-h0"]} == {True}


def test_quick_set_has_21_forward_and_6_backward_rows():
    kinds = [w.direction for w in GDN["anchors"]]
    assert (kinds.count("fwd"), kinds.count("bwd")) == (21, 6)


def test_backward_set_is_8k_and_32k_in_up_to_8_sequences():
    shapes = [(w.heads, w.tokens, len(w.lengths)) for w in GDN["backward"]]
    assert sorted(shapes) == sorted(
        (h, t, n) for h in BACKWARD_HEADS for t in (8192, 32768) for n in (1, 2, 4, 8)
    )


def test_decode_set_is_every_batch_by_every_number_of_tokens():
    shapes = [(w.heads, len(w.lengths), *set(w.lengths)) for w in GDN["decode"]]
    assert sorted(shapes) == sorted(
        (heads, count, tokens)
        for heads in ((2, 8), (4, 16), (16, 32), (16, 64))
        for count in (64, 128, 256)
        for tokens in (1, 2, 4)
    )
    first = GDN["decode"][0]
    assert (first.kind, first.layout) == ("decode", "64 of 1")
    assert first.name == "gdn-decode-2x8-64of1-model-h0"
    assert all(w.initial_state and w.direction == "fwd" for w in GDN["decode"])


def test_filled_set_has_several_sequences_in_every_row():
    assert {w.heads[1] for w in GDN["filled"]} == {16, 32, 48, 64}
    assert min(len(w.lengths) for w in GDN["filled"]) == 2


@pytest.mark.parametrize("text", [*FORWARD_LENGTHS, "1x1", "64x3", "64x1", "64 of 1", "64 of 4"])
def test_length_labels_round_trip(text):
    assert label_lengths(parse_lengths(text)) == text


def test_lengths_stand_before_counts_for_one_sequence_and_for_one_token_too():
    """`1x100` was one sequence of 100 tokens, and `2x100` a hundred of two."""
    assert parse_lengths("100x1") == parse_lengths("100") == (100,)
    assert parse_lengths("1x100") == parse_lengths("100 of 1") == (1,) * 100
    assert parse_lengths("3000x5") == (3000,) * 5


def test_random_lengths_fill_the_total():
    for count in (1, 2, 8, 100):
        lengths = random_lengths(8192, count)
        assert (sum(lengths), len(lengths)) == (8192, count)
        assert min(lengths) >= 1
    assert random_lengths(8192, 8) == random_lengths(8192, 8)
    short = short_responses(256)
    assert min(short) >= 1
    assert max(short) <= 600


def test_reduced_keeps_the_number_of_sequences():
    for workload in GDN["short"] + GDN["anchors"]:
        smaller = workload.reduced(64)
        assert len(smaller.lengths) == len(workload.lengths)
        assert min(smaller.lengths) >= 1
        assert smaller.heads == workload.heads


def test_reduced_decodes_as_many_tokens_of_fewer_sequences():
    for factor in (16, 64):
        names = {w.reduced(factor).name for w in GDN["decode"]}
        assert len(names) == len(GDN["decode"])
        for workload in GDN["decode"]:
            smaller = workload.reduced(factor)
            assert len(smaller.lengths) == len(workload.lengths) // factor
            assert set(smaller.lengths) == set(workload.lengths)


def test_model_gates_reach_from_hardly_any_to_nearly_total_decay():
    inputs = gdn_inputs(Gdn((16, 64), (512,)), CPU, torch.float32)
    per_head = inputs.g.mean((0, 1))
    assert inputs.g.max() <= 0
    assert per_head.max() > -0.1
    assert per_head.min() < -5


def test_published_gates_never_decay_in_every_fourth_head():
    inputs = gdn_inputs(Gdn((2, 8), (256,), gate="published"), CPU, torch.float32)
    frozen = (inputs.g == 0).all(1)[0]
    assert frozen.tolist() == [h % 4 == 3 for h in range(8)]
    assert -0.1 < inputs.g[..., 0].mean() < -0.02


def test_inputs_are_reproducible_and_share_cu_seqlens():
    workload = Gdn((1, 2), (70, 5), "bwd", initial_state=True)
    first = gdn_inputs(workload, CPU, torch.bfloat16)
    again = gdn_inputs(workload, CPU, torch.bfloat16)
    (other,) = others(first, "cu_seqlens", partial(gdn_inputs, workload, CPU, torch.bfloat16), 1)
    assert torch.equal(first.v, again.v)
    assert not torch.equal(first.v, other.v)
    assert other.cu_seqlens is first.cu_seqlens
    assert first.cu_seqlens.tolist() == [0, 70, 75]
    torch.testing.assert_close(
        first.k.float().norm(dim=-1), torch.ones(1, 75, 1), atol=1e-2, rtol=0
    )


def test_enough_input_sets_to_outlast_the_cache():
    assert num_input_sets(10 << 20, 50 << 20) == 10
    assert num_input_sets(700 << 20, 50 << 20) == 2
    assert num_input_sets(1 << 30, 50 << 20) == 1  # 5 % of it stay
    assert num_input_sets(1, 50 << 20) == 16
    smallest = min(gdn_work(w).bytes for w in GDN["decode"])
    given = int(smallest / 2)  # as many states are given as returned
    assert num_input_sets(given, 50 << 20) * given >= 100 << 20


def test_counted_work_is_the_design_s():
    """Per chunk and value head: 4 + 1/r products of 64x128x128 and 32/r + 32.4 KB."""
    unit = 2 * 64 * 128 * 128
    for heads in ((2, 8), (16, 32), (16, 16)):
        group = heads[1] / heads[0]
        chunks = 10 * heads[1]
        work = gdn_work(Gdn(heads, (640,)))
        assert work.flops == pytest.approx(chunks * (4 + 1 / group) * unit)
        final_states = 128 * 128 * 4 * heads[1]
        assert work.bytes - final_states == chunks * 1024 * (32 / group + 32.375)
        backward = gdn_work(Gdn(heads, (640,), "bwd"))
        assert backward.flops == pytest.approx(chunks * (11 + 2.5 / group) * unit)


def test_work_of_decoding_is_states_in_and_out_and_the_tokens():
    for heads, count, tokens in (((2, 8), 64, 1), ((16, 32), 256, 4)):
        work = gdn_work(Gdn(heads, (tokens,) * count, initial_state=True, decode=True))
        states = 2 * count * heads[1] * 128 * 128 * 4
        q_k, v_o, gate, beta = 2 * heads[0] * 128 * 2, 2 * heads[1] * 128 * 2, 4, 2
        assert work.bytes == states + count * tokens * (q_k + v_o + heads[1] * (gate + beta))
        assert states > 0.9 * work.bytes
        h200 = Ceilings(780e12, 4.27e12)
        assert work.floor_seconds(h200) == work.bytes / h200.bandwidth


def test_floor_is_the_larger_of_compute_and_memory():
    work = gdn_work(Gdn((16, 64), (32768,)))
    assert work.floor_seconds(Ceilings(1e12, 1e15)) == work.flops / 1e12
    assert work.floor_seconds(Ceilings(1e18, 1e12)) == work.bytes / 1e12


def test_shared_prompt_totals():
    """Packed tokens as the design's tables have them: the random streams are the same."""
    tokens = {
        "S1": 43397, "S2": 80526, "S3": 11113, "S4": 1950, "S5": 24268, "S6": 19268, "S7": 9189,
        "S8": 35131, "A": 61440, "B": 73728,
    }  # fmt: skip
    found = {w.label: w.tokens for w in DUALKV["short"] + DUALKV["long"]}
    assert {label: found[label] for label in tokens} == tokens


@pytest.mark.parametrize("density", [0.1, 0.3])
def test_sparse_pairs_equal_the_mask_counted(density):
    workload = VerticalSlash(1024, density, 2)
    diagonals, columns = workload.mask()
    count = sum(
        (i // 64 - j // 64) in diagonals or j in columns for i in range(1024) for j in range(i + 1)
    )
    assert workload.pairs == count


def test_a_dense_workload_is_the_causal_triangle():
    workload = VerticalSlash(1024)
    assert workload.mask() == (tuple(range(16)), ())
    assert workload.pairs == 1024 * 1025 // 2
    assert [(len(p), len(r)) for p, r in workload.sequences()] == [(1024, 0)]
    assert "dense" in workload.name


def test_the_anchor_has_a_row_for_every_target():
    """Forward and backward under three masks, beside the dense ones, and an index."""
    anchor = SPARSE_RING["anchor"]
    assert {w.tokens for w in anchor} == {131072}
    kinds = sorted((w.direction, w.dense, w.run) for w in anchor)
    sparse = [(d, False, run) for d in ("bwd", "fwd") for run in (1, 4, 16)]
    dense = [(d, True, 1) for d in ("bwd", "fwd", "index")]
    assert kinds == sorted([*sparse, *dense])
    assert attention_work(anchor[-1], 2).flops == 2 * 64 * 131072 * 128 * 32
