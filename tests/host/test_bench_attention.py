"""The attention adapters, ours and rivals' stand-ins, and what they are judged by."""

import dataclasses
import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

from benchmarks import sm90
from benchmarks.attention import problem
from benchmarks.attention import rivals as adapters
from benchmarks.attention.ours import OursDualKV, OursSparse, ours
from benchmarks.attention.problem import attention_inputs, attention_truth, replicas
from benchmarks.attention.rivals import (
    CudnnAttention,
    FlashAttention4,
    FlashAttention4Shared,
    FlexAttention,
    block_mask,
    known,
    merge,
)
from benchmarks.attention.workloads import DUALKV, DecoderLayer, SharedPrompts, VerticalSlash
from benchmarks.harness.messages import Options
from benchmarks.harness.problems import problem_of
from benchmarks.harness.records import OK, Result
from benchmarks.harness.worker import Worker
from benchmarks.hybrid.layers import layer_inputs, layer_truth, layer_work
from tests.host import rival_stand_ins as rivals

CPU = torch.device("cpu")
GROUPS = (
    ((5, (3, 7, 1)), (4, (2,)), (6, ())),  # unequal groups, one without responses
    ((8, (4, 4)), (8, (4, 4))),  # equal lengths, which cuDNN needs
)


def attention_verdict(implementation, workload):
    inputs = attention_inputs(workload, CPU, torch.float32)
    call = implementation.prepare(workload, inputs)
    truth = attention_truth(workload, inputs)
    raw = call.run()
    if workload.direction == "bwd" and call.eager is not None:
        eager = call.eager()
        for _ in range(2):  # it keeps its forward
            torch.testing.assert_close(tuple(eager())[:3], tuple(raw)[:3])
    return truth.judge(call.collect(raw), torch.float32)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_our_attention(direction):
    shared = SharedPrompts("test", GROUPS[0], direction, heads=(2, 4), head_dim=16)
    for adapter in ours("dualkv"):
        assert attention_verdict(adapter, shared).complaint is None
    for density in (0.6, 1.0):
        masked = VerticalSlash(512, density, 1, direction=direction, heads=(1, 2), head_dim=16)
        assert attention_verdict(OursSparse(), masked).complaint is None


def test_our_index_holds_what_the_definitions_holds(monkeypatch):
    workload = VerticalSlash(1024, direction="index", heads=(2, 4), head_dim=16)
    assert attention_verdict(OursSparse(), workload).complaint is None
    assert FlexAttention().inapplicable(workload) is not None
    assert FlashAttention4().inapplicable(workload) is not None
    calls = OursSparse().prepare(workload, attention_inputs(workload, CPU, torch.float32))
    v_idx, v_cnt, d_bits, held = calls.run()
    truth = attention_truth(workload, attention_inputs(workload, CPU, torch.float32))
    fewer = calls.collect((v_idx, v_cnt, torch.ones_like(d_bits), held))
    assert "recall is off" in truth.judge(fewer, torch.float32).complaint


def test_a_dense_mask_is_a_rivals_causal_attention():
    workload = VerticalSlash(256, heads=(2, 4), head_dim=16)
    assert workload.pairs == 256 * 257 // 2
    with rivals.installed(**rivals.flash_attn_4()):
        assert FlashAttention4().inapplicable(workload) is None
        assert attention_verdict(FlashAttention4(), workload).complaint is None


def test_truth_of_a_long_workload_is_of_two_key_heads(monkeypatch):
    workload = VerticalSlash(256, direction="bwd", heads=(3, 6), head_dim=16)
    inputs = attention_inputs(workload, CPU, torch.float32)
    whole = attention_truth(workload, inputs)
    monkeypatch.setattr(problem, "ALL_HEADS", 255)
    part = attention_truth(workload, inputs)
    assert part.key_heads == (0, 2)
    for name, heads in (("dq", [0, 1, 4, 5]), ("dk", [0, 2]), ("dv", [0, 2])):
        assert torch.equal(part.want[name], whole.want[name][:, :, heads])
    call = OursSparse().prepare(workload, inputs)
    assert part.judge(call.collect(call.run()), torch.float32).complaint is None


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("adapter", known("dualkv")[2:5], ids=lambda x: x.name)
def test_flash_attention_4(adapter, direction, groups):
    workload = SharedPrompts("test", groups, direction, heads=(2, 4), head_dim=16)
    with rivals.installed(**rivals.flash_attn_4()):
        assert attention_verdict(adapter, workload).complaint is None


