"""The doctor works on any machine, and its fingerprint follows the device code, nothing else."""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from qla_kernels.gdn.shapes import HEAD_SIZES
from qla_kernels.integrations import engines
from qla_kernels.lab import doctor
from qla_kernels.runtime import device, digests
from qla_kernels.runtime.native import prebuilt
from tests import zygote

ROOT = Path(__file__).resolve().parents[2]

# A machine where TileLang is not installed.
WITHOUT_TILELANG = """
import sys
sys.modules.update(tilelang=None, tvm=None, tvm_ffi=None)
from qla_kernels.lab import doctor
sys.exit(doctor.main(sys.argv[1:]))
"""


def without_tilelang(*arguments: str) -> subprocess.CompletedProcess[str]:
    return zygote.run(WITHOUT_TILELANG, *arguments, cwd=ROOT, path=str(ROOT), env=os.environ)


def test_report_for_people_names_every_section(capsys):
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    for title in doctor.report():
        assert re.search(rf"^{title}$", said, re.M), title
    assert doctor.fingerprint("gdn") in said


def test_help_says_what_is_printed_and_what_the_exit_status_means(capsys):
    with pytest.raises(SystemExit) as done:
        doctor.main(["--help"])
    assert done.value.code == 0
    said = capsys.readouterr().out
    assert "prints this machine's versions and GPUs" in said
    assert "The exit status is 0, whatever the report says" in said


def test_report_without_tilelang_is_complete():
    done = without_tilelang("--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == set(doctor.report())
    assert report["versions"]["nvcc"] == "not used"  # it was an alarm once
    assert report["paths"]["CPU tensors"] == "reference, chunked"
    assert report["paths"]["CUDA, gdn"].endswith(prebuilt.NOTHING_TO_LAUNCH)  # it said: our kernels


@pytest.mark.parametrize("name", doctor.HOOKS)
def test_hooks_are_there_to_be_called(name):
    module, function = doctor.HOOKS[name][0].partition("(")[0].split(".")
    home = importlib.import_module(f"qla_kernels.integrations.{module}")
    assert callable(getattr(home, function))


def test_plug_ins_of_engines_say_version_and_switch(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    known = {engine: names[0] for engine, names in engines.KNOWN.items()}
    plug_in = {"vllm": engines.plug_in_of_vllm, "sglang": engines.plug_in_of_sglang}
    assert [*plug_in.values()] == [*engines.PLUG_INS.values()]
    for engine, (only, *_) in engines.KNOWN.items():
        assert plug_in[engine]() == f"not installed; the plug-in works with {only}"
    versions |= known
    assert plug_in["vllm"]().endswith("a known version; VLLM_PLUGINS is not set: off")
    assert plug_in["sglang"]().endswith("and --linear-attn-decode-backend qla")
    for value, switch in (("other,qla_kernels", "on"), ("qla", "off")):
        monkeypatch.setenv("VLLM_PLUGINS", value)
        assert plug_in["vllm"]().endswith(f"VLLM_PLUGINS is {value!r}: {switch}")
    versions["vllm"] = "0.99.1"
    said = plug_in["vllm"]()
    assert said.startswith("0.99.1 is installed; refused: qla_kernels: vllm 0.99.1; need")
    assert set(engines.PLUG_INS) <= set(doctor.report()["paths"])


def test_a_probe_that_fails_reports_itself_and_stops_no_other():
    def broken():
        raise RuntimeError("bad driver")

    found = doctor._probed({"first": broken, "second": lambda: 2})
    assert found == {"first": "unknown (RuntimeError: bad driver)", "second": 2}


@pytest.mark.parametrize(
    ("family", "op", "sizes"),
    [
        ("gdn", "chunk_gated_delta_rule", f", {HEAD_SIZES}"),
        ("conv", "causal_conv1d", ""),
        ("dualkv", "shared_prefix_attention", ", head size 64, 128 or 256"),
        ("sparse_ring", "sparse_attention", ", head size 64 or 128"),
    ],
)
def test_cuda_path_is_what_refusal_says(monkeypatch, family, op, sizes):
    answer = doctor._cuda_path(family)
    said = answer()
    monkeypatch.setattr(device, "available", lambda: True)
    monkeypatch.setattr(device, "capability", lambda _: (8, 0))
    ampere = answer()
    assert ampere.startswith(f"refused: {op}: device capability 8.0")
    monkeypatch.setattr(device, "capability", lambda _: (9, 0))
    assert answer() == f"our kernels{sizes}"
    assert said != ampere


@pytest.mark.parametrize(
    ("versions", "answer"),
    [
        ({"torch": "2.13.0+cpu", "tilelang": "0.1.15", "nvcc": "release 13.0, V13.0.88"}, "yes"),
        ({"torch": "2.11.0", "tilelang": "0.1.15", "nvcc": "release 13.0, V13.0.1"}, "yes"),
        ({"torch": "2.1.0", "tilelang": "0.1.15", "nvcc": "release 13.0"}, "no: torch 2.1.0"),
        ({"torch": "2.13.0", "tilelang": "0.1.150", "nvcc": "release 13.0"}, "no: tilelang 0.1.1"),
        ({"torch": "2.13.0", "tilelang": "None", "nvcc": "unknown (x)"}, "no: tilelang None"),
    ],
)
def test_tested_versions(versions, answer):
    assert doctor.tested(versions).startswith(answer)


def test_tested_versions_are_the_constraints():
    pins = "".join((ROOT / "constraints" / f"{name}.txt").read_text() for name in ("tested", "cpu"))
    (tilelang,) = re.findall(r"^tilelang==(.*)$", pins, re.M)
    (torch,) = re.findall(r"^torch==(.*)$", pins, re.M)
    answer = doctor.tested({"torch": torch, "tilelang": tilelang, "nvcc": "release 13.0"})
    assert answer == "yes"


def test_rivals_are_pinned_to_versions_of_records():
    lines = (ROOT / "constraints" / "rivals.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert set(pins) == {names[0] for names in doctor.RIVALS.values()}
    measured = "".join(file.read_text() for file in (ROOT / "benchmarks/results").glob("*.jsonl"))
    for version in pins.values():
        assert re.search(rf'"{re.escape(version)}(\+\w+)?"', measured), version


def test_rivals_are_looked_up_without_importing_them(tmp_path, monkeypatch):
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('built for another torch')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor._rival("flash_attn.cute")() == "not installed"
    (package / "cute").mkdir()
    assert doctor._rival("flash_attn.cute")() == "installed, version unknown"


def test_fingerprints_follow_generated_code_alone(monkeypatch):
    """Host code, comments and names of files make no record stale."""
    before = {family: doctor.fingerprint(family) for family in doctor.families()}
    changed = digests.recorded() | {"attn.delta-bf16": "another"}
    monkeypatch.setattr(digests, "recorded", lambda: changed)
    after = {family: doctor.fingerprint(family) for family in doctor.families()}
    assert after["gdn"] == before["gdn"]
    assert after["dualkv"] != before["dualkv"]
    assert after["sparse_ring"] != before["sparse_ring"]
