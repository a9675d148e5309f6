"""The emulated tier compiles for the CPU; without a compiler it is skipped, visibly."""

import shutil

import pytest


@pytest.fixture(autouse=True, scope="session")
def _compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++ 11 or newer")