@pytest.fixture
def cudnn(monkeypatch):
    """Its backend cannot run here: the definition's stands in."""
    backends = torch.nn.attention.SDPBackend
    monkeypatch.setattr(backends, "CUDNN_ATTENTION", backends.MATH)
    return CudnnAttention()


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_cudnn_with_padding(direction, groups, cudnn):
    workload = SharedPrompts("test", groups, direction, heads=(2, 4), head_dim=16)
    assert cudnn.inapplicable(workload) is None
    assert attention_verdict(cudnn, workload).complaint is None
    full = replicas(workload, CPU, padded=True)
    assert len(set(full.lengths)) == 1
    assert int(full.first.sum()) == workload.tokens


MASKED = (
    SharedPrompts("test", ((150, (40, 3)), (7, (90,))), heads=(2, 4), head_dim=16),
    VerticalSlash(512, 0.5, 1, heads=(1, 2), head_dim=16),
)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("masked", MASKED, ids=lambda w: w.family)
def test_flex_attention(masked, direction, monkeypatch):
    monkeypatch.setattr(FlexAttention, "compiled", False)
    # its eager form has a backward, but says that CPUs have none
    monkeypatch.setattr(flex_attention, "_validate_device", lambda q, k, v: None)
    workload = dataclasses.replace(masked, direction=direction)
    assert attention_verdict(FlexAttention(), workload).complaint is None


def test_flex_attention_is_compiled_for_each_length_by_itself(monkeypatch):
    counter = CompileCounterWithBackend("eager")
    compiled = functools.partial(torch.compile, backend=counter)
    monkeypatch.setattr(torch, "compile", compiled)
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in (40, 41, 42):
            for seed in (0, 1):  # which needs no kernel of its own
                workload = SharedPrompts("test", ((length, (5, 6)),), heads=(1, 2), head_dim=16)
                inputs = attention_inputs(workload, CPU, torch.float32, seed)
                FlexAttention().prepare(workload, inputs).run()
    assert counter.frame_count == 3


@pytest.mark.parametrize("masked", MASKED, ids=lambda w: w.family)
def test_the_block_mask_is_the_one_that_flex_attention_makes(masked):
    visible = problem.visibility(masked, CPU)
    got = block_mask(flex_attention, visible, masked.tokens, CPU)
    want = flex_attention.create_block_mask(
        lambda b, h, query, key: visible(query, key), None, None, masked.tokens, masked.tokens, CPU
    )
    assert got.shape == want.shape
    for side in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(got, f"{side}_num_blocks")
        assert torch.equal(counts, getattr(want, f"{side}_num_blocks"))
        columns = torch.arange(counts.shape[-1])
        listed = columns < counts[..., None]  # the rest is in any order
        indices = [getattr(mask, f"{side}_indices") for mask in (got, want)]
        assert torch.equal(*(torch.where(listed, x, 0) for x in indices))


# --- a decoder layer

SMALL = DecoderLayer(
    "test", GROUPS[0], dtype="bfloat16", heads=(2, 4), head_dim=8, hidden=24, intermediate=40
)


def layer_verdict(implementation, workload):
    inputs = layer_inputs(workload, CPU, torch.float32)
    assert implementation.inapplicable(workload) is None
    call = implementation.prepare(workload, inputs)
    verdict = layer_truth(workload, inputs).judge(call.collect(call.run()), torch.float32)
    names = ("0.full.q_proj", "0.full.q_norm", "1.mlp.down_proj")
    assert set(verdict.errors) >= {"y", "dx", *(f"dw.{name}" for name in names)}
    assert len(verdict.errors) == 13
    return verdict


