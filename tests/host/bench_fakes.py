"""Implementations that misbehave, each in its own way, for the benchmark's harness."""

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness.adapters import Call, Implementation
from qla_kernels.runtime.errors import Unsupported
from reference import gdn


class Right(Implementation):
    name = label = "right"
    distribution, module, needs_cuda = "", "reference", False

    def version(self) -> str:
        return "fake"

    def prepare(self, workload: Any, inputs: Any) -> Call:
        q, k, v, g, beta, h0, cu, *_ = inputs

        def run() -> Any:
            return gdn.chunked(q, k, v, g, beta, initial_state=h0, cu_seqlens=cu)

        return Call(run, lambda raw: self.spoil({"o": raw.o, "ht": raw.final_state}))

    def spoil(self, outputs: Any) -> Any:
        return outputs


class WrongChunk(Right):
    """One chunk of one head is not there."""

    name = label = "wrong_chunk"

    def spoil(self, outputs: Any) -> Any:
        o = outputs["o"].clone()
        o[:, 64:70, 1] = 0
        return {**outputs, "o": o}


class Unwritten(Right):
    name = label = "unwritten"

    def spoil(self, outputs: Any) -> Any:
        return {**outputs, "ht": torch.full_like(outputs["ht"], torch.nan)}


class Forgets(Right):
    name = label = "forgets"

    def spoil(self, outputs: Any) -> Any:
        return {"o": outputs["o"]}


class Raises(Right):
    name = label = "raises"

    def prepare(self, workload: Any, inputs: Any) -> Call:
        raise RuntimeError("no such variant\nand a long story")


class Refuses(Right):
    name = label = "refuses"

    def prepare(self, workload: Any, inputs: Any) -> Call:
        raise Unsupported("got this; need that; do this")


class Hungry(Right):
    name = label = "hungry"

    def prepare(self, workload: Any, inputs: Any) -> Call:
        raise torch.OutOfMemoryError("tried to allocate everything")


class Lacks(Right):
    name = label = "lacks"

    def inapplicable(self, workload: Any) -> str | None:
        return "it has no forward"


class Absent(Right):
    name = label = "absent"
    module = "a_library_that_is_not_installed"


class Hangs(Right):
    name = label = "hangs"

    def prepare(self, workload: Any, inputs: Any) -> Call:
        time.sleep(3600)
        raise AssertionError("unreachable")


class Dies(Right):
    name = label = "dies"

    def prepare(self, workload: Any, inputs: Any) -> Call:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class DiesOnImport(Right):
    name = label = "dies_on_import"

    def missing(self) -> str | None:
        os.kill(os.getpid(), signal.SIGKILL)
        return None


EVERYONE = (
    Right, WrongChunk, Unwritten, Forgets, Raises, Refuses, Hungry, Lacks, Absent, Hangs, Dies,
    DiesOnImport,
)  # fmt: skip


def implementations(family: str, names: Sequence[str]) -> list[Implementation]:
    return [fake() for fake in EVERYONE if not names or fake.name in names]
