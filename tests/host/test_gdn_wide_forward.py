"""K = 256: the plans, the refusals, and what CPU tensors compute."""

import math
from types import SimpleNamespace

import pytest
import torch

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn import plan, times
from qla_kernels.gdn.launch.forward import planned
from qla_kernels.gdn.lengths import cut_lengths, num_items
from qla_kernels.gdn.plan import EXACT_LOG_BOUND, WARM_LOG_BOUND
from qla_kernels.gdn.validate import refusal
from qla_kernels.lab.selftest.gdn_calls import definition, records, small
from tests.compare import assert_close

SMS = 132


def of_shape(heads: int, V: int) -> times.Shape:
    return heads, 256, V, SMS


def width(sequences: int, heads: int, V: int = 512) -> int:
    return plan.wide(sequences, heads, V, SMS).kernel.tile_v


def test_few_sequences_get_narrow_ctas_and_many_wide_ones():
    assert width(1, 6) == 64  # 48 CTAs, where 128 columns would leave 24
    assert width(4, 6) == 128
    assert width(8, 6) == 64  # 3 waves take less time than 2 of 128 columns
    assert width(11, 6) == 128
    assert width(8, 6, 64) == 64
    assert width(8, 6, 192) == 64  # 192 is no multiple of 128


def test_a_plan_gives_A():
    for tokens in (64, 32768):
        assert not plan.forward(((tokens // 64, 1),), of_shape(6, 512)).solves
    assert plan.wide(1, 16, 256, SMS).segment_chunks is None  # what ranks and trees take


# of 64 tokens, and how many sequences; value heads; V
CUT = ((512, 1, 6, 512), (1024, 1, 6, 512), (512, 1, 2, 512), (512, 1, 16, 256), (512, 2, 1, 64))
WHOLE = (
    *((64, 1, 6, 512), (96, 1, 6, 512), (16, 1, 1, 64)),  # few chunks
    *((128, 4, 6, 512), (512, 1, 16, 512), (512, 1, 32, 256), (512, 8, 8, 128)),  # full
)


def predicted(
    chunks: int, count: int, heads: int, V: int, bound: float = WARM_LOG_BOUND
) -> tuple[plan.Plan, float]:
    """Returns the plan, and the time of whole sequences over its time."""
    given = ((chunks, count),), of_shape(heads, V)
    found, whole = plan.forward(*given, bound), plan.wide(count, heads, V, SMS)
    return found, plan.expected(whole, *given) / plan.expected(found, *given)


@pytest.mark.parametrize("bound", [WARM_LOG_BOUND, EXACT_LOG_BOUND, -math.inf])
@pytest.mark.parametrize("shape", CUT, ids=str)
def test_few_heads_and_many_chunks_are_cut(shape, bound):
    found, gain = predicted(*shape, bound)
    if found.segment_chunks is None:  # half of the SMs, and long windows: too little gain
        assert shape == (512, 1, 16, 256)
        assert bound < WARM_LOG_BOUND
    else:
        assert gain > 1 / plan.WIDE_GAIN
        assert found.warm_log_bound in (bound, -math.inf)


@pytest.mark.parametrize("shape", WHOLE, ids=str)
def test_few_chunks_and_a_full_gpu_stay_whole(shape):
    found, gain = predicted(*shape)
    assert found == plan.wide(shape[1], *shape[2:], SMS)
    assert gain == 1


def test_one_long_sequence_of_the_default_layer_gains_half_or_more():
    _, gain = predicted(512, 1, 6, 512)
    assert gain > 1.5


@pytest.mark.parametrize("shape", CUT, ids=str)
def test_a_cut_loses_little_if_no_head_forgets(shape):
    chunks, count, heads, V = shape
    given = ((chunks, count),), of_shape(heads, V)
    found = plan.forward(*given)
    whole = plan.forward_time(plan.wide(count, heads, V, SMS), *given)
    assert plan.forward_time(found, *given, 1.0) <= plan.WIDE_LOSS * whole


def test_segments_fill_the_gpu_in_whole_waves():
    for tokens in (32768, 65536, 131072):
        found, _ = predicted(tokens // 64, 1, 6, 512)
        pieces = cut_lengths(((tokens // 64, 1),), found.segment_chunks)
        ctas = 6 * 512 // found.kernel.tile_v * num_items(pieces)
        assert ctas % SMS == 0 or ctas % SMS > SMS / 2


def test_a_pack_is_cut_by_its_lengths():
    """One long sequence among short ones; of equal lengths the same tokens stay whole."""
    assert plan.forward(((4, 8), (512, 1)), of_shape(2, 512)).segment_chunks is not None
    assert plan.forward(((61, 9),), of_shape(2, 512)).segment_chunks is None


def test_maps_take_columns_that_divide_V():
    for V in range(64, 513, 64):
        assert V % times.map_tile(V) == 256 % times.map_tile(V) == 0
    assert set(times.WIDE_MAP_STEP) == set(times.WIDE_STEP) == {64, 128}


@pytest.mark.parametrize("batch", [1, 40])
def test_without_auto_cp_the_width_does_not_depend_on_the_batch(batch, monkeypatch):
    monkeypatch.setattr("qla_kernels.runtime.device.sm_count", lambda _: SMS)
    x = small(batch=batch, tokens=2, sizes=(256, 256), initial_state=None)
    found, _ = planned(*records(x, auto_cp=False))
    assert found.kernel.tile_v == 128


def test_without_auto_cp_nothing_is_cut(monkeypatch):
    monkeypatch.setattr("qla_kernels.runtime.device.sm_count", lambda _: SMS)
    x = small(batch=1, tokens=32768, heads=(1, 1), sizes=(256, 64), initial_state=None)
    assert planned(*records(x))[0].segment_chunks is not None
    assert planned(*records(x, auto_cp=False))[0].segment_chunks is None
    exact, _ = planned(*records(x, warm_log_bound=EXACT_LOG_BOUND))
    assert exact.warm_log_bound in (EXACT_LOG_BOUND, -math.inf)


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
