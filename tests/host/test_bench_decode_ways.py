"""benchmarks/serving/decode_ways.py, but for what a GPU says: times, and results of kernels."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.timing import CpuTimer
from benchmarks.serving import decode_ways, engines
from benchmarks.serving.engines import VLLM
from benchmarks.serving.workloads import DECODE, PoolDecode
from qla_kernels import jit
from qla_kernels.gdn.decode import launch
from qla_kernels.gdn.kernels import recurrent
from tests.host import serving_stand_ins as theirs

FEW = PoolDecode((2, 4), 16, sequences=17)
VARIANT = recurrent.Variant("bfloat16", 128, "float32")
CALL = VARIANT, 256, 256, 256 * 64  # tokens, sequences, CTAs
SHARED = 228 * 1024


def in_force():
    """Room of a large call, and what becomes of the kernel."""
    plan = recurrent.schedule(VARIANT)
    return launch.room(*CALL), plan.ctas_per_sm, recurrent.SOURCE


@pytest.mark.parametrize(
    ("name", "resident", "by_registers", "in_rows"),
    [
        ("four", 4, 4, False),
        ("plan", 4, 4, False),
        ("three", 3, 4, False),
        ("two", 2, 4, False),
        ("by_registers", 3, 3, False),
        ("rows", 4, 4, True),
        ("rows_three", 3, 4, True),
    ],
)
def test_a_way_is_in_force_and_then_is_not(name, resident, by_registers, in_rows, monkeypatch):
    before = in_force()
    with decode_ways.way(name) as who:
        room, by_code, source = in_force()
        assert who.name == "ours"
    assert in_force() == before
    used = recurrent.schedule(VARIANT).smem_bytes + room + 1024
    assert min(by_code, SHARED // used) == resident
    assert by_code == by_registers
    assert (source != recurrent.SOURCE) == in_rows
    assert set(decode_ways.WAYS) == {
        "four",
        "plan",
        "three",
        "two",
        "by_registers",
        "rows",
        "rows_three",
    }


def test_a_kernel_is_compiled_anew_for_each_way(monkeypatch):
    cleared = []
    monkeypatch.setattr(jit, "compile", SimpleNamespace(cache_clear=lambda: cleared.append(1)))
    with decode_ways.way("rows"):
        assert len(cleared) == 1
    assert len(cleared) == 2


def test_all_ways_are_checked_and_timed(monkeypatch):
    monkeypatch.setattr(engines, "function", theirs.engine_function)
    names = [*decode_ways.WAYS, *decode_ways.ENGINES]
    cpu = torch.device("cpu")
    found = decode_ways.measured(decode_ways.timers(names, FEW, cpu, CpuTimer), 1, 0.0)
    assert len(found) == len(names)
    assert min(found) > 0
    wrong = _Wrong()
    monkeypatch.setitem(decode_ways.ENGINES, "vllm", wrong)
    with pytest.raises(RuntimeError, match="vllm of gdn-pool-decode-2x4-17of1: o is off by"):
        decode_ways.timers(["vllm"], FEW, cpu, CpuTimer)


class _Wrong(VLLM):
    def prepare(self, workload, inputs):
        call = super().prepare(workload, inputs)
        return replace(call, run=lambda: call.run() * 1.1)


def test_rows_are_rows_of_the_benchmark():
    rows = [w for w in DECODE if w.name.removeprefix("gdn-pool-decode-") in decode_ways.ROWS]
    assert len(rows) == len(decode_ways.ROWS)
