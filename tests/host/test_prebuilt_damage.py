"""Damaged files of prebuilt kernels, drawn by seed, give `Unsupported` with the remedy."""

import copy
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qla_kernels.gdn.kernels import gate
from qla_kernels.lab import build
from qla_kernels.runtime import jit
from qla_kernels.runtime.errors import Unsupported
from qla_kernels.runtime.native import checks, prebuilt
from tests.native import behaviour, made_up, standin

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

REMEDY = "`python -m qla_kernels build`"
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**70, 1.5, "", "x", "\0", "\ud800", [], [1], {}, {"a": 1}, "../../x", "*",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copy(standin.built() / prebuilt.LAUNCHER, tmp_path)
    monkeypatch.setenv("QLA_PREBUILT", str(tmp_path))
    monkeypatch.delenv("QLA_DUMP", raising=False)
    monkeypatch.setattr(jit, "_compiled", lambda *_: "compiled")
    monkeypatch.setattr(jit, "_digests", {})
    yield tmp_path
    forget()


def forget() -> None:
    jit.compile.cache_clear()
    prebuilt._kernels.cache_clear()
    prebuilt._found.clear()
    prebuilt._edited.clear()


def outcome(path: Path) -> str:
    """What a launch, the doctor and a read of all kernels make of a folder; errors if unclear."""
    said = []
    for ask in (lambda: jit.compile(gate, made_up.VARIANT), lambda: prebuilt.read_all(path)):
        forget()
        try:
            ask()
        except Unsupported as error:
            said.append("refused" if REMEDY in str(error) else f"no remedy: {error}")
        else:
            said.append("used")
    assert {*said} <= {"refused", "used"}
    about = checks.section()["file"]
    assert str(about).startswith((str(path), "unknown (Unsupported: ", "none: "))
    return " ".join(said)


def flip(rng: random.Random, whole: bytes) -> bytes:
    damaged = bytearray(whole)
    for _ in range(rng.choice((1, 1, 3, 10))):
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def cut(rng: random.Random, whole: bytes) -> bytes:
    return whole[: rng.randrange(len(whole))]


def blank(rng: random.Random, whole: bytes) -> bytes:
    begin = rng.randrange(len(whole))
    return whole[:begin] + bytes(len(whole[begin : begin + 64])) + whole[begin + 64 :]


def insert(rng: random.Random, whole: bytes) -> bytes:
    begin = rng.randrange(len(whole))
    return whole[:begin] + rng.randbytes(rng.choice((1, 8, 64))) + whole[begin:]


def repeat(rng: random.Random, whole: bytes) -> bytes:
    begin, end = sorted(rng.sample(range(len(whole)), 2))
    return whole[:end] + whole[begin:]


DAMAGE = (flip, cut, blank, insert, repeat)


@pytest.mark.parametrize("part", range(4))
def test_bytes_of_a_kernel_file(folder: Path, part: int) -> None:
    path = made_up.write(folder)
    whole = path.read_bytes()
    assert outcome(path) == "used used"
    refused = 0
    for seed in range(100 * part, 100 * part + 100):
        rng = random.Random(seed)
        path.write_bytes(rng.choice(DAMAGE)(rng, whole))
        refused += "refused" in outcome(path)
    assert refused > 70  # what zipfile ignores is harmless


@pytest.mark.parametrize("bit", range(16))
def test_flags_of_a_member(folder: Path, bit: int) -> None:
    """zipfile raises RuntimeError for bit 0, "encrypted", and NotImplementedError for others."""
    path = made_up.write(folder)
    contents = bytearray(path.read_bytes())
    for header, flags in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        contents[contents.index(header) + flags + bit // 8] |= 1 << bit % 8
    path.write_bytes(contents)
    outcome(path)


def mutated(rng: random.Random, value: Any) -> Any:
    """Returns JSON with one part replaced, left out or added."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return rng.choice(VALUES)
    value = copy.copy(value)
    key = rng.choice([*value] if isinstance(value, dict) else range(len(value)))
    act = rng.random()
    if act < 0.15:
        del value[key]
    elif act < 0.25 and isinstance(value, dict):
        value[rng.choice(("x", "os.path-x", "../../x", ""))] = value[key]
    else:
        value[key] = mutated(rng, value[key])
    return value


def write(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name, contents in members.items():
            file.writestr(name, contents)


def test_manifests_of_another_form(folder: Path) -> None:
    path = made_up.write(folder)
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    manifest = json.loads(members[prebuilt.MANIFEST])
    refused = 0
    for seed in range(400):
        changed = mutated(random.Random(seed), manifest)
        write(path, **members | {prebuilt.MANIFEST: json.dumps(changed).encode()})
        refused += "refused" in outcome(path)
    assert refused > 200  # other values of right types are not
    for contents in (b"\xff\xfe{", b"[" * 200_000, b"", b"{"):
        write(path, **members | {prebuilt.MANIFEST: contents})
        assert outcome(path) == "refused refused"


def test_entries_of_another_form(folder: Path) -> None:
    """Their checksums are right, as those of another version would be."""

    def of(entry: bytes) -> str:
        about = {"entry": build.checksum(entry)}
        return outcome(made_up.write(folder, made_up.built(**about)._replace(entry=entry)))

    refused = 0
    for seed in range(400):
        entry = mutated(random.Random(seed), behaviour.ENTRY)
        refused += "refused" in of(json.dumps(entry).encode())
    assert refused > 200
    for contents in (b"", b"{", b"\xff\xfe{", b"[" * 100_000, b"[1]"):
        assert of(contents) == "refused refused"


def test_a_launcher_is_not_loaded_unless_it_is_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of zeros ended the process in the loader."""
    path, launcher = made_up.write(folder), folder / prebuilt.LAUNCHER
    whole = launcher.read_bytes()
    monkeypatch.setattr(prebuilt, "ExtensionFileLoader", lambda *_: pytest.fail("it is loaded"))
    prebuilt._native.cache_clear()
    zeros = whole[:4096] + bytes(8192) + whole[12288:]
    damages: list[Callable[[], bytes]] = [lambda: zeros, lambda: b"", lambda: b"hello"]
    for seed in range(200):
        rng = random.Random(seed)
        damages.append(lambda rng=rng: rng.choice(DAMAGE)(rng, whole))  # type: ignore[misc]
    for damage in damages:
        contents = damage()
        if contents != whole:
            launcher.write_bytes(contents)
            assert outcome(path) == "refused refused"


@pytest.mark.parametrize("name", [prebuilt.FILE.format("13"), prebuilt.LAUNCHER])
def test_nothing_but_regular_files_is_opened(folder: Path, name: str) -> None:
    """Opening a pipe waited for ever."""
    path, place = made_up.write(folder), folder / name
    place.unlink()
    os.mkfifo(place)
    assert outcome(path) == "refused refused"
    place.unlink()
    place.mkdir()
    assert outcome(path) == "refused refused"
