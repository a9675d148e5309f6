"""The forward of shared-prompt attention on a GPU: against fp64, and against torch's own."""

import gc

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from qla_kernels import SharedLayout, Unsupported, pack_shared_prompts, shared_prefix_attention
from qla_kernels.dualkv import ops
from qla_kernels.dualkv.ops import SharedForward
from qla_kernels.dualkv.shapes import HEAD_SIZES
from qla_kernels.lab.selftest.dualkv_forward import FOREST, LIMITS, SharedCall, call, check, wanted
from tests.compare import assert_close
from tests.dualkv_inputs import folded, grown

pytestmark = pytest.mark.hopper

DTYPES = (torch.bfloat16, torch.float16)
SIZES = pytest.mark.parametrize("size", [128, 256])


def forward(x: SharedCall) -> SharedForward:
    return SharedForward(*ops.dualkv_fwd(*x.arguments()))


def on_gpu(layout, heads=(2, 8), **others) -> SharedCall:
    return call(layout, heads, device="cuda", **others)


AROUND = [n + d for n in (32, 64, 80, 128, 160) for d in (-1, 0, 1)]


@SIZES
@pytest.mark.parametrize("prompt", [1, *AROUND])
def test_lengths_around_a_tile(prompt, size):
    x = on_gpu([(prompt, AROUND), (prompt, [1])], size=size)
    check(x, forward(x))


@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_query_heads_of_a_key_head(group, size):
    x = on_gpu([(150, [40, 200, 0, 1])], (2, 2 * group), size=size)
    check(x, forward(x))


@SIZES
def test_a_tree(size):
    x = on_gpu(SharedLayout.from_forest(*FOREST), size=size)
    check(x, forward(x))


@SIZES
def test_queries_of_the_responses_alone(size):
    whole = on_gpu([(140, [33, 5, 70])], size=size)
    x = whole._replace(q=whole.q[140:], q_shift=140)
    check(x, forward(x))


@SIZES
@pytest.mark.parametrize("changed", [{"spread": 50.0}, {"spread": 0.0}, {"scale": 0.5}], ids=str)
def test_scores_of_any_size(changed, size):
    x = on_gpu([(300, [100, 30])], size=size, **changed)
    check(x, forward(x))


