"""What the host does is what tests/goldens recorded, in a sample; `python -m tests.goldens --check`
compares all of it.
"""

import shutil

import pytest

from tests.goldens import __main__ as goldens
from tests.goldens import store

SAMPLE = {
    "launches": ["options", "ranks/2x4, 96", "conv", "gdn/gdn-both-16x32"],
    "planners": ["000 ", "001 ", "008 "],
    "refusals": ["gdn.chunk", "dualkv", "conv"],
}


@pytest.mark.parametrize("part", SAMPLE)
def test_sample(part: str) -> None:
    if part == "launches" and shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    assert not goldens.check(part, SAMPLE[part])


def test_a_difference_is_found_and_named() -> None:
    recorded, now = {"a": "1\n2\n", "b": "same\n"}, {"a": "1\n3\n", "b": "same\n", "c": "new\n"}
    first, second = sorted(goldens.differences(recorded, now))
    assert first.splitlines()[0] == "--- a, recorded"
    assert first.splitlines()[-2:] == ["-2", "+3"]
    assert "+new" in second


def test_what_is_printed_is_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    store.printed([("a", "1\n2\n"), ("b c", ""), ("d/e", "3\n")])
    assert store.parsed(capsys.readouterr().out) == {"a": "1\n2", "b c": "", "d/e": "3"}
