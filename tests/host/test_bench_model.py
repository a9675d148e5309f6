"""Layers of models in training: who computes them agrees, and what is wrong is found."""

import functools
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.harness import without_gpu
from benchmarks.harness.problems import problem_of
from benchmarks.model import problem, rivals
from benchmarks.model.problem import functions_of, layers_of, model_inputs, model_truth, model_work
from benchmarks.model.workloads import FLA, MODEL, OLMO, QWEN, SIZES, ModelStep

transformers = pytest.importorskip("transformers", minversion="5.15")

pytestmark = pytest.mark.libraries

CPU = torch.device("cpu")
STEPS = [ModelStep(model, (70, 70), small=True) for model in (QWEN, OLMO)]
PARTS = [replace(step, packed=True) for step in STEPS]
PARTS += [replace(step, region=True) for step in (STEPS[0], PARTS[0])]
BY_NAME = {way.name: way for way in rivals.known("model")}
WAYS = [BY_NAME[name] for name in ("ours", "ours_rule", "torch")]


def verdict_of(implementation, workload):
    inputs = model_inputs(workload, CPU, torch.float32)
    call = implementation.prepare(workload, inputs)
    return model_truth(workload, inputs).judge(call.collect(call.run()), torch.float32)


@pytest.mark.parametrize("workload", STEPS + PARTS, ids=lambda w: w.name)
def test_all_are_the_definition(workload):
    layers = layers_of(workload, CPU, torch.float32)
    for way in WAYS:
        if workload.packed and not way.packs:
            assert "takes a pack for one" in way.inapplicable(workload)
            continue
        verdict = verdict_of(way, workload)
        assert verdict.complaint is None, way.name
        inputs = 4 if workload.region else 1
        assert len(verdict.errors) == 1 + inputs + len(layers.parameters())


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


@pytest.mark.parametrize("way", [BY_NAME["fla"], BY_NAME["fla_conv"]])
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


def test_a_layer_that_ours_changed_is_a_copy():
    """So that others run the layers as the library has them; a compiled one is a copy as well."""
    inputs = model_inputs(STEPS[0], CPU, torch.float32)
    swapping = pytest.importorskip("qla_kernels.integrations.transformers")
    home, before = inputs.layers.home, dict(vars(inputs.layers.home))
    rivals.Ours().prepare(STEPS[0], inputs)
    compiled = BY_NAME["ours_compile"].layers(STEPS[0], inputs)
    assert not swapping.whole(inputs.layers.module)
    assert dict(vars(home)) == before
    assert all(layer._compiled_call_impl for layer in compiled.module.layers)
    assert not any(layer._compiled_call_impl for layer in inputs.layers.module.layers)
    changed = rivals._copied(inputs.layers)
    rivals._swapped(changed)
    assert sum(swapping.whole(changed.module).values()) == 3


def test_liger_fuses_a_copy_and_leaves_the_library_alone(monkeypatch):
    """By a stand-in, which replaces a class of the Python module as Liger does."""
    inputs = model_inputs(STEPS[0], CPU, torch.float32)
    home, seen = inputs.layers.home, []

    def apply(fused_linear_cross_entropy, model):
        seen.append(model)
        home.Qwen3_5MLP = home.Qwen3_5RMSNorm = object

    liger = types.ModuleType("liger_kernel.transformers")
    liger.apply_liger_kernel_to_qwen3_5 = apply
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    before = dict(vars(home))
    layers = BY_NAME["ours_liger"].layers(STEPS[0], inputs)
    assert seen == [layers.module]
    assert layers.module is not inputs.layers.module
    assert dict(vars(home)) == before
    assert "Liger has no kernels" in BY_NAME["ours_liger"].inapplicable(STEPS[1])
    assert "nothing else" in BY_NAME["ours_liger"].inapplicable(MODEL["fla"][0])


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
    """It raised ModuleNotFoundError without `fla`; fla-core has it, and no layers."""
    said = "flash-linear-attention, which has FLA's layers, is not installed"
    for modules in ((), ("fla",)):
        without = functools.partial(_find_spec, modules)
        monkeypatch.setattr(rivals.importlib.util, "find_spec", without)
        assert rivals.Ours().inapplicable(MODEL["fla"][0]) == said
    assert rivals.Ours().inapplicable(STEPS[0]) is None


def _find_spec(installed, name):
    """As importlib's, which imports a module's package."""
    package, _, _ = name.rpartition(".")
    if package and package not in installed:
        raise ModuleNotFoundError(f"No module named {package!r}")
    return object() if name in installed else None


def test_an_older_transformers_is_named(monkeypatch):
    empty = types.ModuleType("modeling_qwen3_5")
    monkeypatch.setattr(rivals.importlib, "import_module", lambda name: empty)
    assert "pip install 'transformers>=5.15'" in rivals.Ours().missing()


def test_sizes_are_of_the_models():
    assert SIZES[QWEN].linear == (16, 32, 128, 128)
    assert ModelStep(FLA, (8192,)).heads == (6, 6)
