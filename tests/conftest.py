"""Seeds, poisoned memory, and which tests this machine can run."""

import gc
import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from qla_kernels.runtime import programs
from tests import launched

HOPPER = (9, 0)
left_out: list[str] = []  # tests past the budget
SEED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order-seed", type=int, metavar="N", help="files, and tests in each, in random order N"
    )
    parser.addoption("--kernel", metavar="NAME", help="tests that are marked as this kernel's")
    parser.addoption("--variant", metavar="ID", help="its cases of one variant (test_cases.py)")
    parser.addoption(
        "--budget", type=float, metavar="SECONDS", help="of CPU time: leaves out tests past it"
    )
    parser.addoption("--record", action="store_true", help="write tests/emulated/launched.json")
    parser.addoption("--check-record", action="store_true", help="fail tests that differ from it")


def pytest_configure() -> None:
    # Test tensors are small: on two cores, two threads took twice the CPU time of one.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # What takes longest goes first, so that no worker is left alone with it at the end.
    items.sort(key=lambda item: item.path.name != "test_kernels.py")
    if (seed := config.getoption("--order-seed")) is not None:
        shuffle(items, random.Random(seed))
    if kernel := config.getoption("--kernel"):
        items[:] = [
            item
            for item in items
            if any(kernel in mark.args for mark in item.iter_markers("kernels"))
        ]
        cheapest_first(items)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    hopper = any(torch.cuda.get_device_capability(i) == HOPPER for i in range(gpus))
    for item in items:
        if "hopper" in item.keywords and not hopper:
            item.add_marker(pytest.mark.skip(reason="needs an SM90 GPU"))
        if "multi_gpu" in item.keywords and gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs several GPUs, found {gpus}"))


def seconds_of(item: pytest.Item) -> float:
    """Returns the CPU seconds on record of an emulated test; 1 if it is not on record."""
    found = launched.on_record().get(item.nodeid.removeprefix("tests/emulated/"))
    return found.seconds if found else 1.0


def cheapest_first(items: list[pytest.Item]) -> None:
    """The kernel's own cases first, then one of each test's parameters, then their second ones."""
    items.sort(key=seconds_of)
    seen: Counter[str] = Counter()
    turn: dict[pytest.Item, int] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        turn[item] = 0 if item.path.name == "test_cases.py" else seen.update([test]) or seen[test]
    items.sort(key=lambda item: turn[item])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leaves out what would end past the budget, on a busy machine and on an idle one."""
    budget = item.config.getoption("--budget")
    if budget is not None and launched.cpu_seconds() + seconds_of(item) > budget:
        left_out.append(item.nodeid)
        pytest.skip(f"left out: past the {budget:g} s of --budget")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name in left_out:
        terminalreporter.write_line(f"LEFT OUT {name}")


def pytest_collection_finish() -> None:
    """Modules and tests stay: to walk through them again and again took a tenth of CPU time."""
    gc.collect()
    gc.freeze()


def shuffle(items: list[pytest.Item], draw: random.Random) -> None:
    """A file's tests stay together: what they share, as ranks and wheels, is made once."""
    draw.shuffle(items)
    files = list(dict.fromkeys(item.path for item in items))
    items.sort(key=lambda item: files.index(item.path))


@pytest.fixture(autouse=True)
def seed() -> None:
    """Without a GPU the CPU's alone: for devices to come, torch formats the stack, for 3 ms."""
    SEED(0)


@pytest.fixture(autouse=True)
def _no_programs() -> None:
    """Tests change plans, heuristics and kernels, which programs take for constants."""
    programs.forget()


@pytest.fixture
def poison() -> Iterator[None]:
    """Fresh memory is NaN (integers: their largest value): reading what nobody wrote shows.

    This is torch's own switch: it covers torch.empty and its relatives, called from anywhere.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@pytest.fixture(autouse=True)
def _poison_on_the_gpu(request: pytest.FixtureRequest) -> None:
    """On a GPU always: its fresh memory is mostly zeros, or an earlier test's right answer."""
    if "hopper" in request.keywords:
        request.getfixturevalue("poison")
