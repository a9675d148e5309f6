"""Segments at K = 256 on a GPU: as exact as whole sequences, the same bits each time, no syncs."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn import api, plan
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.launch import segments
from qla_kernels.gdn.launch.tensors import chunk_table
from qla_kernels.gdn.launch.wide_forward import solve_score
from qla_kernels.gdn.launch.wide_segments import wide_maps, wide_scan, wide_windows
from qla_kernels.gdn.plan import WARM_LOG_BOUND
from qla_kernels.lab.selftest.gdn_calls import Call
from qla_kernels.lab.selftest.gdn_forward import check, exact
from qla_kernels.lab.selftest.gdn_segments import SegmentedCall, batch
from qla_kernels.lab.selftest.gdn_wide_segments import cut_forward
from qla_kernels.runtime import programs
from tests.compare import assert_close, relative_l2
from tests.gdn_calls import gradients, leaves, on_gpu

pytestmark = pytest.mark.hopper

GPU = "cuda"
NEVER = -math.inf
RATIO, FP32 = 1.2, 1e-5  # of the error of whole sequences
LENGTHS = ([4096], [3000, 0, 65, 1100], [20, 2048])


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a function with plans that cut nothing."""

    def run(function: Callable[..., Any], *given: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(plan, "WIDE_GAIN", 0.0)
            patch.setenv("QLA_PROGRAMS", "0")
            programs.forget()  # so that it is read: to record a call, it is planned again
            plan.forward.cache_clear()
            done = function(*given)
        plan.forward.cache_clear()
        programs.forget()
        return done

    programs.forget()

    return run


def wide_call(lengths: list[int] | None = None, V: int = 128, **others: Any) -> Call:
    """Every other head keeps what it has; the rest lose a tenth of it in ten tokens."""
    x = on_gpu(lengths, **{"heads": (2, 4), "sizes": (256, V), **others})
    x["g"] = torch.rand_like(x["g"]) * -0.02
    x["g"][..., ::2] = 0
    return x


@pytest.mark.parametrize("limit", [WARM_LOG_BOUND, NEVER])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_cut_beside_fp64(lengths, width, limit):
    x = wide_call(lengths)
    done = cut_forward(x, 4, limit, width)
    check(x, done.o, done.final_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", [64, 192, 512])
def test_dtypes_and_columns(dtype, V):
    x = wide_call([1000, 500], V, dtype=dtype)
    done = cut_forward(x, 3)
    check(x, done.o, done.final_state)


@pytest.mark.parametrize("key", ["unit", "low rank"])
def test_32_segments_that_forget_nothing(key):
    x = batch([32 * 128], heads=(1, 2), sizes=(256, 128), gate="none", key=key, device=GPU)
    given = {n: y for n, y in zip(x._fields, x, strict=True) if n != "h0"}
    call = given | {"initial_state": x.h0}
    want = exact(call)[1]
    uncut, cut = (cut_forward(call, most, NEVER) for most in (64, 2))
    for head in range(2):
        limit = RATIO * relative_l2(uncut.final_state[:, head].cpu(), want[:, head].cpu()) + FP32
        got = cut.final_state[:, head].cpu()
        assert_close(f"head {head}", got, want[:, head].cpu(), limit)


def test_a_sequence_in_two_segments_has_the_bits_of_the_whole_one():
    x = wide_call([4000, 1000], 256)
    want = cut_forward(x, 100, NEVER)
    for width in (64, 128) * 10:
        done = cut_forward(x, 40, NEVER, width)
        assert torch.equal(done.o, want.o)
        assert torch.equal(done.final_state, want.final_state)


def test_every_forward_gives_the_same_bits():
    x = wide_call([7000, 1200], 256, heads=(2, 8))
    want = cut_forward(x, 5)
    for _ in range(100):
        got = cut_forward(x, 5)
        assert torch.equal(got.o, want.o)
        assert torch.equal(got.final_state, want.final_state)


def launched(x: SegmentedCall, between: Callable[[], None]) -> Tensor:
    """The start states of segments of five chunks; calls `between` launches."""
    q, k, v, g, beta, h0, bounds = x
    cut = segments.cut(g, bounds, 5)
    between()
    table = chunk_table(q.shape[1], cut.bounds)
    saved = torch.empty_like(g), q.new_empty(*g.shape, 64)
    between()
    _, gates = solve_score(q, k, g, beta, 1.0, table, saved)
    between()
    windows = wide_windows(k, saved[0], beta, cut, WARM_LOG_BOUND)
    between()
    found = wide_maps(k, v, saved[1], gates, table.first_chunk, h0, cut, windows)
    between()
    return wide_scan(found, h0, cut.first_segment)[: int(cut.first_segment[-1])]


def test_kernels_that_begin_early_find_what_they_read():
    """100 batches, each with and without waiting for every kernel before the next is launched."""
    x = batch([3000, 1096], heads=(2, 4), sizes=(256, 128), padding=0, device=GPU)
    x.g[..., ::2] = 0
    for _ in range(100):
        x.k.copy_(torch.nn.functional.normalize(torch.randn_like(x.k), dim=-1))
        for y in (x.v, x.h0):
            y.normal_()
        got = launched(x, lambda: None)
        assert torch.equal(got, launched(x, torch.cuda.synchronize))


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"warm_log_bound": NEVER}], ids=str)
@pytest.mark.parametrize("v_first", [False, True])
def test_a_long_call_is_cut_and_as_exact_as_whole(options, v_first, whole, monkeypatch):
    """By the plan, as users call it: 2 heads, one sequence of 16384 tokens, beside fp64."""
    x = wide_call(batch=1, tokens=16384, heads=(1, 2), state_v_first=v_first)
    planned = []
    found = launch.planned
    monkeypatch.setattr(launch, "planned", lambda *y: planned.append(found(*y)[0]) or found(*y))

    def run() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return chunk_gated_delta_rule(**x, **options, output_final_state=True)

    got, uncut = run(), whole(run)
    assert [plan.segment_chunks is None for plan in planned] == [False, True]
    want = exact({**x, "scale": None})
    turned = [(o, s.mT if v_first else s) for o, s in (got, uncut)]
    for i, name in enumerate(("o", "final state")):
        for head in range(2):
            of = [y[i].select(2 - i, head).cpu() for y in (*turned, want)]
            limit = RATIO * relative_l2(of[1], of[2]) + FP32
            assert_close(f"{name} of head {head}", of[0], of[2], limit)


