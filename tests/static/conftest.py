"""What tests of compiled code need."""

from functools import cache

import pytest

from qla_kernels.runtime import jit

TRACED = cache(jit.trace)


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has traced for one test is there for the next; all variants take 40 s."""
    monkeypatch.setattr(jit, "trace", TRACED)


@pytest.fixture(scope="session")
def disassembler() -> None:
    """Skips where a kernel cannot be compiled and read."""
    pytest.importorskip("tilelang", reason="kernel files import TileLang")
    from qla_kernels.lab.inspect import sass
    from qla_kernels.runtime.errors import Unsupported

    try:
        jit.nvcc()
    except Unsupported as missing:
        pytest.skip(str(missing))
    if sass.nvdisasm() is None:
        pytest.skip(f"no nvdisasm: {sass.HOW_TO_GET}")
