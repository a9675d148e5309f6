"""The cases of every kernel (lab/selftest) on a GPU: every variant, large inputs, too."""

from typing import Any

import pytest

from qla_kernels.lab.selftest import CASES
from qla_kernels.lab.selftest.cases import Cases
from qla_kernels.runtime import jit

pytestmark = pytest.mark.hopper


@pytest.mark.parametrize(
    ("cases", "variant"),
    [
        pytest.param(cases, variant, id=f"{cases.kernels[0]}-{jit.variant_id(variant)}")
        for cases in CASES
        for variant in cases.variants()
    ],
)
def test_case(cases: Cases, variant: Any) -> None:
    for given in (*cases.inputs, *cases.large):
        try:
            cases.check(variant, given, "cuda")
        except AssertionError as error:
            raise AssertionError(f"input {given}") from error
