"""The benchmark's steps of decoding: every way is right in every call, and wrong ones are seen."""

import pytest
import torch

from benchmarks.harness.messages import Options
from benchmarks.harness.problems import problem_of
from benchmarks.harness.records import OK, Result
from benchmarks.harness.worker import Worker
from benchmarks.hybrid import rivals
from benchmarks.hybrid.rivals import OursStep, in_one
from benchmarks.hybrid.step import STEPS, DecodeStep, step_inputs, step_truth, step_work

CPU = torch.device("cpu")
SMALL = DecodeStep((2, 4), 3, 16)


def verdict_of(implementation, workload=SMALL, dtype=torch.float32, calls=1):
    inputs = step_inputs(workload, CPU, dtype)
    call = implementation.prepare(workload, inputs)
    for _ in range(calls):
        raw = call.run()
    return step_truth(workload, inputs).judge(call.collect(raw), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("calls", [1, 20])
def test_every_way_does_the_same_in_every_call(dtype, calls):
    for way in rivals.known("hybrid")[2:]:
        verdict = verdict_of(way, dtype=dtype, calls=calls)
        assert verdict.complaint is None
        assert set(verdict.errors) == {"o", "ht"}


def test_input_sets_differ_in_all_but_the_weights():
    first, second = (step_inputs(SMALL, CPU, torch.float32, seed) for seed in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first.weights, second.weights, strict=True))
    assert not torch.equal(first.rows, second.rows)
    verdict = step_truth(SMALL, second)
    call = OursStep().prepare(SMALL, second._replace(weights=first.weights))
    assert verdict.judge(call.collect(call.run()), torch.float32).complaint is None


def test_states_lie_as_in_a_pool():
    """Those of all sequences lay side by side, row by row, and ours alone had them so."""
    for workload in (SMALL, DecodeStep((2, 8), 64, 16)):
        assert step_inputs(workload, CPU, torch.bfloat16).states.is_contiguous()


def other_slots(rows, rule, convolution, z, weight):
    return in_one(rows.roll(1, 0), rule, convolution, z, weight)


def no_gate(rows, rule, convolution, z, weight):
    return in_one(rows, rule, convolution, torch.full_like(z, 30), weight)


def weak_beta(rows, rule, convolution, z, weight):
    a, b, *rest = rule
    return in_one(rows, (a, b - 1, *rest), convolution, z, weight)


@pytest.mark.parametrize("wrong", [other_slots, no_gate, weak_beta])
def test_wrong_steps_are_noticed(wrong):
    assert "is off by" in verdict_of(OursStep(step=wrong)).complaint


def test_results_do_not_share_memory_with_the_pools():
    """The harness overwrites them with NaN before a replay."""
    call = OursStep().prepare(SMALL, step_inputs(SMALL, CPU, torch.float32))
    first = call.collect(call.run())
    kept = first["o"].clone()
    for x in first.values():
        x.fill_(torch.nan)
    assert torch.allclose(call.collect(call.run())["o"], kept)


def test_who_does_not_decode_says_so():
    for way in rivals.known("hybrid"):
        assert (way.inapplicable(STEPS[0]) is None) == (way.name not in ("ours", "whole"))


def test_the_worker_times_steps():
    said = []
    worker = Worker(said.append, rivals.known("hybrid")[2:])
    names = [way.name for way in rivals.known("hybrid")[2:]]
    assert worker.row(SMALL, names, Options(rounds=1, burst_s=0.0))
    results = [m for m in said if isinstance(m, Result)]
    assert [r.status for r in results] == [OK] * 3, results


def test_states_are_nearly_all_of_the_bytes():
    for workload in STEPS:
        heads, count = workload.heads[1], workload.sequences
        states = 2 * 4 * count * heads * 128 * 128
        assert 1 < step_work(workload, 2).bytes / states < 1.05
    assert problem_of(SMALL, CPU).work == step_work(SMALL, 4)
    assert len({workload.name for workload in STEPS}) == len(STEPS)
    assert STEPS[-1].reduced(64).sequences == 4
