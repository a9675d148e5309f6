"""The launcher of prebuilt kernels: see tests/native. Needs a C compiler and Python's headers."""

import inspect
import shutil

import pytest

from tests.native import behaviour, standin

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

TESTS = [
    name
    for name, test in vars(behaviour).items()
    if inspect.isfunction(test) and test.__module__ == behaviour.__name__ and name[0] != "_"
]


@pytest.mark.parametrize("name", TESTS)
def test_launcher(name: str) -> None:
    standin.run("-m", "tests.native.behaviour", name)


def test_programs() -> None:
    standin.run("-m", "tests.native.programs")


def test_programs_of_families() -> None:
    standin.run("-m", "tests.native.families")


def test_forms() -> None:
    standin.run("-m", "tests.native.forms")


def test_workloads_are_replayed() -> None:
    standin.run("-m", "tests.native.workloads")
