"""The benchmark's serving rows: every way is right in every call, and wrong ones are seen."""

from dataclasses import replace

import pytest
import torch

from benchmarks import sm90
from benchmarks.gdn.ours import ours
from benchmarks.gdn.rivals import FLA, Definition, FlashQLA
from benchmarks.gdn.workloads import GDN
from benchmarks.harness.messages import Options
from benchmarks.harness.problems import PARTS, problem_of, work_of
from benchmarks.harness.records import OK, Result
from benchmarks.harness.truth import relative_l2
from benchmarks.harness.worker import Worker
from benchmarks.hybrid.step import APART
from benchmarks.rivals import implementations, names_for
from benchmarks.serving import rivals
from benchmarks.serving.ours import OursOneToken, OursServing, OursTwo
from benchmarks.serving.problem import batch_of
from benchmarks.serving.rivals import VLLM, FlashInferGathers, FlashInferPool, SGLang
from benchmarks.serving.workloads import (
    DECODE,
    DRAFTS,
    EVERY_ROW,
    PREFILL,
    SERVING,
    STEP,
    LayerStep,
    PoolDecode,
    PoolPrefill,
)
from tests.host import serving_stand_ins as theirs
from tests.host.rival_stand_ins import installed

CPU = torch.device("cpu")
PROMPTS = PoolPrefill((1, 2), 16, lengths=(128,) * 5)
KEPT = replace(PROMPTS, every=64)
ONE_PROMPT = replace(KEPT, lengths=(192,))
HALVES = replace(KEPT, pool="bfloat16")
TOKENS = PoolDecode((2, 4), 16, sequences=17)
VERIFIED = replace(TOKENS, drafts=3)
LAYER = LayerStep((2, 4), 3, 16)


def verdict_of(implementation, workload, dtype=torch.float32, calls=1):
    assert implementation.inapplicable(workload) is None
    make, _, truth_of, _ = PARTS[type(workload)]
    inputs = make(workload, CPU, dtype)
    call = implementation.prepare(workload, inputs)
    for _ in range(calls):
        raw = call.run()
    if call.eager:
        assert call.eager() is not None
    truth = truth_of(workload, inputs)
    truth = truth._replace(rounded=(*truth.rounded, *implementation.rounds))
    return truth.judge(call.collect(raw), dtype)


def truth_of(workload, inputs):
    return PARTS[type(workload)][2](workload, inputs)


@pytest.fixture
def everyone(monkeypatch):
    """The rivals, computing by the definition."""
    monkeypatch.setattr(rivals, "function", theirs.engine_function)
    norm = {"benchmarks.serving.gated_norm": {"gated_norm": theirs.gated_norm}}
    with installed(**theirs.flashinfer()), installed(**norm):
        yield


def ways(workload):
    return [i for i in rivals.known() if i.inapplicable(workload) is None]


ROWS = pytest.mark.parametrize(
    "workload", [PROMPTS, KEPT, ONE_PROMPT, HALVES, TOKENS, VERIFIED, LAYER], ids=lambda w: w.name
)


@ROWS
def test_every_way_is_right(workload, everyone):
    names = {way.name for way in ways(workload)}
    assert "ours" in names
    assert len(names) >= 3
    for way in ways(workload):
        verdict = verdict_of(way, workload)
        assert verdict.complaint is None, way.name
        kept = {"kept"} if workload in (KEPT, ONE_PROMPT, HALVES) else set()
        assert set(verdict.errors) == {"o", "ht"} | kept


@ROWS
def test_every_call_does_the_same(workload, everyone):
    """Of decoding but for what a state differs from the one that stays."""
    for way in ways(workload):
        first, sixth = (verdict_of(way, workload, calls=calls).errors for calls in (1, 6))
        allowed = APART if workload is TOKENS else 1e-6
        assert all(abs(sixth[name] - first[name]) < allowed for name in first), way.name


