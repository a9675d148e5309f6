"""The block of a hybrid model: packed, in whole sequences, in passes, and every sequence alone."""

import dataclasses
import json

import pytest
import torch

import qla_kernels
from benchmarks import sm90
from benchmarks.attention.problem import replicas
from benchmarks.harness.messages import Options
from benchmarks.harness.problems import problem_of
from benchmarks.harness.records import NOT_APPLICABLE, OK, Result
from benchmarks.harness.truth import Truth
from benchmarks.harness.worker import Worker
from benchmarks.hybrid import layers, mixing, rivals
from benchmarks.hybrid.layers import layer_inputs, layer_truth, layer_work, passes
from benchmarks.hybrid.workloads import HYBRID, PARTS, SHAPES, HybridPart

CPU = torch.device("cpu")
GROUPS = ((70, (3, 9, 1)), (2, (5,)), (6, ()))  # unequal; a prompt shorter than the convolution
SMALL = HybridPart("test", GROUPS).reduced(1)
TREE, WHOLE = rivals.known("hybrid")[:2]


def verdict_of(implementation, workload):
    inputs = layer_inputs(workload, CPU, torch.float32)
    call = implementation.prepare(workload, inputs)
    return layer_truth(workload, inputs).judge(call.collect(call.run()), torch.float32)


@pytest.mark.parametrize("part", PARTS)
def test_packed_and_whole_are_every_sequence_alone(part):
    workload = dataclasses.replace(SMALL, part=part)
    for adapter in (TREE, WHOLE):
        verdict = verdict_of(adapter, workload)
        assert verdict.complaint is None
        named = {name.rpartition(".")[2] for name in verdict.errors}
        assert named >= {"y", "dx", "norm"}
    count = {"linear": 9, "full": 7, "mlp": 4}
    assert len(verdict.errors) == 2 + sum(count[half] for half in workload.halves)


@pytest.mark.parametrize("most", [90, 1])
def test_passes_add_up(most, monkeypatch):
    monkeypatch.setattr(layers, "most_tokens", lambda device: most)
    assert verdict_of(WHOLE, SMALL).complaint is None


def test_passes_are_as_few_as_the_memory_allows():
    full = replicas(HYBRID["block"][2], CPU)  # 28 sequences of 18432 tokens
    assert [cut.stop - cut.start for cut in passes(full, 180_000)] == [9, 9, 10]
    assert passes(full, 1 << 62) == [slice(0, 28)]
    assert len(passes(full, 1)) == 28


class Forgets(mixing.OverTree):
    """Responses that do not continue from their prompt, in the convolution alone."""

    def convolve(self, x, weight):
        bounds = torch.tensor([0, 70, 73, 82, 83, 85, 90, 96], dtype=torch.int32)
        return qla_kernels.causal_conv1d(x, weight, None, "silu", bounds)


def test_a_lost_halo_is_noticed(monkeypatch):
    monkeypatch.setattr(rivals, "OverTree", Forgets)
    assert "is off by" in verdict_of(TREE, SMALL).complaint


def test_slack_is_times_the_limit():
    want = torch.ones(1, 100, 1, 8)
    for slack, right in ((1.0, False), (4.0, True)):
        verdict = Truth({"y": want}, (0,), 1, slack=slack).judge({"y": 1.02 * want}, torch.bfloat16)
        assert (verdict.complaint is None) == right


def test_the_worker_times_steps_without_a_graph():
    said = []
    worker = Worker(said.append, [TREE, WHOLE])
    assert worker.row(SMALL, ["ours", "whole"], Options(rounds=1, burst_s=0.0))
    results = [m for m in said if isinstance(m, Result)]
    assert [r.status for r in results] == [OK, OK], results
    assert all(r.p50_ms > 0 and not r.graph for r in results)


def test_the_work_of_a_block_is_that_of_its_parts():
    whole, mixers, linear, full, mlp = (
        layer_work(HybridPart("A", SHAPES["8x16384+2048"], part=part), 2).flops
        for part in ("block", "mixers", "linear", "full", "mlp")
    )
    assert mixers == 3 * linear + full
    assert whole == mixers + 4 * mlp
    block = HYBRID["block"][0]
    assert (block.tokens, block.whole_tokens) == (32768, 147456)
    assert mlp == 6 * 3 * 2048 * 6144 * block.tokens
    assert problem_of(SMALL, CPU).work == layer_work(SMALL, 4)


def test_the_command_shortens_it_without_a_gpu(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: this is the path without one")
    row = "hybrid-linear-16x8192+1024"
    arguments = ["hybrid", "--quick", "--set", "parts", "--only", row, "--out", str(tmp_path)]
    assert sm90.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "float32 on the CPU path, lengths 64 times shorter" in printed
    (found,) = json.loads((tmp_path / "hybrid.json").read_text())["rows"]
    assert (found["layout"], found["kind"]) == ("16x8192+1024/64", "linear")
    statuses = {r["implementation"]: r["status"] for r in found["results"]}
    steps = {way.name for way in rivals.known("hybrid")[2:]}
    assert statuses == {"ours": OK, "whole": OK, **dict.fromkeys(steps, NOT_APPLICABLE)}
