"""The static gate can fail: it refuses each way of breaking a sound kernel and names the fault."""

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tilelang", reason="kernel files import TileLang")

from qla_kernels.lab import inspect
from qla_kernels.lab.inspect import sass
from qla_kernels.lab.inspect.command import main
from qla_kernels.lab.inspect.gather import Facts
from qla_kernels.runtime import jit
from tests.static import broken, broken_rows
from tests.static.one_unit import one_unit

pytestmark = pytest.mark.usefixtures("disassembler")


@cache
def compile_together(sample: Any) -> None:
    """Keeps facts on disk; nvcc reads its headers once for all variants.

    Warnings of ptxas are about all that it assembles: a variant that has one is left out.
    """
    kernel = sample.kernel("", *(d for d, text in sample.DEFECTS.items() if text != "ptxas: "))
    with one_unit(kernel, kernel.module.VARIANTS):
        for variant in kernel.module.VARIANTS:
            inspect.facts(kernel, variant)


def facts_of(defect: str, sample: Any = broken) -> tuple[Facts, list[str]]:
    compile_together(sample)
    kernel = sample.kernel(defect)
    (variant,) = kernel.module.VARIANTS
    facts = inspect.facts(kernel, variant)
    return facts, inspect.check(facts, kernel.module.schedule(variant))


@pytest.fixture(scope="module")
def sound() -> Facts:
    facts, violations = facts_of("")
    assert violations == []
    return facts


@pytest.mark.parametrize("defect", broken.DEFECTS)
def test_refuses(defect: str) -> None:
    _, violations = facts_of(defect)
    assert any(broken.DEFECTS[defect] in violation for violation in violations), violations


@pytest.mark.parametrize("defect", broken_rows.DEFECTS)
def test_refuses_in_a_block_of_rows(defect: str) -> None:
    _, violations = facts_of(defect, broken_rows)
    assert any(broken_rows.DEFECTS[defect] in violation for violation in violations), violations


def test_reads_a_block_of_rows() -> None:
    facts, violations = facts_of("", broken_rows)
    assert violations == facts.unchecked == []
    assert facts.threads == 384
    assert facts.barriers == {"ab_full": [1, 1], "ab_free": [256, 256], "c_full": [128, 128]}
    twins, load = facts.roles["twins"], facts.roles["load"]
    assert twins.arrives == {"ab_free": 256, "c_full": 256}
    assert load.arrives == {"ab_full": 1}
    assert (twins.units, load.units) == (["wgmma"], ["tma_load"])
    assert facts.named_barriers["(computed, 256)"].roles == {"twins": 256}
    assert facts.named_barriers["8"].roles == {"twins": 128}  # the others by a computed number


def test_reads_a_sound_kernel(sound: Facts) -> None:
    assert (sound.threads, sound.registers) == (384, broken.LAUNCH_REGISTERS)
    assert sound.barriers == {"ab_full": [1, 1], "ab_free": [256, 256]}
    assert list(sound.roles) == ["upper", "lower", "load", "spare"]
    upper, load = sound.roles["upper"], sound.roles["load"]
    assert upper.waits == {"ab_full": 128}
    assert upper.arrives == {"ab_free": 128}
    assert [tuple(entry) for entry in upper.set_max_nreg] == [("alloc", 216, 128)]
    assert upper.instructions["HGMMA"] > 0
    assert upper.units == ["wgmma"]
    assert 32 < upper.top_register < 216  # 32 accumulators and more
    assert load.units == ["tma_load"]
    assert load.arrives == {"ab_full": 1}
    assert load.top_register < 24
    assert sound.roles["spare"].waits == {}
    assert set(sound.named_barriers) == {"0", "8", "9"}
    names = [name for name, _ in upper.order]
    assert names.index("WARPGROUP.ARRIVE") < names.index("HGMMA")


def altered(sound: Facts, **changes: Any) -> list[str]:
    return inspect.check(replace(deepcopy(sound), **changes), broken.schedule(broken.Variant()))


def test_rules_that_no_sample_breaks(sound: Facts) -> None:
    said = altered(sound, threads=256)
    assert "256 threads a CTA; the schedule's roles have 384" in said
    said = altered(sound, barriers={"ab_full": [1, 1]})
    assert "barrier ab_free: in the schedule, not in the code" in said
    (said_once,) = altered(sound, dynamic_smem=sound.dynamic_smem + 1024)
    assert "82944 B dynamic + 1024 B static = 83968 B; the schedule says 82944 B" in said_once
    (said_once,) = altered(sound, registers=128)
    assert "roles ask for 58368, a CTA starts with 128 x 384 = 49152" in said_once


def test_wrong_direction_of_set_max_nreg(sound: Facts) -> None:
    roles = deepcopy(sound.roles)
    roles["load"].set_max_nreg = [("alloc", 24, 32)]
    (said,) = altered(sound, roles=roles)
    assert said.startswith(
        "role load: set_max_nreg 24 as alloc; from 168 at launch it is a dealloc"
    )


def test_local_memory_without_spills(sound: Facts) -> None:
    roles = deepcopy(sound.roles)
    roles["upper"].instructions |= {"LDL": 4, "STL": 2}
    (said,) = altered(sound, roles=roles)
    assert said == "role upper: local memory (4 LDL, 2 STL): an array indexed at run time?"


def test_a_full_barrier_inside_a_role(sound: Facts) -> None:
    named = deepcopy(sound.named_barriers)
    named["0 (upper only)"] = inspect.NamedBarrierFacts([384], {"upper": 128})
    (said,) = altered(sound, named_barriers=named)
    assert said.startswith("named barrier 0 (upper only): for 384 threads, executed by upper (128")


def test_declared_spills_are_a_limit() -> None:
    facts, _ = facts_of("spills")
    declare = {"spill_reason": "the copy loop runs once"}
    schedule = broken.schedule(broken.Variant("spills"))
    enough = replace(schedule, spill_bytes=facts.spills, **declare)
    too_few = replace(schedule, spill_bytes=facts.spills - 1, **declare)
    assert not any("spills:" in violation for violation in inspect.check(facts, enough))
    assert any(f"{facts.spills - 1} B declared" in said for said in inspect.check(facts, too_few))


def test_facts_are_kept(sound: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled_again(*_: object) -> None:
        raise AssertionError("the second look should come from disk")

    monkeypatch.setattr(jit, "lower", compiled_again)
    again, violations = facts_of("")
    assert violations == []
    assert again == Facts.from_json(json.dumps(sound, default=vars))


def test_without_a_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "nvdisasm", lambda: None)
    monkeypatch.setattr(sass, "nvdisasm_version", lambda: "none")
    facts, violations = facts_of("")
    assert violations == []
    (missing,) = facts.unchecked
    assert "not checked; pip install nvidia-cuda-nvdisasm" in missing


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["gdn.kkt_solve", "--variant", "bf16-k128", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["function"] == "gdn_kkt_solve_bf16_k128_kernel"
    assert record["violations"] == []
    options = ["gdn.kkt_solve", "--variant", "bf16-k128", "--order", "--dump"]
    assert main([*options, str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "highest named R" in said
    assert "x HGMMA" in said
    (folder,) = tmp_path.iterdir()
    kept = {file.name for file in folder.iterdir()}
    assert kept == {"kernel.cu", "kernel.cubin", "kernel.sass", "ptxas.txt"}


def test_command_line_refuses_an_unknown_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gdn.no_such_kernel"]) == 2
    assert "gdn.kkt_solve" in capsys.readouterr().out
