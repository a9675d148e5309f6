"""Other seeds for the tests of this folder: `pytest tests/fuzz --seed 12345`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="of each function's first case")


@pytest.fixture
def first_seed(request: pytest.FixtureRequest) -> int:
    """0 where pytest was started on a folder above, and had not read the option."""
    return int(request.config.getoption("--seed", default=0))