@SIZES
def test_offsets_past_2_to_the_31(size):
    """The last group lies behind 2^31 elements of q and of o."""
    last = [(400, [150])]
    layout = SharedLayout.from_lengths([(1024, [])] * 257 + last, device="cuda")
    q, k, v = (
        torch.randn(layout.num_tokens, heads, size, device="cuda", dtype=torch.bfloat16)
        for heads in (8192 // size, 1, 1)
    )
    assert q[:-550].numel() > 2**31
    done = forward(SharedCall(q, k, v, layout, 0.1))
    x = SharedCall(
        q[-550:], k[-550:], v[-550:], SharedLayout.from_lengths(last, device="cuda"), 0.1
    )
    check(x, SharedForward(done.o[-550:], done.lse2[:, -550:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "groups", [[(1000, [200] * 4)], [(300, [700, 33]), (64, [1, 500])]], ids=str
)
@SIZES
def test_as_accurate_as_torch(groups, dtype, size):
    """Errors against fp64 beside those of torch's attention of every sequence alone."""
    x = on_gpu(groups, size=size, dtype=dtype)
    paths = grown(groups).paths
    outs = []
    for path in paths:
        q, k, v = (t[torch.tensor(path)].transpose(0, 1)[None] for t in (x.q, x.k, x.v))
        o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outs.append(o[0].transpose(0, 1).double().cpu())
    want = wanted(x).o.cpu()
    theirs = folded(outs, paths, len(want)) - want
    ours = forward(x).o.double().cpu() - want
    assert ours.norm() <= 1.25 * theirs.norm()
    assert ours.abs().max() <= 2 * theirs.abs().max()


@SIZES
def test_repeats_bit_for_bit(size):
    """With more items than CTAs, which so draw other items in each run."""
    x = on_gpu([(700, [300] * 12), (50, [400] * 5)], (8, 32), size=size)
    want = forward(x)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(forward(x), want, strict=True))


@SIZES
def test_nan_in_a_response_stays_there(size):
    x = on_gpu([(150, [20, 40, 9])], size=size)
    clean = forward(x)
    for name in "qkv":
        getattr(x, name)[170:210] = torch.nan
    done = forward(x)
    kept = [*range(170), *range(210, 219)]
    assert torch.equal(done.o[kept], clean.o[kept])
    assert torch.equal(done.lse2[:, kept], clean.lse2[:, kept])
    assert done.o[170:210].isnan().all()


@SIZES
def test_strides_are_taken_as_they_are(size):
    x = on_gpu([(40, [33, 50])], size=size)
    fused = torch.cat([x.q, x.k, x.v], 1)
    sliced = x._replace(**dict(zip("qkv", fused.split([8, 2, 2], 1), strict=True)))
    head_major = x._replace(q=x.q.transpose(0, 1).contiguous().transpose(0, 1))
    want = forward(x)
    for other in (sliced, head_major):
        assert all(torch.equal(a, b) for a, b in zip(forward(other), want, strict=True))


def test_an_address_that_tma_cannot_take():
    x = on_gpu([(40, [33])])
    shifted = torch.empty(x.q.numel() + 1, dtype=x.q.dtype, device="cuda")[1:].view(x.q.shape)
    with pytest.raises(Unsupported, match=r"pass q\.contiguous\(\)"):
        shared_prefix_attention(shifted, x.k, x.v, x.layout)


def test_does_not_synchronise():
    x = on_gpu([(40, [33])])
    forward(x)  # compiled, loaded
    fresh = SharedLayout.from_lengths([(40, [30, 3])], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = shared_prefix_attention(x.q, x.k, x.v, fresh, return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got[1].shape == (8, 73)


@SIZES
def test_in_a_graph(size):
    x = on_gpu([(140, [33, 70])], size=size)
    forward(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        done = forward(x)
    for _ in range(2):  # replays draw from the start again
        for t in (x.q, x.k, x.v):
            t.normal_()
        done.o.fill_(torch.nan)
        graph.replay()
        check(x, done)


@SIZES
def test_compiles_to_one_graph(size):
    x = on_gpu([(40, [33])], size=size)
    x.layout.prepare(8, 2, head_dim=size)
    compiled = torch.compile(shared_prefix_attention, fullgraph=True, backend="aot_eager")
    want = shared_prefix_attention(x.q, x.k, x.v, x.layout)
    assert torch.equal(compiled(x.q, x.k, x.v, x.layout), want)


# The tables of a layout.


def test_a_capture_does_not_build_tables():
    """Their copy would read, at each replay, host memory that is gone."""
    x = on_gpu([(140, [33, 70])])
    x.layout.prepare(8, 2)
    fresh = SharedLayout.from_lengths([(140, [33, 70])], device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = x.q * 2
        with pytest.raises(ValueError, match=r"call layout\.prepare\(8, 2\) before the capture of"):
            shared_prefix_attention(x.q, x.k, x.v, fresh)
    assert not fresh.prepared
    graph.replay()
    assert torch.equal(kept, x.q * 2)


def test_a_graph_keeps_the_tables_of_a_layout_that_is_gone():
    """First used under capture, then dropped, and their memory taken by others."""
    forward(on_gpu([(140, [33, 70])]))  # compiled, loaded
    x = on_gpu([(140, [70, 33])])
    x.layout.prepare(8, 2)
    want = wanted(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = shared_prefix_attention(x.q, x.k, x.v, x.layout, return_lse=True)
    q, k, v = x.q, x.k, x.v  # the graph reads these; the layout goes
    sizes = [t.numel() for t in x.layout.prepare(8, 2)]
    del x
    gc.collect()
    taken = [torch.full((n,), 1 << 20, dtype=torch.int32, device="cuda") for n in sizes * 50]
    taken.append(torch.full((sum(sizes),), 1 << 20, dtype=torch.int32, device="cuda"))
    o.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert_close("o", o.double(), want.o, LIMITS[q.dtype])
    assert_close("lse", lse.double(), want.lse, 1e-4)
    assert k.isfinite().all()
    assert v.isfinite().all()


def test_another_stream_waits_for_the_tables():
    """They are filled on the stream of the first caller, which may be busy."""
    forward(on_gpu([(140, [33, 70])]))  # compiled, loaded
    x = on_gpu([(140, [70, 33])])
    want = wanted(x)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(first):
            torch.cuda._sleep(500_000_000)  # cycles: about a quarter of a second
            x.layout.prepare(8, 2)
        with torch.cuda.stream(second):
            o = shared_prefix_attention(x.q, x.k, x.v, x.layout)
        assert not first.query()  # nor did the host wait
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert_close("o", o.double(), want.o, LIMITS[x.q.dtype])


def test_the_default_stream_waits_for_tables_of_another():
    forward(on_gpu([(140, [33, 70])]))
    x = on_gpu([(140, [70, 33])])
    want = wanted(x)
    first = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(500_000_000)
        x.layout.prepare(8, 2)
    o = shared_prefix_attention(x.q, x.k, x.v, x.layout)
    torch.cuda.synchronize()
    assert_close("o", o.double(), want.o, LIMITS[x.q.dtype])


def test_with_the_gpu_as_the_default_device():
    """The host's tensors were made there, and could not be read."""
    with torch.device("cuda"):
        batch = pack_shared_prompts([torch.arange(40)], [[torch.arange(33), torch.arange(9)]])
        assert batch.input_ids.is_cuda
        assert batch.layout.nodes.device.type == "cpu"
        x = on_gpu(batch.layout)
        q = x.q.requires_grad_()
        o = shared_prefix_attention(q, x.k, x.v, batch.layout)
        o.sum().backward()
    assert_close("o", o.detach().double(), wanted(x).o.detach(), LIMITS[q.dtype])
    assert q.grad.isfinite().all()
