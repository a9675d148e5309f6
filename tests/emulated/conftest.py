"""The emulated tier compiles for the CPU; without a compiler it is skipped, visibly."""

import functools
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from qla_kernels.conv import launch as launch_conv
from qla_kernels.conv import update as conv_update
from qla_kernels.gdn.decode import api as decode
from qla_kernels.gdn.decode import launch as launch_decode
from qla_kernels.gdn.decode import packed, verify
from qla_kernels.gdn.prefill import api as prefill
from qla_kernels.gdn.prefill import launch as launch_prefill
from qla_kernels.hybrid import step
from qla_kernels.lab.emulator import EmulatedKernel, case
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.errors import need
from qla_kernels.sparse_ring import launch as launch_sparse_ring
from qla_kernels.sparse_ring import shard
from tests import launched, lowered

KERNELS: dict[str, str] = {}  # of each emulated function: the name of its kernel
run: set[str] = set()  # kernels that the running test has launched
new: dict[str, launched.Launched] = {}  # tests to put on record


@pytest.fixture(autouse=True, scope="session")
def _compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++ 11 or newer")
    lowered.unpack()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks a test with the kernels on record."""
    if found := launched.on_record().get(_name(item)):
        item.add_marker(pytest.mark.kernels(*found.kernels))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """With --check-record, fails a test that launches other kernels than it is marked with.

    Not by default: what a test finds in a cache, and so does not launch, depends on others.
    """
    run.clear()
    started = launched.cpu_seconds()
    yield
    kernels = tuple(sorted(run))
    if item.config.getoption("--record"):
        new[_name(item)] = launched.Launched(launched.cpu_seconds() - started, kernels)
        return
    marked = {name for mark in item.iter_markers("kernels") for name in mark.args}
    of_case = marked <= run and marked and _name(item) not in launched.on_record()
    if item.config.getoption("--check-record") and run != marked and not of_case:
        got = f"{_name(item)}: launches {kernels}, and {tuple(sorted(marked))} are on record"
        fix = f"run python -m pytest tests/emulated/{item.path.name} --record"
        pytest.fail(need("tests/launched.py", got, "the same", fix), pytrace=False)


def pytest_sessionfinish() -> None:
    if new:
        launched.write(new)


def _name(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/emulated/")


@pytest.fixture(autouse=True)
def _noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes each kernel that is launched."""
    launch = EmulatedKernel.__call__

    def noted(self: EmulatedKernel, *arguments: Any, **options: Any) -> None:
        if self.name in KERNELS:
            run.add(KERNELS[self.name])
        launch(self, *arguments, **options)

    monkeypatch.setattr(EmulatedKernel, "__call__", noted)


@functools.cache
def emulated(module: Any, variant: Any) -> EmulatedKernel:
    kernel = case.emulated(module, variant)
    KERNELS[kernel.name] = jit.label(module, variant).partition("-")[0]
    return kernel


@pytest.fixture
def seeds(monkeypatch):
    """Launches run emulated kernels, on a GPU of four SMs; the dictionary holds a launch's seed."""
    settings = {"seed": 0}

    def compile(module: Any, variant: Any) -> Any:
        return lambda *arguments: emulated(module, variant)(*arguments, seed=settings["seed"])

    monkeypatch.setattr(jit, "compile", compile)
    monkeypatch.setattr(device, "sm_count", lambda _: 4)
    return settings


@pytest.fixture
def by_kernels(monkeypatch) -> None:
    """CPU tensors take the launches of a GPU."""
    for name in ("gdn_recurrent", "gdn_recurrent_slots"):
        monkeypatch.setattr(decode, name, getattr(launch_decode, name))
    for name in ("gdn_recurrent_slots", "gdn_recurrent_norm"):
        monkeypatch.setattr(packed, name, getattr(launch_decode, name))
    for module in (conv_update, step):
        monkeypatch.setattr(module, "conv_update", launch_conv.conv_update)
    monkeypatch.setattr(verify, "gdn_verify", launch_decode.gdn_verify)
    monkeypatch.setattr(prefill, "gdn_prefill", launch_prefill.gdn_prefill)
    monkeypatch.setattr(shard, "launches", lambda _: launch_sparse_ring)
