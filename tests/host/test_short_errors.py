"""A mistake of a kernel's file is told in a few lines, whatever TileLang logs and raises."""

from pathlib import Path

import pytest

from qla_kernels.lab.inspect.command import main as inspect_main
from qla_kernels.lab.kernel_file import kernel_of
from qla_kernels.runtime import jit

ROOT = Path(__file__).resolve().parents[2]
LINES = 10
MISTAKES = {
    "a method": ("ab.release(i)", "ab.releese(i)", "no attribute 'releese'"),
    "a name": ("T.wait_wgmma(0)", "T.wait_wgmma(zero)", "name 'zero' is not defined"),
    "an argument": ("T.copy(r_c, s.c)", "T.copy(r_c, 1)", "Unsupported argument type"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_ten_lines(mistake, tmp_path, capfd):
    pytest.importorskip("tilelang", reason="kernel files import TileLang")
    right, wrong, said = MISTAKES[mistake]
    source = (ROOT / "examples" / "own_kernel.py").read_text()
    assert right in source
    file = tmp_path / "own_kernel.py"
    file.write_text(source.replace(right, wrong))
    line = next(i for i, x in enumerate(file.read_text().splitlines(), 1) if wrong in x)
    module = kernel_of("test", file, ("VARIANTS", "build")).module
    with pytest.raises(jit.KernelError) as raised:
        jit.trace(module, module.VARIANTS[0])
    text = str(raised.value)
    assert said in text
    assert f"{file}, line {line}: " in text
    assert len(text.splitlines()) <= LINES
    assert raised.value.__suppress_context__
    assert inspect_main([str(file)]) == 2
    out, error = capfd.readouterr()
    assert said in error
    assert len((out + error).splitlines()) <= LINES
