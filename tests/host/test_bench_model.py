"""Layers of models in training: who computes them agrees, and what is wrong is found."""

import functools
import types

import pytest
import torch
from torch import nn

from benchmarks.harness import without_gpu
from benchmarks.harness.problems import problem_of
from benchmarks.harness.records import Result, Row, Run
from benchmarks.model import problem, rivals
from benchmarks.model.problem import functions_of, layers_of, model_inputs, model_truth, model_work
from benchmarks.model.workloads import FLA, MODEL, OLMO, QWEN, SIZES, ModelStep
from benchmarks.report import findings, models

transformers = pytest.importorskip("transformers", minversion="5.15")

pytestmark = pytest.mark.libraries

CPU = torch.device("cpu")
STEPS = [ModelStep(model, (70, 70), small=True) for model in (QWEN, OLMO)]
WAYS = [rivals.Ours(), rivals.OursRule(), rivals.WithPyTorch()]


def verdict_of(implementation, workload):
    inputs = model_inputs(workload, CPU, torch.float32)
    call = implementation.prepare(workload, inputs)
    return model_truth(workload, inputs).judge(call.collect(call.run()), torch.float32)


@pytest.mark.parametrize("workload", STEPS, ids=lambda w: w.model)
def test_all_are_the_definition(workload):
    layers = layers_of(workload, CPU, torch.float32)
    for way in WAYS:
        verdict = verdict_of(way, workload)
        assert verdict.complaint is None, way.name
        assert len(verdict.errors) == 2 + len(layers.parameters())


def test_each_computes_with_its_own_functions():
    """In turn, on one module, whose functions are then as they were."""
    inputs = model_inputs(STEPS[0], CPU, torch.float32)
    home, seen = inputs.layers.home, []
    forward = inputs.layers.forward

    def watched(module, x):
        seen.append(functions_of(home))
        return forward(module, x)

    inputs.layers.forward = watched
    before = functions_of(home)
    calls = [way.prepare(STEPS[0], inputs) for way in WAYS]
    for call in calls:
        call.run()
        assert functions_of(home) == before
    ours, rule, plain = seen
    convolution = before[problem.CONVOLUTION]
    assert {name: f.before_qla_kernels for name, f in ours.items()} == before
    assert rule.pop(problem.CONVOLUTION) is problem.plain(convolution)
    assert all(f.before_qla_kernels is before[name] for name, f in rule.items())
    assert plain == {name: f.__wrapped__ for name, f in before.items()}


@pytest.mark.parametrize("way", [rivals.WithFLA(), rivals.WithFLAConv()])
def test_libraries_that_transformers_found_compute(way, monkeypatch):
    """By stand-ins: FLA's rule on both ways, and the convolution by whom the way says."""
    inputs = model_inputs(STEPS[0], CPU, torch.float32)
    home, seen = inputs.layers.home, []

    def found(name, module):
        function = problem.plain(getattr(home, name))

        def implementation(*args, **kwargs):
            seen.append(module)
            return function(*args, **kwargs)

        implementation.__module__ = module

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            return implementation(*args, **kwargs)

        monkeypatch.setattr(home, name, wrapped)

    found(problem.RULE, "fla.ops")
    found(problem.CONVOLUTION, "causal_conv1d.interface")
    way.prepare(STEPS[0], inputs).run()
    expected = {"fla.ops"} | ({"causal_conv1d.interface"} if way.name == "fla_conv" else set())
    assert set(seen) == expected
    monkeypatch.undo()
    found(problem.RULE, "somewhere")
    with pytest.raises(RuntimeError, match="need one of"):
        way.prepare(STEPS[0], inputs)


def forgetful(rule):
    """The second half of the tokens begins anew."""

    def run(q, k, v, *args, **kwargs):
        cut, parts = q.shape[1] // 2, []
        for rows in (slice(cut), slice(cut, None)):
            given = {n: x[:, rows] for n, x in kwargs.items() if n in ("g", "beta")}
            own = (x[:, rows] for x in (q, k, v))
            parts.append(rule(*own, *args, **{**kwargs, **given})[0])
        return torch.cat(parts, 1), None

    return run


class Forgets(rivals.WithPyTorch):
    def prepare(self, workload, inputs):
        functions = problem.definitions(inputs.layers)
        functions[problem.RULE] = forgetful(functions[problem.RULE])
        return problem.step_of(inputs, lambda: problem.exchanged(inputs.layers.home, functions))


def test_a_wrong_rule_is_found():
    assert "is off by" in verdict_of(Forgets(), STEPS[0]).complaint


