"""The kernels of examples/, and the mistakes that the emulator finds in them."""

import re
import runpy
from pathlib import Path

import pytest

from examples import own_kernel, own_row_kernel
from qla_kernels import Unsupported
from qla_kernels.lab.emulator import load
from qla_kernels.lab.emulator.case import check
from qla_kernels.lab.emulator.command import main
from tests.compare import assert_close

FILE, ROWS = Path(own_kernel.__file__), Path(own_row_kernel.__file__)
RELEASE = "        ab.release(i)\n"
WAIT = "        T.wait_wgmma(0)  # the products read the slot until here\n"


def edited(folder: Path, old: str, new: str) -> str:
    """The path of the example with `new` in place of `old`."""
    text = FILE.read_text()
    assert text.count(old) == 1
    file = folder / FILE.name
    file.write_text(text.replace(old, new))
    return str(file)


@pytest.mark.parametrize(
    ("file", "names"),
    [
        (FILE, ["own_kernel-bf16", "own_kernel-fp16"]),
        (ROWS, ["own_row_kernel-bf16-w512", "own_row_kernel-fp16-w1024"]),
    ],
)
def test_numbers_are_right_in_any_order(file, names, capsys):
    """`python examples/own_row_kernel.py` once printed nothing."""
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(file), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"ok    {name}" for name in names]


def test_an_ordinary_kernel_of_tilelang(capsys):
    """With `T.Pipelined`, and nothing of this package in it."""
    runpy.run_path(str(FILE.with_name("pipelined_kernel.py")), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"seed {seed}" for seed in range(6)]


def test_a_slot_that_is_never_given_back_is_a_deadlock(tmp_path, capsys):
    assert main([edited(tmp_path, RELEASE, ""), "--variant", "bf16"]) == 1
    said = "deadlock: no thread can move(.|\n)*waiting for ab_free.0.*needs 128 of 128 arrivals"
    assert re.match(f"WRONG own_kernel-bf16, seed 0: .*{said}", capsys.readouterr().out)


def test_a_slot_that_is_given_back_too_early_is_reported(tmp_path, capsys):
    file = edited(tmp_path, WAIT + RELEASE, RELEASE + WAIT)
    assert main([file, "--variant", "bf16"]) == 1
    said = (
        r"WRONG own_kernel-bf16, seed 0: .*, copy by thread \d+: writes to byte \d+ of .*, where a"
        r" wgmma of threads 0..127 \S+ may still read: the mbarrier that it waited for last,"
        r" ab_free\[\d\], does not say so. Arrive, or release the slot, behind T.wait_wgmma;"
        r"(?s:.*)roles: multiply 0..127, load 128..159, padding"
    )
    assert re.match(said, capsys.readouterr().out)


def test_a_tile_that_is_sent_too_early_is_reported(tmp_path, capsys):
    assert main([edited(tmp_path, "    staged.sync()\n", ""), "--variant", "bf16"]) == 1
    early = r"thread 0: a TMA store reads byte \d+ of .*, and no barrier says that thread \d+ has"
    late = r"copy by thread 0: a TMA store still reads byte \d+ of .*, and thread \d+ has over"
    assert re.search(f"{early}|{late}", capsys.readouterr().out)


def test_nan_that_nobody_wrote_stays(tmp_path, capsys, monkeypatch):
    old, new = "s.c, c[row : row + TILE,", "s.c[0:48, :], c[row : row + 48,"
    file, found = edited(tmp_path, old, new), set()
    for order in ("random", "eager"):
        monkeypatch.setenv("EMU_SCHEDULE", order)
        assert main([file, "--variant", "bf16"]) == 1
        said = capsys.readouterr().out
        assert "\n      nan: an element that was not written; or, if EMU_SCHEDULE=eager" in said
        found |= set(re.findall(r"c: \d+ of 10800 not finite, first nan at \(\d+, \d+\)", said))
    assert len(found) == 1


def test_a_variant_of_a_file_is_called_with_tensors():
    kernel = load(FILE, "p16")  # a part of fp16
    assert kernel.parameters == ["a", "b", "c"]
    a, b, c = (x.clone() for x in own_kernel.case(own_kernel.VARIANTS[1]).arguments)
    kernel(a, b, c, seed=3)
    assert_close("c", c, a.double() @ b.double().T, 2**-12)
    with pytest.raises(
        Unsupported, match=r"no variants with 'k64' in .*; need one of bf16, fp16; "
    ):
        load(FILE, "k64")


def test_a_case_expects_numbers_of_tensors_that_the_kernel_has():
    kernel, case = load(FILE), own_kernel.case(own_kernel.VARIANTS[0])
    for expected in ({"d": case.expected["c"]}, {}):
        with pytest.raises(Unsupported, match=r"expected numbers of (d|no tensor); need"):
            check(kernel, case._replace(expected=expected), seed=0)
