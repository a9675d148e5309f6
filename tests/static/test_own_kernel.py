"""The kernels of examples/ agree with their schedules."""

import pytest

from qla_kernels.lab.inspect.command import main
from tests.readme import ROOT

FILE = ROOT / "examples" / "own_kernel.py"
ROWS = ROOT / "examples" / "own_row_kernel.py"
pytestmark = pytest.mark.usefixtures("disassembler")


@pytest.mark.parametrize("file", [FILE, ROWS])
def test_it_is_what_its_schedule_says(file, capsys):
    assert main([str(file)]) == 0
    assert "VIOLATION" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"wgmma", "tma_store"', '"wgmma",', "tma_store"),
        ("        tiles={\n", "        smem_bytes=1024,\n        tiles={\n", "shared memory"),
    ],
)
def test_what_differs_from_the_schedule_is_said(old, new, said, tmp_path, capsys):
    text = FILE.read_text()
    assert text.count(old) == 1
    file = tmp_path / "own_kernel.py"
    file.write_text(text.replace(old, new))
    assert main([str(file), "--variant", "bf16"]) == 1
    assert said in capsys.readouterr().out.partition("VIOLATION")[2]
