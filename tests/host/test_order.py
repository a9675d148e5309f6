"""`--order-seed`: any order of files, and of tests in each."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

from tests.conftest import shuffle


def order(seed: int) -> list[tuple[int, int]]:
    items: list[Any] = [SimpleNamespace(path=i // 5, number=i % 5) for i in range(20)]
    shuffle(items, random.Random(seed))
    return [(item.path, item.number) for item in items]


def test_an_order_is_a_permutation_that_keeps_files_together() -> None:
    found = order(1)
    assert sorted(found) == [(file, test) for file in range(4) for test in range(5)]
    files = [file for file, _ in found]
    assert sum(a != b for a, b in itertools.pairwise(files)) == 3


def test_a_number_stands_for_one_order() -> None:
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) == 8
