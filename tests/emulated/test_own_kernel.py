"""The kernel of docs/your-own-kernel.md, and the mistakes that the page says are found."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from examples import own_kernel
from qla_kernels.emulator import EmulationError

FILE = Path(own_kernel.__file__)
RELEASE = "        tiles.release(i)\n"
WAIT = "        T.wait_wgmma(0)  # the products read the slot until here\n"


def edited(folder: Path, old: str, new: str) -> Any:
    """The example with `new` in place of `old`."""
    text = FILE.read_text()
    assert text.count(old) == 1
    file = folder / "edited.py"
    file.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("edited", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("variant", own_kernel.VARIANTS)
def test_numbers_are_right_in_any_order(variant):
    limit = {"bfloat16": 2**-9, "float16": 2**-12}[variant.dtype]  # half a unit in the last place
    assert own_kernel.emulated(variant, range(6)) < limit


def test_a_slot_that_is_never_given_back_is_a_deadlock(tmp_path):
    kernel = edited(tmp_path, RELEASE, "")
    said = "deadlock: no thread can move(.|\n)*waiting for tiles_free.0.*needs 128 of 128 arrivals"
    with pytest.raises(EmulationError, match=said):
        kernel.emulated(kernel.VARIANTS[0], range(1))


def test_a_slot_that_is_given_back_too_early_changes_numbers(tmp_path):
    """With more steps than slots; the emulator multiplies when the wait forces it to."""
    kernel = edited(tmp_path, WAIT + RELEASE, RELEASE + WAIT)
    assert kernel.emulated(kernel.VARIANTS[0], range(6)) > 0.1
