"""The kernels of examples/ on a GPU: the cases that the emulator runs."""

from typing import Any

import pytest
import torch

from examples import own_kernel, own_row_kernel
from qla_kernels.lab.selftest.compare import assert_close
from qla_kernels.runtime import jit

pytestmark = pytest.mark.hopper


@pytest.mark.parametrize(
    ("kernel", "variant"),
    [
        pytest.param(kernel, variant, id=jit.label(kernel, variant))
        for kernel in (own_kernel, own_row_kernel)
        for variant in kernel.VARIANTS
    ],
)
def test_case(kernel: Any, variant: Any) -> None:
    """The last argument is the output."""
    case = kernel.case(variant)
    arguments = [x.cuda() for x in case.arguments]
    jit.compile(kernel, variant)(*arguments)
    torch.cuda.synchronize()
    (want,) = case.expected.values()
    assert_close(variant.dtype, arguments[-1].cpu(), want, case.tolerance)
