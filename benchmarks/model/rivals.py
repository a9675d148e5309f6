"""Who computes what is between the projections of layers: ours, FLA, or PyTorch.

Functions of the layers' Python module are exchanged before each step: `swap` and `register` do
that once, here it takes a few microseconds of each step. The rest of the layers is PyTorch's, or
Liger's, or of torch.compile, which compiles each layer. Who changes layers has a copy of them.
"""

import copy
import dataclasses
import importlib
import importlib.util
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from ..harness.adapters import INSTALLING, Call, Implementation
from .problem import (
    CONVOLUTION,
    RULE,
    Layers,
    ModelInputs,
    definitions,
    exchanged,
    functions_of,
    plain,
    step_of,
)
from .workloads import QWEN, ModelStep

SWITCH = "FLA_QLA_KERNELS"
LIGER = {QWEN: "apply_liger_kernel_to_qwen3_5"}  # functions of liger_kernel.transformers
NO_LAYER = {"fla_layer": "FLA's layer keeps its convolution"}


class InLayers(Implementation):
    needs_cuda = False
    fuses = ""  # "liger" or "compile": who fuses the rest of the layers

    @property
    def packs(self) -> bool:
        """Whether sequences of a pack stay apart, in the convolution too."""
        return True

    def missing(self) -> str | None:
        if self.fuses == "liger" and not _found("liger_kernel"):
            return f"liger_kernel is not installed; {INSTALLING}"
        return super().missing() or _no_functions()

    def inapplicable(self, workload: ModelStep) -> str | None:
        if workload.kind == "fla_layer":
            if self.fuses:
                return "FLA's layer alone has nothing else to fuse"
            if not _found("fla", "fla.layers"):
                return "flash-linear-attention, which has FLA's layers, is not installed"
        if workload.packed and not self.packs:
            return "PyTorch's convolution takes a pack for one sequence"
        if self.fuses and workload.region:
            return "a mixer alone has nothing else to fuse"
        if self.fuses == "liger" and workload.model not in LIGER:
            return f"Liger has no kernels for {workload.model}"
        return super().inapplicable(workload)

    def layers(self, workload: ModelStep, inputs: ModelInputs) -> Layers:
        """Returns the layers, or a copy of them whose other parts Liger or torch.compile fuses."""
        if not self.fuses:
            return inputs.layers
        layers = _copied(inputs.layers)
        if self.fuses == "compile":
            for layer in layers.module.layers:  # type: ignore[union-attr]
                layer.compile()
            return layers
        liger = importlib.import_module("liger_kernel.transformers")
        home, before = layers.home, dict(vars(layers.home))
        getattr(liger, LIGER[workload.model])(fused_linear_cross_entropy=False, model=layers.module)
        for name, value in before.items():  # it replaces classes of the Python module, too
            setattr(home, name, value)
        return layers


class Ours(InLayers):
    """`swap` of a model of transformers, `register` for FLA's layer.

    `whole`: not the gated delta rule alone, as in releases before 2026-11-25; PyTorch convolves.
    """

    name, label, distribution, module = "ours", "ours", "qla-kernels", "qla_kernels"
    whole = True

    @property
    def packs(self) -> bool:
        return self.whole

    def prepare(self, workload: ModelStep, inputs: ModelInputs) -> Call:
        if workload.kind == "fla_layer":
            return _in_fla(inputs)
        layers = self.layers(workload, inputs)
        if not self.whole:
            convolution = {CONVOLUTION: plain(getattr(layers.home, CONVOLUTION))}
            ours = _swapped(_copied(layers)) | convolution
        else:
            layers = _copied(layers) if layers is inputs.layers else layers
            ours = _swapped(layers)
        return step_of(inputs._replace(layers=layers), partial(exchanged, layers.home, ours))


class WithFLA(InLayers):
    """FLA's functions where transformers finds them, and FLA's layer as it is.

    `theirs` are functions that have to be other libraries'. PyTorch convolves unless they have the
    convolution, as in transformers where causal-conv1d is installed, too.
    """

    name, label, distribution = "fla", "FLA", "fla-core"
    module, needs_cuda = "fla.ops.gated_delta_rule", True
    theirs: ClassVar = {RULE: "fla."}

    @property
    def packs(self) -> bool:
        return CONVOLUTION in self.theirs

    def missing(self) -> str | None:
        return super().missing() or (WithFLA().missing() if self.name != WithFLA.name else None)

    def prepare(self, workload: ModelStep, inputs: ModelInputs) -> Call:
        os.environ["FLA_FLASH_QLA"] = "0"  # FLA's own kernels
        if workload.kind == "fla_layer":
            return step_of(inputs, partial(switched, "0"))
        layers = self.layers(workload, inputs)
        functions = functions_of(layers.home)
        if workload.region:
            layers = _copied(layers)
            _fused_norm(layers)
        if CONVOLUTION not in self.theirs:
            functions[CONVOLUTION] = plain(functions[CONVOLUTION])
        for name, module in self.theirs.items():
            found = inspect.getclosurevars(functions[name]).nonlocals["implementation"].__module__
            if not found.startswith(module):
                raise RuntimeError(f"transformers runs {found}; need one of {module}")
        return step_of(inputs._replace(layers=layers), partial(exchanged, layers.home, functions))


