"""constraints/versions.json agrees with everything else that names versions."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import records
from qla_kernels.integrations import engines
from scripts import versions
from tests.host import test_integrations_fla as fla

tomllib = pytest.importorskip("tomllib", reason="Python 3.11")

ROOT = Path(__file__).resolve().parents[2]
ROWS: dict[str, dict[str, Any]] = {row["name"]: row for row in versions.load()}
# a name in a record's versions, and the row that has to list it
RECORDED = {
    "torch": "PyTorch", "tilelang": "TileLang", "numpy": "numpy", "fla": "flash-linear-attention",
    "flash_qla": "FlashQLA", "flashinfer": "FlashInfer", "fa4": "flash-attn-4", "cudnn": "cuDNN",
}  # fmt: skip


def test_the_page_is_what_the_file_says():
    assert versions.DOCUMENT.read_text() == versions.document(), "run python scripts/versions.py"


def test_ranges_are_those_that_are_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["compile"], *extras["test"]]
    by_name = dict(re.fullmatch(r"([\w-]+)([^;]*).*", line).groups() for line in wanted)
    for row in ROWS.values():
        if "package" in row:
            assert by_name[row["package"]].strip() == row["needs"].replace("any", ""), row["name"]
    assert project["requires-python"] in f">={ROWS['Python']['needs']}"


def test_what_ci_installs_is_listed():
    pins = {}
    for name in ("tested.txt", "cpu.txt"):
        text = (ROOT / "constraints" / name).read_text()
        pins |= dict(re.findall(r"^([\w-]+)==(\S+)", text, re.M))
    for row in ROWS.values():
        pin = pins.get(row.get("package", row["name"]))
        assert pin is None or pin in row["cpu"], f"{row['name']} {pin}"
    assert {"torch", "tilelang", "transformers", "apache-tvm-ffi"} <= pins.keys()


def test_what_records_ran_with_is_listed():
    """If this fails, add the version to constraints/versions.json: it was tested now."""
    for run in records.load():
        if run.device_kind != "cuda":
            continue
        for name, version in run.versions.items():
            if name in RECORDED:
                assert version in ROWS[RECORDED[name]]["gpu"], f"{name} {version}"
        assert run.device in ROWS["GPU"]["gpu"]
        assert run.environment["driver"] in ROWS["NVIDIA driver"]["gpu"]
        python = ".".join(run.environment["python"].split(".")[:2])
        assert python in ROWS["Python"]["gpu"]


def test_the_constraints_of_the_records_are_what_they_ran_with():
    text = (ROOT / "constraints" / "gpu-records.txt").read_text()
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.M))
    runs = [run for run in records.load() if run.device_kind == "cuda"]
    assert {"torch", "tilelang"} <= runs[-1].versions.keys()
    for run in runs:
        for name in pins:
            assert run.versions.get(name, pins[name]) == pins[name], run.id
        assert run.environment["python"].startswith("3.12.")
        assert run.environment["cuda"] == "13.0"
    assert "Python 3.12" in text
    assert "CUDA 13.0" in text
    assert pins["apache-tvm-ffi"] in ROWS["apache-tvm-ffi"]["gpu"]
    assert len(pins) == 5
    assert runs


def test_what_integrations_know_is_listed():
    for name, engine in (("vLLM", "vllm"), ("SGLang", "sglang")):
        assert list(engines.KNOWN[engine]) == ROWS[name]["cpu"]
        assert ROWS[name]["needs"] == f"{engines.KNOWN[engine][0]} exactly"
    assert set(fla.VERSIONS) == set(ROWS["flash-linear-attention"]["cpu"])


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("integrations.md", ("transformers",)),
        ("dualkv.md", ("transformers",)),
        ("rl-trainers.md", ("TRL", "veRL")),
        ("serving.md", ("vLLM", "SGLang")),
    ],
)
def test_pages_name_listed_versions_alone(page, names):
    text = (ROOT / "docs" / page).read_text()
    for name in names:
        row = ROWS[name]
        for version in re.findall(r"\b\d+\.\d+\.\d+\b", text):
            known = {v for r in ROWS.values() for v in (*r["cpu"], *r["gpu"])}
            assert version in known, version
        assert any(version in text for version in row["cpu"]), name