def test_the_state_of_a_step_stays_in_bf16(everyone):
    """Engines round products of the convolution to bf16.

    Their states crept from call to call, and the harness took a replay for one that does not write
    its result.
    """
    for way in ways(LAYER):
        call = way.prepare(LAYER, PARTS[type(LAYER)][0](LAYER, CPU, torch.bfloat16))
        _, second, third = (call.collect(call.run())["o"].clone() for _ in range(3))
        assert relative_l2(third, second) < 1e-4, way.name  # a tenth of what a replay may be off


@pytest.mark.parametrize("workload", [PROMPTS, TOKENS, VERIFIED, LAYER], ids=lambda w: w.name)
def test_operands_in_bf16_and_states_in_fp32(workload, everyone):
    for way in ways(workload):
        assert verdict_of(way, workload, torch.bfloat16).complaint is None, way.name


def test_checkpoints_are_final_states_of_shorter_prompts():
    inputs = problem_of(KEPT, CPU).inputs[0]
    found = truth_of(KEPT, inputs).want["kept"].unflatten(0, (5, 2))
    assert relative_l2(found[:, 1], truth_of(KEPT, inputs).want["ht"]) == 0
    half = replace(KEPT, lengths=(64,) * 5, every=0)
    rows = [slice(128 * n, 128 * n + 64) for n in range(5)]
    rule = inputs.rule
    shorter = {
        name: torch.cat([getattr(rule, name)[:, at] for at in rows], 1)
        for name in ("q", "k", "v", "g", "beta")
    }
    bounds = torch.arange(6) * 64
    cut = rule._replace(**shorter, cu_seqlens=bounds)
    want = truth_of(half, inputs._replace(rule=cut)).want["ht"]
    assert relative_l2(found[:, 0], want) < 1e-6


# --- what is wrong shows


class _NotWritten(OursServing):
    """A call that computes o, and leaves the pool as it was."""

    def prepare(self, workload, inputs):
        untouched = batch_of(workload, inputs)
        return replace(super().prepare(workload, inputs), collect=untouched.results)


def test_a_state_that_is_not_written_is_wrong():
    for workload in (TOKENS, VERIFIED):
        assert "ht is off by" in verdict_of(_NotWritten(), workload).complaint


def _spoiled(function, spoil):
    return lambda *args, **options: spoil(function(*args, **options))


