"""Wrong arguments are refused clearly, but for those of known.txt; and those are still wrong."""

import pytest

from tests.fuzz.targets import TARGETS
from tests.fuzz.wrong import known, problems


@pytest.mark.parametrize("name", TARGETS)
def test_wrong_arguments(name):
    found = problems(name, TARGETS[name])
    expected = {case for case in known() if case.startswith(f"{name}(")}
    new = [f"{case}: {said}" for case, said in found.items() if case not in expected]
    assert not new, "\n".join(new[:20])
    mended = sorted(expected - found.keys())
    assert not mended, "take these out of tests/fuzz/known.txt:\n" + "\n".join(mended)


def test_known_cases_name_a_function():
    assert {case.partition("(")[0] for case in known()} <= TARGETS.keys()
