"""causal_conv1d and shared_prefix_conv1d on CPU tensors: results, gradients, refusals, tables."""

import functools
import re

import pytest
import torch

from qla_kernels import SharedLayout, Unsupported, causal_conv1d, shared_prefix_conv1d
from qla_kernels.conv import ops, refusal
from qla_kernels.conv.autograd import convolve_sections
from qla_kernels.hybrid import prepare_conv1d
from qla_kernels.hybrid.conv_tables import prepare, tree_tables
from qla_kernels.hybrid.layouts import parents
from reference import conv
from tests.compare import assert_close
from tests.conv_inputs import (
    FORESTS,
    LENGTHS,
    WIDTHS,
    bounds_of,
    halo_of,
    packed_bounds,
    replicated,
    tensors,
)
from tests.dualkv_inputs import Forest, forest

EXACT = 1e-12


def layout_of(packed: Forest) -> SharedLayout:
    return SharedLayout(packed.tout, packed.nodes)


def gradients(y: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=draw, dtype=torch.float64).to(y.dtype)
    return torch.autograd.grad(y, leaves, dy)


def assert_same(got: torch.Tensor, want: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    assert_close("y", got.detach(), want.detach(), EXACT)
    for a, b in zip(gradients(got, leaves), gradients(want, leaves), strict=True):
        assert_close("gradient", a, b, EXACT)


# Results.


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [name for name in FORESTS if name != "nothing"])
def test_a_tree_is_every_sequence_alone(name, width):
    packed, leaves = FORESTS[name], tensors(len(FORESTS[name].tout), width=width)
    want = replicated(functools.partial(conv.alone, silu=True), packed, *leaves)
    x, *parameters = leaves
    assert_same(shared_prefix_conv1d(x, *parameters, layout_of(packed), "silu"), want, leaves)


