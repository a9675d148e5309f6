"""The cases of every kernel (qla_kernels/lab/selftest), emulated."""

from collections.abc import Container
from typing import Any

import pytest

from qla_kernels.lab.selftest import CASES, cases_of
from qla_kernels.lab.selftest.cases import Cases
from qla_kernels.runtime import jit

pytestmark = pytest.mark.usefixtures("poison", "by_kernels")

# Kernels whose code for fp16 is another one than for bf16, because of fp16's range. Of all others
# variants differ in the name of the type alone (tests/static/test_kernels.py), and one is emulated.
BY_TYPE = {"gdn.dstate_chain", "gdn.segment_map_bwd", "gdn.wide_dstate"}


def same_as_bf16(kernel: str, variant: Any, variants: Container[Any]) -> bool:
    """Whether the variant is fp16's, and bf16's is the same code."""
    of_fp16 = getattr(variant, "dtype", "") == "float16" and kernel not in BY_TYPE
    return of_fp16 and variant._replace(dtype="bfloat16") in variants


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
        if kernel or _emulated(cases, each)
    ]
    metafunc.parametrize(("cases", "each"), chosen)


def _emulated(cases: Cases, each: Any) -> bool:
    if cases.emulated is not None:
        return jit.variant_id(each) in cases.emulated
    return not same_as_bf16(cases.kernels[0], each, cases.variants())


def test_case(cases: Cases, each: Any, seeds) -> None:
    for seeds["seed"], given in enumerate(cases.inputs):
        try:
            cases.check(each, given, "cpu")
        except AssertionError as error:
            raise AssertionError(f"input {given}") from error
