"""The cases of every kernel (qla_kernels/selftest) on a GPU: every variant, large inputs, too."""

from typing import Any

import pytest

from qla_kernels import jit
from qla_kernels.selftest import CASES
from qla_kernels.selftest.cases import Cases

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