def test_a_layer_packed_is_every_sequence_alone(cudnn):
    assert layer_verdict(OursDualKV(), SMALL).complaint is None
    equal = dataclasses.replace(SMALL, groups=GROUPS[1])
    assert layer_verdict(cudnn, equal).complaint is None
    assert cudnn.inapplicable(SMALL) == "it has no packed sequences"
    with rivals.installed(**rivals.flash_attn_4()):
        assert layer_verdict(FlashAttention4(), SMALL).complaint is None


def test_a_layer_with_positions_that_do_not_restart_is_wrong(monkeypatch):
    ends = replicas(SMALL, CPU)
    one_after_the_other = ends._replace(position=torch.arange(len(ends.position)))
    monkeypatch.setattr("benchmarks.hybrid.layers.replicas", lambda *_: one_after_the_other)
    inputs = layer_inputs(SMALL, CPU, torch.float32)
    call = OursDualKV().prepare(SMALL, inputs)
    monkeypatch.undo()
    verdict = layer_truth(SMALL, inputs).judge(call.collect(call.run()), torch.float32)
    assert "is off by" in verdict.complaint


def test_a_worker_measures_layers_and_attention():
    said = []
    worker = Worker(said.append, [OursDualKV()])
    small = dataclasses.replace(MASKED[0], direction="bwd")
    for workload in (SMALL, small):
        assert worker.row(workload, ["ours"], Options(rounds=1, burst_s=0.0))
    results = [m for m in said if isinstance(m, Result)]
    assert [r.status for r in results] == [OK, OK], results
    assert all(r.p50_ms > 0 for r in results)


def test_the_others_leave_layers_alone():
    apart = {i.name for i in known("dualkv") if i.inapplicable(SMALL) is not None}
    assert apart == {"ours_deterministic", "fa4_shared", "fa4_calls", "cudnn", "flex"}


def test_the_layer_is_qwen3_8b_and_its_work_is_counted():
    layer = DUALKV["layer"][0]
    assert layer.name == "dualkv-layer-8x32-A"
    parameters = 4096 * (32 + 8 + 8 + 32) * 128 + 3 * 4096 * 12288
    work = layer_work(layer, 2)
    assert work.flops == 6 * parameters * 61440 + 7 * 2 * layer.pairs * 128 * 32
    problem = problem_of(SMALL, CPU)
    assert problem.work == layer_work(SMALL, 4)
    sets = [problem_of(SMALL, CPU).inputs[0].weights[0]["q_proj"] for _ in range(2)]
    assert torch.equal(*sets)


def test_attention_has_no_forward_and_backward_in_one_call():
    def names(*arguments):
        return [w.name for w in sm90.select(sm90.parse(["dualkv", *arguments]))]

    assert names("--set", "short", "--direction", "both") == []
    assert names("--set", "layer,short", "--direction", "both") == [w.name for w in DUALKV["layer"]]


# --- what merges three calls


def test_the_calls_alone_merge_nothing_that_is_timed(monkeypatch):
    merges = []
    monkeypatch.setattr(adapters, "merge", lambda *x: (merges.append(1), merge(*x))[1])
    workload = SharedPrompts("test", GROUPS[0], heads=(2, 4), head_dim=16)
    inputs = attention_inputs(workload, CPU, torch.float32)
    with rivals.installed(**rivals.flash_attn_4()):
        for adapter, timed, collected in (
            (FlashAttention4Shared(), 1, 1),
            (FlashAttention4Shared(merges=False), 0, 1),
        ):
            merges.clear()
            call = adapter.prepare(workload, inputs)
            raw = call.run()
            assert len(merges) == timed
            call.collect(raw)
            assert len(merges) == collected
    assert known("dualkv")[4].on_request


def test_merge_of_disjoint_keys_is_attention_over_all():
    q, k, v = torch.randn(3, 2, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)

    def attend(keys):
        scores = torch.einsum("qhd,khd->hqk", q, k[keys])
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys]), scores.logsumexp(-1)

    o, lse = merge(attend(slice(0, 4)), attend(slice(4, 10)))
    whole = attend(slice(0, 10))
    torch.testing.assert_close(o, whole[0])
    torch.testing.assert_close(lse, whole[1])
