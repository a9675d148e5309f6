"""What tests of compiled code need."""

import pytest


@pytest.fixture(scope="session")
def disassembler() -> None:
    """Skips where a kernel cannot be compiled and read."""
    pytest.importorskip("tilelang", reason="kernel files import TileLang")
    from qla_kernels import jit
    from qla_kernels.errors import Unsupported
    from qla_kernels.inspect import sass

    try:
        jit.nvcc()
    except Unsupported as missing:
        pytest.skip(str(missing))
    if sass.nvdisasm() is None:
        pytest.skip(f"no nvdisasm: {sass.HOW_TO_GET}")
