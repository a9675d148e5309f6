"""Sequences in segments on a GPU: what whole ones give, the same bits each time, no syncs."""

import math

import pytest
import torch
from torch import Tensor

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn import bands, plan
from qla_kernels.gdn.launch import chains as launch_chains
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.launch import segments
from qla_kernels.gdn.plan import WARM_LOG_BOUND
from qla_kernels.lab.selftest.gdn_segment_plan import sequence_chunks_of
from qla_kernels.lab.selftest.gdn_segments import (
    GIVEN,
    SOLVING,
    SegmentedCall,
    batch,
    expected,
    run,
    whole,
)
from qla_kernels.runtime.varlen import chunk_table
from tests.compare import assert_close, relative_l2
from tests.gdn_calls import gradients, leaves, on_gpu

pytestmark = pytest.mark.hopper

GPU = "cuda"
NEVER = -math.inf
RATIO = 1.2  # of the error of whole sequences, which is that of 16-bit operands
FP32 = 1e-5


def mild(x: SegmentedCall) -> SegmentedCall:
    """Every other head keeps what it has; the rest lose a tenth of it in ten tokens."""
    g = torch.rand_like(x.g) * -0.02
    g[..., ::2] = 0
    return x._replace(g=torch.where(x.g.isnan(), torch.nan, g))


def compare(name: str, got: Tensor, want: Tensor, uncut: Tensor) -> None:
    for head in range(want.shape[1]):
        limit = RATIO * relative_l2(uncut[:, head].cpu(), want[:, head]) + FP32
        assert_close(f"{name} of head {head}", got[:, head].cpu(), want[:, head], limit)


