"""The causal convolution on a GPU: fp64 truth, trees, packs, strides, graphs, sizes past 2^31."""

import pytest
import torch

from qla_kernels import (
    SharedLayout,
    Unsupported,
    causal_conv1d,
    causal_conv1d_update,
    shared_prefix_conv1d,
)
from qla_kernels.conv import ops
from qla_kernels.conv.autograd import convolve_sections
from qla_kernels.hybrid import prepare_conv1d
from reference import conv
from tests.compare import assert_close
from tests.conv_check import ROUNDING, case, check, check_in_sections, check_repeats
from tests.conv_inputs import FORESTS, WIDTHS
from tests.dualkv_inputs import grown

pytestmark = pytest.mark.hopper

GPU = "cuda"
DTYPES = (torch.bfloat16, torch.float16)
# Normalised heads that share a warp in every way, with and without idle lanes, and over two warps
HEADS = [(3, 16), (5, 32), (6, 64), (3, 64), (5, 48), (4, 80), (6, 96), (4, 112), (4, 128)]
WIDE_HEADS = [(4, 160), (4, 192), (3, 224), (3, 256)]
PACKS = [[4096], [17, 1, 1300, 2, 16, 0, 350], [0, 0, 5], [1] * 400, [3] * 700]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_packs_and_dense_rows(width, dtype):
    kind = {"width": width, "dtype": dtype, "channels": 512}
    for lengths in PACKS:
        check(case(lengths, GPU, padding=30, **kind))
    for rows in ((3, 500), (1, 2000), (700, 1)):
        check(case(rows, GPU, **kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [name for name in FORESTS if name != "nothing"])
def test_small_trees(name, width, dtype):
    check(case(FORESTS[name], GPU, 136, width=width, dtype=dtype))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "groups",
    [[(1000, [700, 3, 64, 65])], [(130, [1 + i % 9 for i in range(3000)])], [(2, [1] * 50)] * 40],
    ids=["long", "thousands of leaves", "short"],
)
def test_groups(groups, width):
    check(case(grown(groups), GPU, 256, width=width))


@pytest.mark.parametrize("parameters", list(ROUNDING))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("silu", [True, False])
def test_parameters_of_any_dtype(parameters, bias, silu):
    kind = {"parameters": parameters, "bias": bias, "silu": silu}
    check(case([1000, 40], GPU, bounds=torch.int64, **kind))
    check(case(FORESTS["short nodes"], GPU, **kind))


@pytest.mark.parametrize("channels", [8, 120, 128, 136, 6144, 8192])
def test_any_number_of_channels(channels):
    check(case([300, 9], GPU, channels))


def test_a_slice_of_a_projection():
    for of in ([2000, 9], FORESTS["turns"], (2, 200)):
        check(case(of, GPU, projection=16))


def test_a_gradient_of_any_strides():
    x = case([2000, 9], GPU)
    for dy in (torch.ones(1, 1, 1).bfloat16().cuda().expand(x.dy.shape), x.dy.mT.contiguous().mT):
        check(x._replace(dy=dy))
    rows = case((3, 200), GPU)
    check(rows._replace(dy=torch.randn(3, 300, 40, device=GPU).bfloat16()[:, :200]))


def test_repeats_bit_for_bit():
    for of in ([3000, 17, 5], grown([(100, [30] * 500)]), (4, 1000)):
        check_repeats(case(of, GPU, 1024), times=5)