@pytest.mark.parametrize("model", [QWEN, OLMO])
def test_parameters_are_counted(model):
    """A model's own count, less its norms, its convolutions and two numbers of a head."""
    workload = ModelStep(model, (8192,))
    with torch.device("meta"):
        layers = problem._of_transformers(workload)
    products = [m.weight.numel() for m in layers.module.modules() if isinstance(m, nn.Linear)]
    work = model_work(workload, 2)
    counted = (work.bytes / 2 - 4 * workload.tokens * workload.sizes.hidden) / 2
    assert counted == sum(products)


def test_a_problem_has_one_module():
    found = problem_of(STEPS[0], CPU)
    assert found.work == model_work(STEPS[0], 4)
    assert found.inputs[0].layers.module.training


def test_the_layer_of_fla_is_left_out_without_a_gpu():
    short = without_gpu.for_cpu(MODEL["fla"])
    assert not short.workloads
    assert "FLA's layer runs on a GPU alone" in short.said


def test_fla_s_layer_without_fla(monkeypatch):
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    said = rivals.Ours().inapplicable(MODEL["fla"][0])
    assert said == "flash-linear-attention, which has FLA's layers, is not installed"
    assert rivals.Ours().inapplicable(STEPS[0]) is None


def test_an_older_transformers_is_named(monkeypatch):
    empty = types.ModuleType("modeling_qwen3_5")
    monkeypatch.setattr(rivals.importlib, "import_module", lambda name: empty)
    assert "pip install 'transformers>=5.15'" in rivals.Ours().missing()


def record(workloads=MODEL["training"], /, **times: float) -> Run:
    labels = {
        "ours": "ours",
        "ours_rule": "ours, the rule alone",
        "fla": "FLA",
        "torch": "PyTorch alone",
    }
    rows = tuple(
        Row(w.name, "model", w.kind, w.heads_label.replace("x", "/"), w.layout, w.tokens, w.what,
            results=tuple(Result(n, "ok", p50_ms=t) for n, t in times.items()))
        for w in workloads
    )  # fmt: skip
    return Run(
        "model-1", "model", "2026-11-25T00:00:00+00:00", "NVIDIA H200", "cuda", {}, {}, {}, labels,
        {}, {}, "0" * 40, False, "", {"conv.fwd": "1"}, rows,
    )  # fmt: skip


def test_pages_say_what_a_step_gains():
    runs, digests = [record(ours=10.0, ours_rule=11.0, fla=12.5, torch=40.0)], {"conv.fwd": "1"}
    few, said = models.gain(runs, digests)
    assert few == (
        f"layers of {QWEN} and {OLMO} in training **1.25 to 1.25 x** as fast as with FLA where "
        "causal-conv1d is not installed (the rule's part: 1.14 to 1.14 x), "
        "**4.0 to 4.0 x** as fast as without FLA"
    )
    assert f"Four layers of {QWEN} or {OLMO} in transformers" in said
    assert "; beside causal-conv1d nothing was timed; with our rule alone, and PyTorch's" in said
    assert models.layer(runs, digests)[1] == ""
    few, said = models.layer([*runs, record(MODEL["fla"], ours=10.0, fla=12.5)], digests)
    assert few == "a step of its layer **1.25 to 1.25 x** (H200)"
    assert said.startswith("A step of FLA's layer, of 256/512, 1.25 to 1.25 x (")
    page = findings.page(runs, digests)
    section = page[page.index("## Models in training") :]
    cells = [cell.strip() for cell in section.splitlines()[4].split("|")[1:-1]]
    assert cells == [
        "4 layers of Qwen3.5-9B",
        "1 sequence of 8192 tokens",
        "10.0",
        "–",
        "1.25",
        "1.14",
        "4.00",
    ]
    assert "no training step of a model was measured" in models.gain([], digests)[1]
    with_both = record(ours=10.0, ours_rule=11.0, fla=12.5, fla_conv=10.5, torch=40.0)
    few, said = models.gain([with_both], digests)
    assert few == (
        f"layers of {QWEN} and {OLMO} in training **1.05 to 1.05 x** as fast as with FLA, its own "
        "kernels, and causal-conv1d, **1.25 to 1.25 x** as fast as with FLA alone (the rule's "
        "part: 1.14 to 1.14 x), **4.0 to 4.0 x** as fast as without either"
    )
    assert "Beside FLA and causal-conv1d 1.05 to 1.05 x; beside FLA alone, where" in said


def test_sizes_are_of_the_models():
    assert SIZES[QWEN].linear == (16, 32, 128, 128)
    assert ModelStep(FLA, (8192,)).heads == (6, 6)
