"""The cases of the kernel that adds up the gradients of children in a prefix tree."""

from typing import Any

import torch

from qla_kernels.gdn.tree import launch
from qla_kernels.lab.selftest.cases import Cases


def _child_sums(_: Any, counts: list[int], device: str) -> None:
    """Checks that a row becomes, bit for bit, the sum of one child after the other."""
    x = torch.randn(sum(counts), 2, 64, 68)
    into = torch.randn(len(counts) + 2, 2, 64, 68)
    runs, want, first = [], into.clone(), 0
    for row, count in enumerate(counts):
        runs.append((first, row, count))
        for child in range(first, first + count):
            want[row] += x[child]
        first += count
    got = into.to(device)
    launch.child_sums(x.to(device), torch.tensor(runs, dtype=torch.int32).to(device), got)
    assert torch.equal(got.cpu(), want), f"{(got.cpu() != want).sum()} numbers differ"


CASES = (Cases(("gdn.child_sums",), _child_sums, [[1], [8, 9], [3, 20, 1]], [[500, 0, 100]]),)
