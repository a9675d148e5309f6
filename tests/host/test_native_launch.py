"""The launcher of prebuilt kernels: see tests/native. Needs a C compiler and Python's headers."""

import inspect
import json
import shutil

import pytest

from tests.native import behaviour, standin

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

TESTS = [
    name
    for name, test in vars(behaviour).items()
    if inspect.isfunction(test) and test.__module__ == behaviour.__name__ and name[0] != "_"
]


@pytest.fixture(scope="module")
def wrong() -> dict[str, str]:
    """What is wrong with each of them; one start serves all."""
    said = standin.run("-m", "tests.native.behaviour", *TESTS)
    return dict(json.loads(said.splitlines()[-1]))


@pytest.mark.parametrize("name", TESTS)
def test_launcher(name: str, wrong: dict[str, str]) -> None:
    assert not wrong[name], wrong[name]


def test_programs() -> None:
    standin.run("-m", "tests.native.programs")


def test_programs_of_families() -> None:
    standin.run("-m", "tests.native.families")


def test_forms() -> None:
    standin.run("-m", "tests.native.forms")


def test_plans() -> None:
    standin.run("-m", "tests.native.plans")


def test_workloads_are_replayed() -> None:
    standin.run("-m", "tests.native.workloads")