WRONG = {
    "chunk_gated_delta_rule": lambda r: (r[0], r[1].roll(1, 0)),
    "gated_delta_rule_decode_pretranspose": lambda r: (r[0], r[1].mul_(1.001)),
    "gated_delta_rule_mtp": lambda r: (r[0].roll(1, 0), r[1]),
}
WHOLE = {
    "chunk_gated_delta_rule": (theirs.prefill, PROMPTS),
    "gated_delta_rule_decode_pretranspose": (theirs.decode, TOKENS),
    "gated_delta_rule_mtp": (theirs.mtp, VERIFIED),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rivals_are_noticed(name):
    function, workload = WHOLE[name]
    way = FlashInferPool() if workload is VERIFIED else FlashInferGathers()
    with installed(**theirs.flashinfer(**{name: _spoiled(function, WRONG[name])})):
        assert "is off by" in verdict_of(way, workload).complaint


def test_a_fresh_sequence_starts_from_zero():
    """Its state is in the inputs, and changes no result."""
    inputs = problem_of(PROMPTS, CPU).inputs[0]
    states = inputs.states.clone()
    states[[1, 4]] = torch.nan
    same = truth_of(PROMPTS, inputs._replace(states=states)).want
    assert all(torch.equal(x, same[name]) for name, x in truth_of(PROMPTS, inputs).want.items())
    states[0] += 1
    other = truth_of(PROMPTS, inputs._replace(states=states)).want
    assert not torch.equal(other["o"], same["o"])


def test_rounded_states_are_an_error_unless_an_engine_is_known_for_them(everyone, monkeypatch):
    exact = theirs._step

    def rounded(*call):
        o, states = exact(*call)
        return o, states.bfloat16().float()

    monkeypatch.setattr(theirs, "_step", rounded)
    assert verdict_of(SGLang(), TOKENS, torch.bfloat16).complaint is None
    assert "ht is off by" in verdict_of(VLLM(), TOKENS, torch.bfloat16).complaint


def test_beta_is_nearly_a_number_of_bf16():
    """What SGLang makes of it then changes results by less than its graph's replay may."""
    workload = replace(TOKENS, heads=(2, 64))
    b = problem_of(workload, CPU).inputs[0].gates[:, 1]
    assert torch.equal(b.bfloat16().float(), b)
    assert len(b.unique()) > 5
    beta = b.double().sigmoid()
    assert ((beta.bfloat16() / beta - 1).abs() < 2**-15).all()


# --- rows, and who runs them


def test_sets_have_the_shapes_that_engines_have():
    assert len(SERVING["serving"]) == len({w.name for w in EVERY_ROW}) == len(EVERY_ROW)
    shapes = {(w.heads, w.layout, w.pool) for w in PREFILL}
    assert len(shapes) == len(PREFILL) == 5 * 3 * 2
    assert {w.layout for w in PREFILL} == {"8192x1", "2048x8", "512x64"}
    assert {w.sequences for w in DECODE} == {1, 16, 64, 256, 512}
    assert {w.drafts for w in DRAFTS} == {2, 4, 8}
    assert {w.heads for w in DECODE} == {w.heads for w in STEP} == {w.heads for w in DRAFTS}
    quick = SERVING["serving-quick"]
    assert len(quick) == 12
    assert {w.kind for w in quick} == {w.kind for w in EVERY_ROW}
    assert all(w.served and w.family == "gdn" for w in EVERY_ROW)


def test_heads_of_tensor_parallelism_have_a_row_of_each_kind():
    """Of 16/64 and 16/32 on one, two, four and eight GPUs; by no other name than elsewhere."""
    rows = SERVING["serving-parallel"]
    assert rows == tuple(sm90.select(sm90.parse(["gdn", "--set", "serving-parallel"])))
    heads = {(16, 64), (8, 32), (4, 16), (2, 8), (16, 32), (8, 16), (4, 8), (2, 4)}
    layouts = ("2048x8", "64 of 1", "64 of 4")
    assert {(w.heads, w.layout) for w in rows} == {(h, x) for h in heads for x in layouts}
    assert len(rows) == len({w.name for w in rows}) == 24
    by_name = {w.name: w for w in EVERY_ROW}
    assert all(by_name.get(w.name, w) == w for w in rows)


def test_quick_takes_few_rows_of_the_set():
    parse = sm90.parse(["gdn", "--set", "serving", "--quick"])
    assert sm90.select(parse) == list(SERVING["serving-quick"])
    whole = sm90.parse(["gdn", "--set", "serving"])
    assert len(sm90.select(whole)) == len(EVERY_ROW)
    assert len(sm90.select(sm90.parse(["gdn", "--quick"]))) == len(GDN["anchors"])


def test_padding_is_one_sequence_in_sixteen():
    assert [replace(TOKENS, sequences=n).live for n in (1, 15, 16, 64, 512)] == [1, 15, 15, 60, 480]
    inputs = problem_of(TOKENS, CPU).inputs[0]
    batch = batch_of(TOKENS, inputs)
    assert batch.starts[-1] == 0
    assert (batch.starts[:-1] > 0).all()
    assert not batch.pool.is_contiguous()
    assert batch.pool[0].isnan().all()


def test_who_serves_says_so():
    assert {*names_for("gdn", PREFILL[:2])} == {"ours", "flashinfer_gathers", "flashinfer_pool"}
    assert {*names_for("gdn", DRAFTS[:1])} == {
        "ours", "ours_step", "flashinfer_pool", "vllm", "sglang",
    }  # fmt: skip
    usual = [i.name for i in implementations("gdn")]
    assert names_for("gdn", GDN["anchors"]) == usual
    assert "vllm" not in usual
    assert {*names_for("gdn", [GDN["anchors"][0], STEP[0]])} == {
        *usual, "ours_step_two", "vllm", "sglang",
    }  # fmt: skip
    for other in (FlashQLA(), FLA(), Definition(), *ours()[1:]):
        assert other.inapplicable(DECODE[0]) is not None
    for way in rivals.known()[1:]:
        assert way.inapplicable(GDN["decode"][0]) is not None


def test_an_engine_without_sources_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(VLLM, "needs_cuda", False)
    monkeypatch.setattr(VLLM, "module", "torch")
    monkeypatch.setattr(rivals.engine_functions.engine_interfaces, "UNPACKED", tmp_path)
    said = VLLM().missing()
    assert "vllm 0.33.0" in said
    assert "python scripts/engine_interfaces.py" in said


def test_what_a_part_of_flashinfer_lacks_is_named():
    """As the module of prefill alone, without slots and checkpoints: rows failed in their call."""

    def prompts(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens): ...

    function = "flashinfer.gdn_prefill.chunk_gated_delta_rule"
    with installed(flashinfer__gdn_prefill={"chunk_gated_delta_rule": prompts}):
        gathers, pool = FlashInferGathers(), FlashInferPool()
        assert gathers.inapplicable(PROMPTS) is None
        said = pool.inapplicable(PROMPTS)
        assert said == f"missing: output_state, state_indices of {function}"
        assert "checkpoint_every_n_tokens" in gathers.inapplicable(KEPT)
        for workload in (TOKENS, VERIFIED):
            assert "missing: flashinfer.gdn_decode (" in pool.inapplicable(workload)
    with installed(flashinfer__gdn_decode={"gated_delta_rule_mtp": theirs.mtp}):
        assert pool.inapplicable(VERIFIED) is None
        name = "flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose"
        assert pool.inapplicable(TOKENS) == f"missing: {name}"


def test_the_worker_times_a_row_of_each_kind():
    said = []
    ours = [OursServing(), OursOneToken(), OursTwo()]
    worker = Worker(said.append, ours)
    for workload in (KEPT, TOKENS, VERIFIED, LAYER):
        names = [way.name for way in ours if way.inapplicable(workload) is None]
        said.clear()
        assert worker.row(workload, names, Options(rounds=1, burst_s=0.0))
        results = [m for m in said if isinstance(m, Result)]
        assert [r.status for r in results] == [OK] * len(names), results


def test_rows_without_a_gpu_are_small():
    for workload in EVERY_ROW:
        small = workload.reduced(64)
        assert work_of(small).flops < 1e10
        assert type(small) is type(workload)
    assert PREFILL[0].reduced(1) is PREFILL[0]
    assert {w.reduced(64).drafts for w in DRAFTS} == {2, 4, 8}


def test_states_are_nearly_all_of_the_bytes_of_decoding():
    for workload in DECODE:
        states = 2 * 4 * workload.live * workload.heads[1] * 128 * 128
        assert 1 < work_of(workload, 2).bytes / states < 1.05
    for workload in DRAFTS:
        states = (1 + workload.drafts) * 4 * workload.live * workload.heads[1] * 128 * 128
        assert 1 < work_of(workload, 2).bytes / states < 1.1


def test_work_of_prefill_counts_states_and_checkpoints():
    plain, kept = PREFILL[2], replace(PREFILL[2], every=256)  # 64 prompts of 512, 16/64
    assert plain.layout == "512x64"
    state = 64 * 128 * 128
    assert work_of(kept, 2).bytes - work_of(plain, 2).bytes == 2 * 64 * state * 4
    halves = replace(plain, pool="bfloat16")
    read = 64 - 21
    assert work_of(plain, 2).bytes - work_of(halves, 2).bytes == (read + 64) * state * 2
