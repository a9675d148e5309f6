"""The cases of every kernel (qla_kernels/selftest), emulated."""

from typing import Any

import pytest

from qla_kernels import jit
from qla_kernels.selftest import CASES, cases_of
from qla_kernels.selftest.cases import Cases

pytestmark = pytest.mark.usefixtures("poison", "by_kernels")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Of one kernel every variant, or the one of --variant; else the variants that are emulated."""
    kernel, variant = (metafunc.config.getoption(name) for name in ("--kernel", "--variant"))
    chosen = [
        pytest.param(
            cases,
            each,
            marks=pytest.mark.kernels(*cases.kernels),
            id=f"{cases.kernels[0]}-{jit.variant_id(each)}",
        )
        for cases in (cases_of(kernel) if kernel else CASES)
        for each in (cases.variants_of(kernel, variant or "") if kernel else cases.variants())
        if kernel or cases.emulated is None or jit.variant_id(each) in cases.emulated
    ]
    metafunc.parametrize(("cases", "each"), chosen)


def test_case(cases: Cases, each: Any, seeds) -> None:
    for seeds["seed"], given in enumerate(cases.inputs):
        try:
            cases.check(each, given, "cpu")
        except AssertionError as error:
            raise AssertionError(f"input {given}") from error
