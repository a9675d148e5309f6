"""Our requirements beside those of engines that serve models: each pair of ranges has a version.

`engines.json` has the requirements of released wheels, extras left out, as their metadata list
them. A newer engine: replace its entry by `Requires-Dist` of its METADATA.
"""

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from benchmarks.harness import records
from qla_kernels.runtime import compiler, jit
from qla_kernels.runtime.errors import Unsupported
from qla_kernels.runtime.native import prebuilt

tomllib = pytest.importorskip("tomllib", reason="Python 3.11")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENGINES = json.loads(Path(__file__).with_name("engines.json").read_text())
HERE = {"platform_machine": "x86_64", "sys_platform": "linux", "platform_system": "Linux"}
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def by_name(lines: list[str]) -> dict[str, Requirement]:
    found = map(Requirement, lines)
    on_linux = (r for r in found if r.marker is None or r.marker.evaluate(HERE | {"extra": ""}))
    return {canonicalize_name(r.name): r for r in on_linux}


def common(ours: SpecifierSet, theirs: SpecifierSet) -> str | None:
    """A version that both accept: one that either names, or the next one."""
    named = {s.version.removesuffix(".*") for s in (*ours, *theirs)} or {"1"}
    tried = named | {f"{version}.1" for version in named}
    return next((v for v in sorted(tried) if v in ours and v in theirs), None)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_requirement_has_a_version_that_the_engine_accepts(engine: str) -> None:
    theirs = by_name(ENGINES[engine]["requires_dist"])
    ours = by_name(PROJECT["dependencies"])
    assert {"torch", "numpy", "einops"} == set(ours) == set(ours) & set(theirs)
    for name, requirement in ours.items():
        assert common(requirement.specifier, theirs[name].specifier), name
    python = SpecifierSet(ENGINES[engine]["requires_python"])
    assert [p for p in PYTHONS if p in SpecifierSet(PROJECT["requires-python"]) and p in python]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_compiles_kernels_does_not_fit_beside_it(engine: str) -> None:
    """If this fails, engines have a newer TileLang: docs/install.md may say so."""
    theirs = by_name(ENGINES[engine]["requires_dist"])["tilelang"]
    ours = by_name(PROJECT["optional-dependencies"]["compile"])["tilelang"]
    assert re.fullmatch(r"==[\d.]+", str(theirs.specifier))
    assert common(ours.specifier, theirs.specifier) is None


def test_the_oldest_tilelang_is_that_of_the_extra() -> None:
    ours = by_name(PROJECT["optional-dependencies"]["compile"])["tilelang"]
    assert compiler.OLDEST_TILELANG in ours.specifier
    assert f">={compiler.OLDEST_TILELANG}" in str(ours.specifier).split(",")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wanted", ["", "gdn.gate-bf16"])
def test_an_engines_tilelang_is_refused_with_a_sentence(
    engine: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel's build raised `TypeError: 'ForFrame' object is not iterable`."""
    (pinned,) = by_name(ENGINES[engine]["requires_dist"])["tilelang"].specifier
    monkeypatch.setattr(importlib.metadata, "version", lambda _: pinned.version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: "installed")
    monkeypatch.setattr(prebuilt, "lacking", lambda label: f"{label} is edited")
    assert not compiler.can_compile()
    said = f"tilelang is {pinned.version}; need TileLang {compiler.OLDEST_TILELANG} or newer"
    said = f"tool: {wanted} is edited, and {said}, or prebuilt" if wanted else f"tool: {said}; use"
    with pytest.raises(Unsupported, match=said):
        jit.tilelang_for("tool", wanted)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: compiler.OLDEST_TILELANG)
    assert compiler.can_compile()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.2.0.dev3+cu13")
    assert compiler.can_compile()


def test_ranges_without_a_common_version_are_found() -> None:
    assert common(SpecifierSet(">=2.8"), SpecifierSet("==2.7.1")) is None
    assert common(SpecifierSet(">=2.8"), SpecifierSet("<2.8")) is None
    assert common(SpecifierSet(">=2.8"), SpecifierSet("==2.14.1")) == "2.14.1"
    assert common(SpecifierSet(">0.8"), SpecifierSet("")) == "0.8.1"


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "constraints" / name).read_text()
    return dict(re.findall(r"^([\w-]+)==(\S+)", text, re.M))


@pytest.mark.parametrize("name", ["tested.txt", "cpu.txt", "gpu-records.txt"])
def test_pinned_versions_are_in_our_ranges(name: str) -> None:
    extras = PROJECT["optional-dependencies"].values()
    ranges = by_name([*PROJECT["dependencies"], *(line for lines in extras for line in lines)])
    checked = pins(name).keys() & ranges.keys()
    assert checked
    for package in checked:
        assert pins(name)[package] in ranges[package].specifier, package


def test_records_ran_with_the_versions_that_are_pinned_for_them() -> None:
    versions = pins("gpu-records.txt")
    runs = [run for run in records.load() if run.device_kind == "cuda"]
    assert {"torch", "tilelang"} <= [run for run in runs if run.family == "gdn"][-1].versions.keys()
    for run in runs:
        for name in versions:
            assert run.versions.get(name, versions[name]) == versions[name], run.id