def test_gradients_after_a_forward_that_was_cut(whole):
    """The backward runs over whole sequences, from A and gates of the forward."""
    x = wide_call([12000, 0, 4384], 64, heads=(1, 2), padding=0)
    x["cu_seqlens_cpu"] = x["cu_seqlens"].cpu()

    def both() -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        inputs = leaves(x)
        outputs = chunk_gated_delta_rule(**inputs, output_final_state=True)
        return outputs, gradients(outputs, inputs)

    (got, got_grads), (want, want_grads) = both(), whole(both)
    for a, b in zip(got, want, strict=True):
        assert_close("output", a.detach(), b.detach(), 5e-3)
    for name, gradient in want_grads.items():  # o and final states are not read by the backward
        assert torch.equal(got_grads[name], gradient), name


def test_a_graph_follows_new_lengths_without_a_sync():
    x = wide_call([8192, 8192], 64, heads=(1, 1), padding=0)

    def run() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return chunk_gated_delta_rule(**x, output_final_state=True)

    for _ in range(3):
        run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    for lengths in ([8192, 8192], [1, 16383], [0, 10000], [16000, 384]):
        x["cu_seqlens"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        for y in replayed:
            y.fill_(torch.nan)
        graph.replay()
        for got, want in zip(replayed, run(), strict=True):
            assert torch.equal(got, want)
        assert replayed[1].isfinite().all()


def test_calls_are_replayed_with_the_same_bits():
    x = wide_call(batch=1, tokens=16384, heads=(1, 2))

    def run() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return chunk_gated_delta_rule(**x, output_final_state=True)

    want, before = run(), api.CALLS.replays()
    for _ in range(5):
        for got, wanted in zip(run(), want, strict=True):
            assert torch.equal(got, wanted)
    assert api.CALLS.replays() > before
