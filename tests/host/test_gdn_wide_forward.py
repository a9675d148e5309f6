"""K = 256: the plan, the refusals, and what CPU tensors compute."""

from types import SimpleNamespace

import pytest
import torch

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn import heuristics, plan
from qla_kernels.gdn.launch.forward import planned
from qla_kernels.gdn.validate import refusal
from qla_kernels.selftest.gdn_calls import definition, records, small
from tests.compare import assert_close

SMS = 132


def width(sequences: int, heads: int, V: int = 512) -> int:
    return plan.wide(sequences, heads, V, SMS).kernel.tile_v


def test_few_sequences_get_narrow_ctas_and_many_wide_ones():
    assert width(1, 6) == 64  # 48 CTAs, where 128 columns would leave 24
    assert width(8, 6) == 128
    assert width(8, 6, 64) == 64
    assert width(8, 6, 192) == 64  # 192 is no multiple of 128


def test_a_plan_leaves_sequences_whole_and_gives_A():
    found = plan.wide(1, 16, 256, SMS)
    assert found.segment_chunks is None
    assert not found.solves


@pytest.mark.parametrize("batch", [1, 40])
def test_without_auto_cp_the_width_does_not_depend_on_the_batch(batch, monkeypatch):
    monkeypatch.setattr("qla_kernels.device.sm_count", lambda _: SMS)
    x = small(batch=batch, tokens=2, sizes=(256, 256), initial_state=None)
    found, _ = planned(*records(x, auto_cp=False))
    assert found.kernel.tile_v == 128


def test_every_width_has_a_predicted_step():
    assert set(heuristics.WIDE_STEP) == {64, 128}


def test_anchors_refuse_it_on_a_gpu_and_ranks_and_trees_do_not():
    q = torch.empty(1, 8, 2, 256, dtype=torch.bfloat16, device="meta")
    x = q[..., :128]
    assert refusal(q, q, x, anchored=True) is None  # any size on a CPU
    text = refusal(q, q, x, anchored=True, op="pool", capability=(9, 0))
    assert text == (
        "pool: head dimension K=256; need less than 256 for this function; "
        "use chunk_gated_delta_rule and fused_recurrent_gated_delta_rule"
    )
    assert refusal(x, x, x, anchored=True, capability=(9, 0)) is None
    ranks = SimpleNamespace(layout="contiguous")  # FLA asks before it hands a call over
    for keys in (q, x):
        assert refusal(keys, keys, x, cp_context=ranks, capability=(9, 0)) is None
    assert refusal(q, q, x, capability=(9, 0)) is None


def test_cpu_tensors_compute_it():
    x = small([70, 0, 3], torch.float64, sizes=(256, 64), padding=0)
    o, state = chunk_gated_delta_rule(**x, output_final_state=True)
    want_o, want_state = definition(x)
    assert_close("o", o, want_o, 1e-6)
    assert_close("final state", state, want_state, 1e-6)