@pytest.mark.parametrize("heads", HEADS + WIDE_HEADS, ids=str)
def test_heads_of_every_size(heads):
    count, size = heads
    for others in (0, 8, 264):
        check(case([700, 1, 3, 0, 64, 300], GPU, count * size + others, heads=heads, padding=9))
    check(case(FORESTS["short nodes"], GPU, count * size + 8, heads=heads, bias=False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_heads_in_trees_and_rows(width, dtype):
    kind = {"width": width, "dtype": dtype, "channels": 1024}
    for heads in ((4, 128), (5, 96), (2, 256)):
        check(case(grown([(130, [1 + i % 9 for i in range(300)])]), GPU, heads=heads, **kind))
        check(case((3, 500), GPU, heads=heads, silu=False, **kind))
        check(case([2000, 9], GPU, heads=heads, projection=16, **kind))


def test_heads_repeat_bit_for_bit():
    for heads in ((8, 128), (10, 96), (4, 256)):
        check_repeats(case([3000, 17, 5], GPU, 1024, heads=heads), times=5)


def test_a_gradient_in_sections():
    for heads, sizes in (
        ((4, 128), [256, 256, 512]),
        ((10, 16), [80, 80, 40]),
        ((4, 192), [384] * 3),
    ):
        check_in_sections(case([500, 9], GPU, sum(sizes), heads=heads), sizes)


@pytest.mark.parametrize("heads", [(4, 128), (10, 96), (2, 256), (6, 64), (10, 16)], ids=str)
@torch.no_grad()
def test_tokens_one_by_one_are_the_sequence(heads):
    x, weight, bias = leaves_of(60, 1024)
    x = x.view(5, 12, 1024)
    want = causal_conv1d(x.mT, weight, bias, "silu", qk_l2norm=heads).mT
    pool = torch.zeros(9, 3, 1024, dtype=x.dtype, device=GPU).mT
    slots = torch.tensor([4, 0, 8, 2, 5], device=GPU)
    for t in range(12):
        y = causal_conv1d_update(x[:, t], pool, weight, bias, "silu", slots, qk_l2norm=heads)
        assert_close("y", y, want[:, t], 2 * ROUNDING[x.dtype])  # both are rounded


def test_sections_in_a_graph_and_compiled():
    x, weight, _ = leaves_of(600, 1024)
    bounds = torch.tensor([0, 70, 71, 600], device=GPU)

    def layer(x, weight):
        call = 2 * x[None], weight, None, True, [bounds], (4, 128)
        q, k, v = convolve_sections(*call, (256, 256, 512))
        return (q * k).float(), v.float()

    def step(f=layer) -> list[torch.Tensor]:
        # fresh leaves: autograd waits for the stream on which a leaf was used first
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        y = f(*leaves)
        return [*y, *torch.autograd.grad(y, leaves, [torch.ones_like(part) for part in y])]

    want = step()
    for a, b in zip(step(torch.compile(layer, fullgraph=True)), want, strict=True):
        assert_close("compiled", a, b, 2 * ROUNDING[torch.bfloat16])
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        step()  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def public(x, weight, bias, layout):
    return shared_prefix_conv1d(x, weight, bias, layout, "silu")


def leaves_of(tokens: int, channels: int = 256) -> list[torch.Tensor]:
    shapes = (tokens, channels), (channels, 4), (channels,)
    return [torch.randn(s, dtype=torch.bfloat16, device=GPU).requires_grad_() for s in shapes]


def test_the_public_functions_agree_with_each_other():
    """A tree of separate sequences is a pack; a batch is a transposed view."""
    lengths = [70, 3, 200]
    leaves = leaves_of(sum(lengths))
    bounds = torch.tensor([0, *lengths], device=GPU).cumsum(0)
    layout = SharedLayout.from_lengths([(n, []) for n in lengths], device=GPU)
    y = causal_conv1d(*leaves, "silu", bounds)
    assert torch.equal(public(*leaves, layout), y)
    x, *parameters = leaves
    turned = causal_conv1d(x.T[None], *parameters, "silu", bounds)
    assert torch.equal(turned[0].T, y)
    grads = [torch.autograd.grad(f.sum(), leaves) for f in (y, turned)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_graph_replays_a_tree():
    layout = SharedLayout.from_lengths([(300, [40, 2, 70])], device=GPU)
    leaves = leaves_of(layout.num_tokens)
    prepare_conv1d(layout, 4)

    def step() -> list[torch.Tensor]:
        y = public(*leaves, layout)
        return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        step()  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(leaves[0]))
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(got, step(), strict=True):
        assert torch.equal(a, b)


def test_compiles_to_one_graph():
    layout = SharedLayout.from_lengths([(300, [40, 2, 70])], device=GPU)
    leaves = leaves_of(layout.num_tokens)
    prepare_conv1d(layout, 4)

    def layer(x, weight, bias):
        return public(x * 2, weight, bias, layout).float()

    results = []
    for f in (layer, torch.compile(layer, fullgraph=True)):
        y = f(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_another_stream_waits_for_the_tables():
    layout = SharedLayout.from_lengths([(300, [40, 2, 70])] * 20, device=GPU)
    leaves = leaves_of(layout.num_tokens)
    want = public(*leaves, layout)
    fresh = layout.to(GPU)
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        prepare_conv1d(fresh, 4)
    with torch.cuda.stream(second):
        got = public(*leaves, fresh)
    second.synchronize()
    assert torch.equal(got, want)


def test_past_2_31_elements():
    """The last of so many tokens, and their gradients, against a call of these tokens alone."""
    tokens, channels, few = 2**31 // 4096 + 40, 4096, 200
    x = torch.zeros(1, tokens, channels, dtype=torch.bfloat16, device=GPU)
    x[:, -few:] = torch.randn(few, channels, device=GPU)
    weight = torch.randn(channels, 4, device=GPU)
    call = x, weight, None, [], True
    y = ops.conv_fwd(*call)
    exact = conv.forward(
        x[0, -few - 3 :].double(), weight.double(), None, True, torch.tensor([0, few + 3]).cuda()
    )
    assert_close("y", y[0, -few:], exact[3:], ROUNDING[torch.bfloat16])
    assert not y[0, : -few - 3].any()
    done = ops.ConvBackward(*ops.conv_bwd(y, *call))
    assert not done.dx[0, : -few - 6].any()
    alone = x[:, -few - 6 :].clone(), weight, None, [], True
    want = ops.ConvBackward(*ops.conv_bwd(y[:, -few - 6 :].clone(), *alone))
    assert torch.equal(done.dx[:, -few:], want.dx[:, -few:])
    assert_close("dweight", done.dweight, want.dweight, 1e-5)


def test_an_address_that_is_not_aligned_is_refused():
    x = torch.zeros(33 * 64, dtype=torch.bfloat16, device=GPU)[4 : 4 + 32 * 64].view(32, 64)
    with pytest.raises(Unsupported, match="offset 4; need a last stride of 1 and the rest"):
        causal_conv1d(x, torch.zeros(64, 4, device=GPU))


def test_wrong_tables_do_no_harm():
    """They give wrong numbers; nothing hangs, and the next call is right."""
    good = case(grown([(33, [5, 1, 40])]), GPU)
    for table in good.tables:
        for value in (-(2**31), -5, 2**31 - 1):
            wrong = [torch.full_like(t, value) if t is table else t for t in good.tables]
            broken = good._replace(tables=wrong)
            ops.conv_fwd(*broken[:-1])
            ops.conv_bwd(broken.dy, *broken[:-1])
        torch.cuda.synchronize()
    check(good)