@pytest.mark.parametrize("name", [name for name in LENGTHS if name != "nothing"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_pack_is_every_sequence_alone(name, dtype):
    leaves = tensors(sum(LENGTHS[name]))
    want = replicated(functools.partial(conv.alone, silu=False), FORESTS[name], *leaves)
    bounds = packed_bounds(LENGTHS[name]).to(dtype)
    assert_same(causal_conv1d(*leaves, cu_seqlens=bounds), want, leaves)


def test_a_batch_as_torchs_convolutions_take_it():
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)  # [B, C, T]
    _, weight, bias = leaves = [x, *tensors(1)[1:]]
    y = causal_conv1d(x, weight, bias, "swish")
    assert y.shape == x.shape
    assert y.stride(1) == 1
    want = torch.stack([conv.alone(row.T, weight, bias, True).T for row in x])
    assert_same(y, want, leaves)
    module = torch.nn.Conv1d(5, 5, 4, groups=5, padding=3).double()
    got = causal_conv1d(x, module.weight.squeeze(1), module.bias)
    assert_close("y", got.detach(), module(x)[..., :7].detach(), EXACT)


def test_a_transposed_view_of_packed_tokens():
    packed, leaves = FORESTS["turns"], tensors(len(FORESTS["turns"].tout))
    x, *parameters = leaves
    want = shared_prefix_conv1d(x, *parameters, layout_of(packed), "silu")
    got = shared_prefix_conv1d(x.T[None], *parameters, layout_of(packed), "silu")
    assert_same(got[0].T, want, leaves)
    assert got.stride()[1:] == (1, 5)


def test_a_slice_of_a_projection():
    fused = torch.randn(20, 12, dtype=torch.float64, requires_grad=True)
    _, weight, bias = tensors(1)
    y = causal_conv1d(fused[:, 4:9], weight, bias, "silu")
    y.sum().backward()  # a gradient of stride 0
    x = fused.detach()[:, 4:9].clone().requires_grad_()
    (want,) = torch.autograd.grad(causal_conv1d(x, weight, bias, "silu").sum(), x)
    assert torch.equal(fused.grad[:, 4:9], want)
    assert not fused.grad[:, :4].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_results_have_the_dtypes_of_their_inputs(dtype):
    x, weight, bias = tensors(9, dtype=dtype)
    leaves = [x, weight.detach().float().requires_grad_(), bias]
    y = causal_conv1d(*leaves, "silu")
    exact = [leaf.detach().double() for leaf in leaves]
    assert y.dtype == dtype
    assert_close("y", y.detach(), conv.alone(*exact, True), torch.finfo(dtype).eps)
    for grad, leaf in zip(gradients(y, leaves), leaves, strict=True):
        assert grad.dtype == leaf.dtype


def test_autocast_changes_nothing():
    leaves = tensors(9, dtype=torch.float32)
    want = causal_conv1d(*leaves, "silu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = causal_conv1d(*leaves, "silu")
        assert torch.equal(got, want)
        grads = gradients(got, leaves)
    assert all(torch.equal(a, b) for a, b in zip(grads, gradients(want, leaves), strict=True))


def test_only_what_requires_a_gradient_gets_one():
    x, weight, _ = tensors(9)
    causal_conv1d(x.detach(), weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    assert not causal_conv1d(x.detach(), weight.detach()).requires_grad


def test_no_tokens():
    x, weight, bias = tensors(0)
    y = causal_conv1d(x, weight, bias, "silu")
    y.sum().backward()
    assert y.shape == (0, 5)
    assert not weight.grad.any()
    layout = SharedLayout.from_lengths([])
    assert shared_prefix_conv1d(x, weight, bias, layout).shape == (0, 5)


# Heads that are normalised.


def normed(y: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """y [T, C] with its first channels normalised by torch's operators."""
    first, rest = y[:, : count * size].unflatten(1, (count, size)), y[:, count * size :]
    first = first * (first.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return torch.cat([first.flatten(1), rest], 1)


@pytest.mark.parametrize("heads", [(2, 2), (1, 5), (5, 1), (0, 8)], ids=str)
def test_heads_are_normalised_after_the_activation(heads):
    leaves = tensors(20)
    bounds = packed_bounds([5, 8, 7])
    want = normed(causal_conv1d(*leaves, "silu", bounds), *heads)
    assert_same(causal_conv1d(*leaves, "silu", bounds, qk_l2norm=heads), want, leaves)


def test_heads_over_a_tree_and_in_a_batch():
    packed = FORESTS["turns"]
    leaves, layout = tensors(len(packed.tout)), layout_of(packed)
    want = normed(shared_prefix_conv1d(*leaves, layout, "silu"), 2, 2)
    assert_same(shared_prefix_conv1d(*leaves, layout, "silu", qk_l2norm=[2, 2]), want, leaves)
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)  # [B, C, T]
    leaves = [x, *tensors(1)[1:]]
    flat = causal_conv1d(*leaves, "silu").mT.flatten(0, 1)
    want = normed(flat, 1, 4).unflatten(0, (3, 7)).mT
    assert_same(causal_conv1d(*leaves, "silu", qk_l2norm=(1, 4)), want, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_is_rounded_once(dtype):
    leaves = [leaf.detach() for leaf in tensors(40, dtype=dtype)]
    exact = [leaf.double() for leaf in leaves]
    got = causal_conv1d(*leaves, "silu", qk_l2norm=(2, 2))
    want = causal_conv1d(*exact, "silu", qk_l2norm=(2, 2))
    assert got.dtype == dtype
    # half a unit in the last place, and what fp32 costs
    assert ((got.double() - want).abs() <= (torch.finfo(dtype).eps / 2 + 1e-5) * want.abs()).all()


@pytest.mark.parametrize("sizes", [(4, 4, 5), (4, 9), (13,)])
def test_sections_are_views_and_their_gradients_stay_apart(sizes):
    leaves = tensors(20, channels=13)
    x, *parameters = leaves
    call = x[None], *parameters, True, [packed_bounds([5, 8, 7])], (2, 4)
    sections = convolve_sections(*call, sizes)
    (whole,) = convolve_sections(*call, (13,))
    assert [part.shape[2] for part in sections] == list(sizes)
    assert len({part.untyped_storage().data_ptr() for part in sections}) == 1
    assert torch.equal(torch.cat(sections, 2), whole)
    dy = torch.randn_like(whole)
    got = torch.autograd.grad(sections, leaves, dy.split(list(sizes), 2))
    for a, b in zip(got, torch.autograd.grad(whole, leaves, dy), strict=True):
        assert torch.equal(a, b)


def test_a_section_without_a_gradient_has_one_of_zeros():
    leaves = tensors(9, channels=12)
    x, *parameters = leaves
    q, _, v = convolve_sections(x[None], *parameters, True, [], (2, 4), (4, 4, 4))
    got = torch.autograd.grad(q.sum() + v.sum(), leaves)
    (y,) = convolve_sections(x[None], *parameters, True, [], (2, 4), (12,))
    want = torch.autograd.grad(y[..., :4].sum() + y[..., 8:].sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_heads_under_checkpointing_and_autocast():
    leaves = tensors(9, dtype=torch.float32)
    run = functools.partial(causal_conv1d, qk_l2norm=(2, 2))
    want = run(*leaves, "silu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.utils.checkpoint.checkpoint(run, *leaves, "silu", use_reentrant=False)
    assert torch.equal(got, want)
    pairs = zip(gradients(got, leaves), gradients(want, leaves), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_heads_compile_to_one_graph():
    leaves = tensors(20, channels=12)
    bounds = packed_bounds([5, 8, 7])

    def layer(x, weight, bias):
        whole = causal_conv1d(2 * x, weight, bias, "silu", bounds, qk_l2norm=(2, 4))
        q, k, v = convolve_sections(x[None], weight, bias, True, [bounds], (2, 4), (4, 4, 4))
        return whole, q * k + v

    results = []
    for f in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        a, b = f(*leaves)
        results.append([a, b, *torch.autograd.grad(a.sum() + b.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Tables.


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", FORESTS)
def test_tables(name, width):
    packed = FORESTS[name]
    T, reach = len(packed.tout), width - 1
    tables = tree_tables(packed.nodes, T, width)
    assert all(table.dtype == torch.int32 for table in tables)
    assert torch.equal(tables.bounds, bounds_of(packed).int())
    assert torch.equal(tables.halo, halo_of(packed, width).int())
    # every entry of a halo is a reader, once, and in the order of nodes
    shared = tables.shared.tolist()
    assert shared == sorted(set(tables.halo.flatten().tolist()) - {-1})
    owner = {}
    for node, (kept, given) in enumerate(tables.rows.tolist()):
        first, end = tables.bounds[node : node + 2].tolist()
        if kept >= 0:
            tail = list(range(max(first, end - reach), end))
            assert shared[kept : kept + len(tail)] == tail
        assert (given >= 0) == (node > 0 and parents(packed.nodes)[node] >= 0)
        for i, token in enumerate(tables.halo[node].tolist()):
            if token >= 0:
                owner[given - (reach - 1) + i] = token
    assert sorted(owner) == list(range(len(shared), len(shared) + len(owner)))
    for s, token in enumerate(shared):
        found = tables.readers[tables.first[s] : tables.first[s + 1]].tolist()
        assert found == sorted(row for row, of in owner.items() if of == token)


def test_tables_are_made_once_and_moved_with_the_layout():
    layout = layout_of(FORESTS["turns"])
    assert prepare(layout, 4) is prepare(layout, 4)
    assert prepare(layout, 4)[1].shape[1] == 3
    assert prepare(layout, 3)[1].shape[1] == 2
    assert not layout.to("cpu").further


def test_thousands_of_leaves_take_few_tables():
    packed = forest([(9, tuple((2, ()) for _ in range(3000)))])
    tables = tree_tables(packed.nodes, len(packed.tout), 4)
    assert sum(table.numel() for table in tables) < 12 * 3001


# torch.compile and the operators.


@pytest.mark.parametrize("name", ["turns", "short nodes"])
def test_opcheck(name):
    packed = FORESTS[name]
    x, weight, bias = (leaf.detach() for leaf in tensors(len(packed.tout)))
    whole = list(tree_tables(packed.nodes, len(packed.tout), 4))
    for tables in ([], whole[:1], whole):
        for b in (None, bias):
            args = (x[None], weight, b, tables, True)
            torch.library.opcheck(torch.ops.qla_kernels.conv_fwd.default, args)
            args = (torch.randn_like(x)[None], *args)
            torch.library.opcheck(torch.ops.qla_kernels.conv_bwd.default, args)
    heads = (x[None], weight, bias, whole, True, 2, 2)
    torch.library.opcheck(torch.ops.qla_kernels.conv_fwd.default, heads)
    first, *others = torch.randn_like(x)[None].tensor_split([2, 4], 2)
    torch.library.opcheck(torch.ops.qla_kernels.conv_bwd.default, (first, *heads, *others))


def test_compiles_to_one_graph():
    leaves = tensors(20)
    bounds = packed_bounds([5, 8, 7])
    compiled = torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager")
    got, want = (f(*leaves, "silu", bounds) for f in (compiled, causal_conv1d))
    assert torch.equal(got, want)
    for a, b in zip(gradients(got, leaves), gradients(want, leaves), strict=True):
        assert torch.equal(a, b)


def test_a_prepared_layout_compiles_to_one_graph():
    packed = FORESTS["turns"]
    leaves, layout = tensors(len(packed.tout)), layout_of(packed)
    compiled = torch.compile(shared_prefix_conv1d, fullgraph=True, backend="aot_eager")
    prepare_conv1d(layout, 4)
    got, want = (f(*leaves, layout, "silu") for f in (compiled, shared_prefix_conv1d))
    assert torch.equal(got, want)
    for a, b in zip(gradients(got, leaves), gradients(want, leaves), strict=True):
        assert torch.equal(a, b)


def test_a_layout_without_tables_is_not_compiled():
    layout = layout_of(FORESTS["turns"])
    compiled = torch.compile(shared_prefix_conv1d, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"prepare_conv1d\(layout, 4\)"):
        compiled(*tensors(layout.num_tokens), layout)


# Errors.


def on_gpu(x=None, weight=None, bias=None, heads=None, capability=(9, 0)) -> str | None:
    x = torch.zeros(16, 64, dtype=torch.bfloat16) if x is None else x
    weight = torch.zeros(64, 4, dtype=torch.bfloat16) if weight is None else weight
    return refusal(x, weight, bias, heads, capability=capability)


HALF = functools.partial(torch.zeros, dtype=torch.bfloat16)
FAR_APART = torch.empty(1, dtype=torch.bfloat16, device="meta").expand(2, 64)
FAR_APART = FAR_APART.as_strided((2, 64), (2**31, 1))


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("Hopper", {"capability": (8, 0)}),
        ("x is float32", {"x": torch.zeros(16, 64)}),
        ("weight is float64", {"weight": torch.zeros(64, 4, dtype=torch.float64)}),
        ("bias is float64", {"bias": torch.zeros(64, dtype=torch.float64)}),
        ("x has 62 channels", {"x": HALF(16, 62), "weight": HALF(62, 4)}),
        ("weight has width 5", {"weight": HALF(64, 5)}),
        ("pass x.contiguous()", {"x": HALF(64, 16).T}),
        ("pass x.mT.contiguous().mT", {"x": HALF(2, 64, 16)}),
        ("strides", {"x": HALF(16, 70)[:, :64]}),
        ("strides", {"x": HALF(16, 72)[:, 4:68]}),
        ("rows of a batch of 2", {"x": HALF(2, 16, 64)[:, :8].mT}),
        ("tokens of x are 2147483648 elements apart; need less than 4 GiB", {"x": FAR_APART}),
        ("qk_l2norm has heads of 24 channels; need a multiple of 16", {"heads": (2, 24)}),
        ("use_qk_l2norm_in_kernel", {"heads": (1, 8)}),
    ],
)
def test_what_a_hopper_gpu_refuses(text, given):
    assert text in on_gpu(**given)


def test_what_a_hopper_gpu_takes():
    for x in (
        HALF(16, 64),
        HALF(16, 128)[:, 64:],
        HALF(2, 16, 64).mT,
        HALF(1, 16, 96)[..., :64].mT,
    ):
        assert on_gpu(x) is None
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        assert on_gpu(weight=torch.zeros(64, 3, dtype=dtype), bias=torch.zeros(64)) is None
    for heads in ((4, 16), (1, 64), (1, 48), (0, 7)):
        assert on_gpu(heads=heads) is None


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("x is of type list", {"x": [1]}),
        ("x has shape (1, 1, 9, 5)", {"x": torch.zeros(1, 1, 9, 5)}),
        ("weight has shape (4, 5)", {"weight": torch.zeros(4, 5)}),
        ("weight has shape (5, 1, 4)", {"weight": torch.zeros(5, 1, 4)}),
        ("bias has shape (4,)", {"bias": torch.zeros(4)}),
        ("weight is on meta", {"weight": torch.zeros(5, 4, device="meta")}),
        ("activation='relu'", {"activation": "relu"}),
        ("cu_seqlens is float32", {"cu_seqlens": torch.zeros(2)}),
        ("cu_seqlens has shape (1, 2)", {"cu_seqlens": torch.zeros(1, 2, dtype=torch.int32)}),
        ("a batch of 2", {"x": torch.zeros(2, 5, 9), "cu_seqlens": packed_bounds([9])}),
        ("cu_seqlens [0, 10]", {"cu_seqlens": packed_bounds([10])}),
        ("cu_seqlens [0, 5, 3]", {"cu_seqlens": torch.tensor([0, 5, 3])}),
        ("qk_l2norm is 4 of type int; need (heads, channels of a head)", {"qk_l2norm": 4}),
        ("qk_l2norm=(2, 3); need positive numbers with a product of at", {"qk_l2norm": (2, 3)}),
        ("qk_l2norm=(-1, 3)", {"qk_l2norm": (-1, 3)}),
        ("qk_l2norm=(1, 0)", {"qk_l2norm": (1, 0)}),
        ("qk_l2norm is 2.5 of type float; need an integer; pass (2 *", {"qk_l2norm": (1, 2.5)}),
    ],
)
def test_malformed(text, changed):
    x, weight, bias = (leaf.detach().float() for leaf in tensors(9))
    with pytest.raises(ValueError, match=f"^causal_conv1d: .*{re.escape(text)}"):
        causal_conv1d(**{"x": x, "weight": weight, "bias": bias, **changed})


def test_malformed_layouts():
    x, weight, _ = tensors(9)
    for layout, text in (
        (None, "layout is of type NoneType"),
        (SharedLayout.from_lengths([(4, [3])]), "1 row of 7 tokens"),
        (SharedLayout.from_lengths([(4, [5])]).to("meta"), "layout is on meta"),
    ):
        with pytest.raises(ValueError, match=text):
            shared_prefix_conv1d(x, weight, None, layout)
    with pytest.raises(ValueError, match="width=5"):
        prepare_conv1d(SharedLayout.from_lengths([]), 5)
    with pytest.raises(Unsupported, match="shared_prefix_conv1d: weight has width 6"):
        shared_prefix_conv1d(x, torch.zeros(5, 6), None, SharedLayout.from_lengths([(4, [5])]))


def test_second_derivatives_are_refused():
    leaves = tensors(9)
    y = causal_conv1d(*leaves, "silu")
    (dx,) = torch.autograd.grad(y.sum(), leaves[0], create_graph=True)
    with pytest.raises(Unsupported, match="first derivatives alone"):
        dx.sum().backward()


def test_forward_mode_is_refused():
    x, weight, bias = (leaf.detach() for leaf in tensors(9))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(Unsupported, match="tangent"):
            causal_conv1d(dual, weight, bias)


def test_meta_tensors_give_shapes():
    x, weight, bias = (leaf.detach().to("meta") for leaf in tensors(9))
    assert causal_conv1d(x, weight, bias, "silu").shape == (9, 5)


def test_repeats_bit_for_bit():
    packed = FORESTS["many leaves"]
    leaves, layout = tensors(len(packed.tout), dtype=torch.float32), layout_of(packed)
    runs = [gradients(shared_prefix_conv1d(*leaves, layout, "silu"), leaves) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_operators_are_named():
    assert ops.conv_fwd
    assert torch.ops.qla_kernels.conv_bwd.default
