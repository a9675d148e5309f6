"""Calls with tensors on GPU 1 while GPU 0 is current, ten times each, with their replays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.hopper, pytest.mark.multi_gpu]

FILE = Path(__file__).with_name("test_programs.py")
OF_THE_CURRENT_GPU = "graphs or threads or memory"  # they make streams, or ask for its memory


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_programs_of_another_gpu() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-k",
        f"not ({OF_THE_CURRENT_GPU})",
        FILE,
    ]
    subprocess.run(command, check=True, env={**os.environ, "QLA_TEST_GPU": "1"})
