"""Wrong bounds and slots on a GPU, in another process: a kernel that hangs takes its own along."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hopper

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 280  # s, for all cases; each has its own besides


def test_every_kernel_ends_and_writes_nothing_outside_its_tensors():
    command = [sys.executable, "-m", "tests.gdn_bad_bounds_gpu"]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-2000:]}"
    assert run.stdout.rstrip().endswith("cases, 0 bad")
