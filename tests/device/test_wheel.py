"""What a wheel installs, on a GPU: every kernel's self-test, where TileLang cannot be imported.

python -m qla_kernels build --out /absolute/folder
QLA_PREBUILT=/absolute/folder pytest -m hopper tests/device/test_wheel.py
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qla_kernels.runtime import jit
from qla_kernels.runtime.native import prebuilt
from tests.limits import HANG
from tests.readme import ROOT

pytestmark = [
    pytest.mark.hopper,
    pytest.mark.skipif(not os.environ.get("QLA_PREBUILT"), reason="needs QLA_PREBUILT"),
]

SELFTEST = """
import sys; sys.modules.update(tilelang=None, tvm=None, tvm_ffi=None)
from qla_kernels.lab import selftest
from qla_kernels.runtime import jit
assert selftest.__file__.startswith(sys.argv[1]), selftest.__file__
results = selftest.run()
print(*results, sep="\\n")
assert all(result.passed for result in results)
assert {result.passed is not None for result in results} == {True}, "a case did not run"
print("launched", *jit.compiled())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sys.path with the files of a wheel; tests/host/test_wheel.py has real ones."""
    package = tmp_path_factory.mktemp("site") / "qla_kernels"
    leave_out = shutil.ignore_patterns("__pycache__", "prebuilt")
    shutil.copytree(ROOT / "qla_kernels", package, ignore=leave_out)
    shutil.copytree(ROOT / "reference", package / "reference", ignore=leave_out)
    (package / "prebuilt").mkdir()
    for path in prebuilt.checked(Path(os.environ["QLA_PREBUILT"])):
        shutil.copy(path, package / "prebuilt")
    return package.parent


def test_every_kernel_runs_from_a_wheel(site: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("QLA_")}
    nowhere = dict.fromkeys(("HOME", "TILELANG_CACHE_DIR"), "/dev/null/no")
    done = subprocess.run(
        [sys.executable, "-Bc", SELFTEST, str(site)],
        cwd=site,
        env=kept | nowhere | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    launched = {label.partition("-")[0] for label in done.stdout.split("launched")[-1].split()}
    assert launched == {".".join(names) for names in jit.kernel_names()}