class WithPyTorch(InLayers):
    """What transformers runs where neither FLA nor causal-conv1d is installed."""

    name, label, distribution, module = "torch", "PyTorch alone", "transformers", "transformers"
    lacks: ClassVar = {"fla_layer": "FLA has no such path"}

    @property
    def packs(self) -> bool:
        return False

    def prepare(self, workload: ModelStep, inputs: ModelInputs) -> Call:
        layers = inputs.layers
        return step_of(inputs, partial(exchanged, layers.home, definitions(layers)))


def _fused_norm(layers: Layers) -> None:
    """FLA's gated norm in place of PyTorch's, which transformers has."""
    fused = importlib.import_module("fla.modules.fused_norm_gate").rms_norm_gated
    norm: Any = copy.deepcopy(layers.module.norm)
    norm.forward = lambda x, gate: fused(
        x, gate, norm.weight, None, activation="swish", eps=norm.variance_epsilon
    )
    layers.module.norm = norm


def _copied(layers: Layers) -> Layers:
    return dataclasses.replace(layers, module=copy.deepcopy(layers.module))


def _swapped(layers: Layers) -> dict[str, Any]:
    """Swaps layers; their Python module keeps its functions, and ours are returned by name."""
    theirs = functions_of(layers.home)
    importlib.import_module("qla_kernels.integrations.transformers").swap(layers.module)
    ours = functions_of(layers.home)
    for name, function in theirs.items():
        setattr(layers.home, name, function)
    return ours


def _in_fla(inputs: ModelInputs) -> Call:
    """Each step has to be one that FLA gave to us."""
    os.environ["FLA_FLASH_QLA"] = "0"
    integration = importlib.import_module("qla_kernels.integrations.fla")
    integration.register(prefer=True)
    call = step_of(inputs, partial(switched, "1"))

    def run() -> Any:
        before = integration.status().taken
        raw = call.run()
        if integration.status().taken == before:
            raise RuntimeError(f"FLA kept the call: {integration.status().reason}")
        return raw

    return Call(run, call.collect, capture=False)


@contextmanager
def switched(value: str) -> Iterator[None]:
    """FLA's calls go to our backend, or with "0" they do not."""
    os.environ[SWITCH] = value
    try:
        yield
    finally:
        del os.environ[SWITCH]


def _found(*modules: str) -> bool:
    """A package, and a module of it, which cannot be asked for without the package."""
    return all(importlib.util.find_spec(name) is not None for name in modules)


def _no_functions() -> str | None:
    """Why layers cannot be compared here; transformers before 5.15 keeps functions in layers."""
    try:
        home = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    except ImportError as error:
        return f"{type(error).__name__}: {error}; pip install 'transformers>=5.15'"
    missing = [name for name in (RULE, CONVOLUTION) if not hasattr(home, name)]
    return f"transformers without {missing}; pip install 'transformers>=5.15'" if missing else None


def fused(kind: type[InLayers], name: str, label: str, **fields: Any) -> list[Implementation]:
    """The same with the rest of the layers by Liger, and by torch.compile; on request."""
    others = ("liger", "Liger"), ("compile", "torch.compile")
    each = [(f"{name}_{how}", f"{label}, {who}", how) for how, who in others]
    return [kind(name=n, label=x, fuses=how, on_request=True, **fields) for n, x, how in each]


def known(family: str) -> list[Implementation]:
    rule = {"name": "ours_rule", "label": "ours, the rule alone", "on_request": True}
    both = {RULE: "fla.", CONVOLUTION: "causal_conv1d"}
    conv = {"module": "causal_conv1d", "distribution": "causal-conv1d", "lacks": NO_LAYER}
    conv["theirs"] = both
    return [
        Ours(), *fused(Ours, "ours", "ours"), Ours(whole=False, lacks=NO_LAYER, **rule), WithFLA(),
        WithFLA(name="fla_conv", label="FLA and causal-conv1d", **conv),
        *fused(WithFLA, "fla_conv", "FLA, causal-conv1d", **conv), WithPyTorch(),
    ]  # fmt: skip
