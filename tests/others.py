"""Other projects' own tests of the gated delta rule, run through our functions, on a GPU.

    python -m tests.others fla CHECKOUT         FLA's tests/ops/test_gdn.py
    python -m tests.others flash_qla CHECKOUT   FlashQLA's tests/test_gdr_unit.py

The library has to be installed, and CHECKOUT is a checkout of its repository, of that version. Its
functions are replaced by ours before its tests import them. A test whose call ours refuses, such as
one in fp32, is skipped, with the refusal as its reason; options behind CHECKOUT go to pytest.
"""

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

import qla_kernels
from qla_kernels import Unsupported

ROOT = Path(__file__).parents[1]
REPLACES = "TESTS_REPLACE"
TESTS = {"fla": "tests/ops/test_gdn.py", "flash_qla": "tests/test_gdr_unit.py"}
MODULES = {"fla": "fla.ops.gated_delta_rule", "flash_qla": "flash_qla"}
OTHERWISE = (
    "flash_qla or blackwell or test_gate or prepare_wy"  # tests of FLA that call none of ours
)
OPTIONS = {"fla": ["-k", f"not ({OTHERWISE})"], "flash_qla": []}
FUNCTIONS = {
    "fla": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "flash_qla": ("chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd"),
}


def pytest_configure(config: pytest.Config) -> None:
    if (library := os.environ.get(REPLACES)) is not None:
        module = importlib.import_module(MODULES[library])
        for name in FUNCTIONS[library]:
            setattr(module, name, with_lengths(getattr(qla_kernels, name)))


def with_lengths(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, told the lengths where it needs them: for the states of all chunks."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if options.get("output_h") and options.get("cu_seqlens") is not None:
            options.setdefault("cu_seqlens_cpu", options["cu_seqlens"].cpu())
        return function(*arguments, **options)

    return call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    except Unsupported as refusal:
        pytest.skip(f"refused: {refusal}")


def main(arguments: list[str]) -> int:
    if len(arguments) < 2 or arguments[0] not in TESTS:
        print(__doc__)
        return 2
    library, checkout, *options = arguments
    file = Path(checkout, TESTS[library])
    if not file.exists():
        print(f"{file}: no such file; need a checkout of the library's repository")
        return 2
    os.environ[REPLACES] = library
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "tests.others", "-c", os.devnull]
    return subprocess.call(
        [*command, "--rootdir", checkout, str(file), *OPTIONS[library], *options]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
