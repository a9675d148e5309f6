"""The emulated tier compiles for the CPU; without a compiler it is skipped, visibly."""

import functools
import shutil
from typing import Any

import pytest

from qla_kernels import device, jit
from tests.emulator import EmulatedKernel


@pytest.fixture(autouse=True, scope="session")
def _compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++ 11 or newer")


@functools.cache
def emulated(module: Any, variant: Any) -> EmulatedKernel:
    return EmulatedKernel(module.build(variant), module.PASS_CONFIGS)


@pytest.fixture
def seeds(monkeypatch):
    """Launches run emulated kernels, on a GPU of four SMs; the dictionary holds a launch's seed."""
    settings = {"seed": 0}

    def compile(module: Any, variant: Any) -> Any:
        return lambda *arguments: emulated(module, variant)(*arguments, seed=settings["seed"])

    monkeypatch.setattr(jit, "compile", compile)
    monkeypatch.setattr(device, "sm_count", lambda _: 4)
    return settings
