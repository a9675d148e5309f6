"""A convolution and a gated delta net whose tokens are spread over ranks: losses of a training."""

import re
import subprocess
import sys

import pytest

from tests.limits import HANG
from tests.ranks import ENVIRONMENT, ROOT


def test_losses_do_not_depend_on_the_number_of_ranks():
    losses = {}
    for world in (1, 2, 4):
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        training = subprocess.run(
            [*torchrun, "--nproc-per-node", str(world), "-m", "tests.layer_ranks"],
            cwd=ROOT, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, timeout=HANG,
            capture_output=True, text=True,
        )  # fmt: skip
        assert training.returncode == 0, training.stderr[-3000:]
        losses[world] = [float(x) for x in re.findall(r"^loss (.*)$", training.stdout, re.M)]
    assert len(losses[1]) == 5
    assert losses[1] == sorted(losses[1], reverse=True)
    for world in (2, 4):  # a wrong convolution, or its lost gradient, changes them by 5e-5 and more
        assert losses[world] == pytest.approx(losses[1], rel=5e-6)
