"""Prebuilt kernels in a home that cannot be written, while files change, and in many processes."""

import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qla_kernels.gdn.kernels import gate
from qla_kernels.lab import build
from qla_kernels.runtime import jit
from qla_kernels.runtime.errors import Unsupported
from qla_kernels.runtime.native import prebuilt
from tests.native import behaviour, made_up, standin

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

# Finds the kernel of made_up.py and launches it as often as argv says, with TileLang unimportable.
LAUNCH = """
import sys; sys.modules.update(tilelang=None, tvm=None, tvm_ffi=None)
import torch
from qla_kernels.runtime import jit
from qla_kernels.runtime.native import prebuilt
from tests.native import behaviour, standin
from tests.native.made_up import VARIANT, gate
print("begins", flush=True)
for _ in range(int(sys.argv[1])):
    jit.compile.cache_clear(), prebuilt._kernels.cache_clear(), prebuilt._found.clear()
    launch = jit.compile(gate, VARIANT)
    standin.configured(prebuilt.in_use().path.parent)
    driver = standin.Driver()
    driver.expect(standin.kinds(behaviour.ENTRY))
    launch(*behaviour._arguments())
    assert driver.record()
print("launched")
"""

# Before it: says what is opened to be written, made or removed.
WATCH = """
import os, sys
def heard(event, about):
    writes = event == "open" and about[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink"):
        print("writes", *about)
import torch
sys.addaudithook(heard)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """QLA_PREBUILT, with the kernel of made_up.py; this process forgets it after the test."""
    shutil.copy(standin.built() / prebuilt.LAUNCHER, tmp_path)
    made_up.write(tmp_path)
    monkeypatch.setenv("QLA_PREBUILT", str(tmp_path))
    monkeypatch.delenv("QLA_DUMP", raising=False)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    jit.compile.cache_clear()
    prebuilt._kernels.cache_clear()
    prebuilt._found.clear()


def test_nothing_is_written_and_no_home_is_needed(folder: Path) -> None:
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TILELANG_CACHE_DIR"), "/dev/null/no")
    said = standin.run("-Bc", WATCH + LAUNCH, "1", QLA_PREBUILT=str(folder), **nowhere)
    assert said.split() == ["begins", "launched"]


def test_the_watch_above_hears() -> None:
    assert "writes /dev/null" in standin.run("-c", WATCH + "open('/dev/null', 'w')")


def test_several_processes_at_once_while_a_build_replaces_the_file(folder: Path) -> None:
    """Each opens, reads and launches again and again; the file has two contents in turn."""
    command = [sys.executable, "-c", LAUNCH, "200"]
    env = standin.environment(standin.built()) | {"QLA_PREBUILT": str(folder)}
    both = subprocess.PIPE, subprocess.STDOUT
    readers = [
        subprocess.Popen(
            command, cwd=standin.ROOT, env=env, text=True, stdout=both[0], stderr=both[1]
        )
        for _ in range(3)
    ]
    for reader in readers:
        assert reader.stdout
        assert reader.stdout.readline() == "begins\n"
    longer = behaviour.CUBIN + bytes(10_000)
    other = made_up.built(cubin=build.checksum(longer))._replace(cubin=longer)
    replaced = 0
    for kernel in itertools.cycle((other, made_up.built())):
        made_up.write(folder, kernel)
        replaced += 1
        if all(reader.poll() is not None for reader in readers):
            break
    # Not `communicate`: it would miss what `readline` took from the pipe and did not return.
    said = [reader.stdout.read() for reader in readers if reader.stdout]
    assert said == ["launched\n"] * 3
    assert replaced > 20


def test_a_file_that_is_replaced_later_is_read_as_it_was(folder: Path) -> None:
    file = prebuilt.in_use()
    assert isinstance(file, prebuilt.KernelFile)
    file.path.write_bytes(b"cut off")
    assert jit.compile(gate, made_up.VARIANT).__name__ == made_up.LABEL
    forget()
    with pytest.raises(Unsupported, match="cannot read its manifest"):
        jit.compile(gate, made_up.VARIANT)


def test_builds_into_one_folder_at_once_leave_whole_files(folder: Path) -> None:
    threads = [threading.Thread(target=made_up.write, args=(folder,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(os.listdir(folder)) == ["kernels-13.zip", prebuilt.LAUNCHER]
    prebuilt.read_all(prebuilt.files_of(folder)[0])


def test_a_build_that_fails_leaves_the_old_file(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    broken = made_up.built()._replace(cubin=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        made_up.write(folder, broken)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_files_can_be_read_by_other_users(folder: Path) -> None:
    assert prebuilt.files_of(folder)[0].stat().st_mode & 0o777 == 0o644