def backward_chains(x: SegmentedCall, do: Tensor, most: int | None) -> tuple[Tensor, ...]:
    """The states before and the gradients after each chunk; whole sequences where most is None."""
    g_cum, A = launch.kkt_solve(x.k, x.g, x.beta, x.cu_seqlens)
    bounds, h0, ends, scale = x.cu_seqlens, x.h0, x.h0, x.q.shape[-1] ** -0.5
    if most is not None:
        cut = segments.cut(x.g, x.cu_seqlens, most)
        found = segments.maps(x.k, x.v, g_cum, x.beta, A, h0, cut, WARM_LOG_BOUND)
        ends = segments.end_gradients(
            x.q, x.k, do, g_cum, x.beta, A, ends, scale, found, cut, WARM_LOG_BOUND
        )
        h0, bounds = segments.start_states(found, h0, cut), cut.bounds
    first_chunk = chunk_table(x.q.shape[1], bounds).first_chunk
    h = launch_chains.chunk_states(x.k, x.v, g_cum, x.beta, A, h0, bounds, first_chunk)
    dS = launch_chains.dstate_chain(
        x.q, x.k, do, g_cum, x.beta, A, ends, scale, bounds, first_chunk
    )
    num_chunks = int((-(-x.cu_seqlens.diff() // 64)).sum())
    return h[:num_chunks], dS[:num_chunks]


@pytest.mark.parametrize("limit", [WARM_LOG_BOUND, NEVER])
@pytest.mark.parametrize("kernel", [GIVEN, SOLVING])
@pytest.mark.parametrize(
    ("lengths", "most"), [([4096], 2), ([3000, 0, 65, 1100], 4), ([20, 2048], 7)]
)
def test_cut_is_whole(lengths, most, kernel, limit):
    x = mild(batch(lengths, heads=(2, 4), device=GPU))
    want, got, (o, final) = expected(x), run(x, most, limit, kernel), whole(x)
    live = slice(None, sum(lengths))
    compare("o", got.o[0, live], want.o[0, live], o[0, live])
    compare("final state", got.final, want.final_state, final)
    assert not got.o[:, live.stop :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128])
def test_dtypes_and_sizes(dtype, size):
    x = mild(batch([1000, 500], dtype, heads=(2, 4), sizes=(size, 128), device=GPU))
    want, got, (_, final) = expected(x), run(x, 3, WARM_LOG_BOUND), whole(x)
    compare("final state", got.final, want.final_state, final)


@pytest.mark.parametrize("key", ["unit", "low rank"])
def test_32_segments_that_forget_nothing(key):
    x = batch([32 * 256], heads=(1, 2), gate="none", key=key, device=GPU)
    got, (_, final) = run(x, 4, WARM_LOG_BOUND), whole(x)
    assert len(got.begins) == 32
    compare("final state", got.final, expected(x).final_state, final)


@pytest.mark.parametrize("kernel", [GIVEN, SOLVING])
def test_every_forward_gives_the_same_bits(kernel):
    x = mild(batch([7000, 1200], heads=(2, 8), device=GPU))
    want = run(x, 5, WARM_LOG_BOUND, kernel)
    for _ in range(100):
        got = run(x, 5, WARM_LOG_BOUND, kernel)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("kernel", "grows"), [(GIVEN, False), (GIVEN, True), (SOLVING, False)], ids=str
)
def test_kernels_that_begin_early_find_what_they_read(kernel, grows):
    """200 batches, each with and without waiting for every kernel before the next is launched."""
    x = mild(batch([3000, 1096], heads=(2, 8), padding=0, device=GPU))
    for _ in range(200):
        for y in (x.q, x.k):
            y.copy_(torch.nn.functional.normalize(torch.randn_like(y), dim=-1))
        for y in (x.v, x.h0):
            y.normal_()
        got = run(x, 5, WARM_LOG_BOUND, kernel, grows)
        want = run(x, 5, WARM_LOG_BOUND, kernel, grows, between=torch.cuda.synchronize)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_every_backward_gives_the_same_bits():
    x = mild(batch([7000, 1200], heads=(2, 8), device=GPU))
    do = torch.randn_like(x.v)
    want_chains = backward_chains(x, do, 5)
    for _ in range(100):
        chains = backward_chains(x, do, 5)
        assert all(torch.equal(a, b) for a, b in zip(chains, want_chains, strict=True))


@pytest.mark.parametrize(("lengths", "most"), [([4096], 2), ([3000, 0, 65, 1100], 4)])
def test_a_backwards_chains_over_segments_are_those_over_sequences(lengths, most):
    x = mild(batch(lengths, heads=(2, 4), device=GPU))
    do = torch.randn_like(x.v)
    for name, got, want in zip(
        ("h", "dS"), backward_chains(x, do, most), backward_chains(x, do, None), strict=True
    ):
        assert_close(name, got, want, 5e-3)


def test_a_graph_follows_new_lengths_without_a_sync():
    x = mild(batch([1024, 512], padding=0, device=GPU))
    g_cum, A = launch.kkt_solve(x.k, x.g, x.beta, x.cu_seqlens)

    def start_states() -> tuple[Tensor, segments.Segments]:
        cut = segments.cut(x.g, x.cu_seqlens, 3)
        found = segments.maps(x.k, x.v, g_cum, x.beta, A, x.h0, cut, WARM_LOG_BOUND)
        return segments.start_states(found, x.h0, cut), cut

    torch.cuda.set_sync_debug_mode("error")
    try:
        start_states()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        starts, cut = start_states()
    for lengths in ([1024, 512], [1, 1535], [0, 640], [768, 768]):
        x.cu_seqlens.copy_(torch.tensor([0, *lengths]).cumsum(0))
        for y, z in zip((g_cum, A), launch.kkt_solve(x.k, x.g, x.beta, x.cu_seqlens), strict=True):
            y.copy_(z)
        starts.fill_(torch.nan)
        graph.replay()
        want, again = start_states()
        assert all(torch.equal(a, b) for a, b in zip(cut, again, strict=True))
        num = int(cut.first_segment[-1])
        assert torch.equal(starts[:num], want[:num])
        assert starts[:num].isfinite().all()


@pytest.mark.parametrize("heads", [(2, 8), (4, 16), (8, 32)], ids=str)
def test_a_graph_takes_the_path_of_lengths_that_the_device_alone_knows(heads):
    """Of each new batch, with the bits of a call; known lengths give nearly the same."""
    alike = [4096] * 8
    x = on_gpu(alike, heads=heads, padding=0)
    x["g"] *= torch.linspace(0, 0.1, heads[1], device=GPU)
    weights = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    paths = bands.forward((8, sum(alike)), (heads[1], 128, 128, 132))

    def both(**known: Tensor) -> list[Tensor]:
        inputs = leaves({**x, **known})
        outputs = chunk_gated_delta_rule(**inputs, output_final_state=True)
        wanted = [y for y in inputs.values() if torch.is_tensor(y) and y.requires_grad]
        return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, wanted, weights))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        replayed = both()
    taken = set()
    ragged = [200, 10000, 6, 4000, 128, 8000, 2, 10432]
    for lengths in (alike, ragged, [30000, *[396] * 6, 392], alike):
        taken.add(plan.band_of(paths.bands, sequence_chunks_of(lengths)))
        x["cu_seqlens"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        for y in replayed:
            y.fill_(torch.nan)
        graph.replay()
        for got, want in zip(replayed, both(), strict=True):
            assert torch.equal(got, want)
        known = both(cu_seqlens_cpu=x["cu_seqlens"].cpu())
        for i, (got, want) in enumerate(zip(replayed, known, strict=True)):
            assert_close(f"result {i}", got, want, 1e-2)
    assert len(taken) > 1


@pytest.mark.parametrize("options", [{}, {"exact": True}], ids=str)
def test_a_kept_cache_and_known_lengths_change_no_gradient(options):
    """Both directions are cut: 4 heads, of which one forgets nothing, and 16384 tokens."""
    lengths = [12000, 0, 4384]
    x = on_gpu(lengths, heads=(2, 4), padding=0)
    x["g"] *= torch.tensor([0.0, 0.002, 0.02, 1.0], device=GPU)
    known = {**x, "cu_seqlens_cpu": x["cu_seqlens"].cpu(), "enable_fwd_cp_cache": True}
    found = []
    for call in ({**x, "enable_fwd_cp_cache": False}, known):
        inputs = leaves(call)
        outputs = chunk_gated_delta_rule(**inputs, **options, output_final_state=True)
        found.append((outputs, gradients(outputs, inputs)))
    (want, want_grads), (got, got_grads) = found
    for a, b in zip(got, want, strict=True):
        assert_close("output", a.detach(), b.detach(), 5e-3)
    for name, gradient in want_grads.items():
        assert_close(name, got_grads[name], gradient, 1e-2)
