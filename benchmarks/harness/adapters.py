"""What an implementation is to the harness.

An adapter prepares a call once, outside the timed region: it converts inputs to the library's
conventions there, and `collect` converts results back. What is timed is the library's own work on
its own layouts. A library that is not installed is announced, never skipped in silence.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .workload import POOLED

Outputs = dict[str, Tensor]
INSTALLING = "docs/install.md#compare-with-other-libraries says what installs it"


@dataclass(frozen=True)
class Call:
    """One implementation on one set of inputs."""

    run: Callable[[], Any]  # the lowest-level entry point
    collect: Callable[[Any], Outputs]  # what `run` returned, in our names and layouts
    # makes the public entry point's call, as a model calls it; may itself run a forward
    eager: Callable[[], Callable[[], Any]] | None = None
    capture: bool = True  # False: it is timed as Python makes it, and has no graph

    @classmethod
    def public(cls, run: Callable[[], Any], collect: Callable[[Any], Outputs]) -> "Call":
        """A call of a public function: eager calls are the same."""
        return cls(run, collect, lambda: run)


def backward_of(
    function: Callable[..., Any], tensors: Iterable[Tensor], upstream: Any
) -> Callable[[], Any]:
    """The gradients of a public function as a model asks for them; it has run its forward."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    outputs = function(*leaves)
    return lambda: torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)


class Implementation:
    name: str  # ours begin with "ours"
    label: str
    distribution: str  # on the package index
    module: str  # imported to see whether it is there
    needs_cuda = True
    on_request = False  # left out unless it is named
    leaves_out: ClassVar[tuple[str, ...]] = ()  # results that it does not return
    rounds: ClassVar[tuple[str, ...]] = ()  # fp32 results that it computes with 16-bit numbers
    lacks: ClassVar[dict[str, str]] = {}  # by kind of workload: why it has no call for it

    def __init__(self, **fields: Any) -> None:
        """`fields` replace those of the class, methods included: variants are rows of a table."""
        vars(self).update(fields)

    @property
    def serves(self) -> tuple[str, ...]:
        """Kinds of workloads on pools: those that it has a method for."""
        return tuple(kind for kind in POOLED if hasattr(self, kind))

    def missing(self) -> str | None:
        """Why it cannot run on this machine at all; None when it can."""
        if self.needs_cuda and not torch.cuda.is_available():
            if self.installed():
                return "installed; needs a CUDA device"
            return f"not installed, and needs a CUDA device; {INSTALLING}"
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            return f"{describe(error)}; {INSTALLING}"
        except Exception as error:  # libraries probe the GPU on import and raise anything
            return describe(error)
        return None

    def installed(self) -> bool:
        """Whether it can be found; an import may need a GPU."""
        package = self.module.partition(".")[0]
        return package in sys.modules or importlib.util.find_spec(package) is not None

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            package = importlib.import_module(self.module.partition(".")[0])
            return str(getattr(package, "__version__", "unknown"))

    def inapplicable(self, workload: Any) -> str | None:
        """What it lacks for this workload by design; None when nothing."""
        if workload.served and workload.kind not in self.serves:
            return "it has no call for this on a pool of states"
        return self.lacks.get(workload.kind)

    def prepare(self, workload: Any, inputs: Any) -> Call:
        """By the method of the workload's kind, unless there is one way for all."""
        call: Call = getattr(self, workload.kind)(workload, inputs)
        return call


def describe(error: BaseException) -> str:
    """One line of an exception, for a table's footnote."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
