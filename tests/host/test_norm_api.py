"""gated_rms_norm on CPU tensors: results, gradients, refusals, what a projection saves."""

import functools
import re

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from qla_kernels import Unsupported, gated_rms_norm
from qla_kernels.norm import refusal
from qla_kernels.norm.autograd import without_saving
from qla_kernels.norm.heuristics import columns_of, num_blocks
from qla_kernels.norm.shapes import COLUMNS, pass_rows
from tests.compare import assert_close

EXACT = 1e-12


def tensors(*shape: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """x, gate and weight, all of which require gradients."""
    return [torch.randn(s, dtype=dtype).requires_grad_() for s in (shape, shape, shape[-1:])]


def by_hand(x, gate, weight, eps=1e-6, sigmoid=False):
    act = gate.sigmoid() if sigmoid else functional.silu(gate)
    return functional.rms_norm(x, x.shape[-1:], weight, eps) * act


def assert_same(got, want, leaves):
    assert_close("y", got.detach(), want.detach(), EXACT)
    dy = torch.randn_like(got)
    found = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for y in (got, want)]
    for a, b in zip(*found, strict=True):
        assert_close("gradient", a, b, EXACT)


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize("shape", [(5, 7), (5, 3, 8), (2, 5, 3, 8)])
def test_results_and_gradients(shape, activation):
    leaves = tensors(*shape)
    y = gated_rms_norm(*leaves, 1e-3, activation)
    assert_same(y, by_hand(*leaves, 1e-3, activation == "sigmoid"), leaves)


def test_a_slice_of_a_projection():
    fused = torch.randn(2, 5, 40, dtype=torch.float64, requires_grad=True)
    x, _, weight = tensors(2, 5, 3, 8)
    y = gated_rms_norm(x, fused[..., 8:32].unflatten(-1, (3, 8)), weight)
    y.sum().backward()  # a gradient of stride 0
    assert not fused.grad[..., :8].any()
    assert fused.grad[..., 8:32].all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("batch", [(), (1,)])
def test_tokens_of_no_sequence_are_not_read(batch, dtype):
    x, gate, weight = tensors(*batch, 9, 2, 8)
    with torch.no_grad():
        x[..., 7:, :, :] = gate[..., 7:, :, :] = torch.nan
    bounds = torch.tensor([0, 3, 7], dtype=dtype)
    y = gated_rms_norm(x, gate, weight, cu_seqlens=bounds)
    live = [x[..., :7, :, :].detach(), gate[..., :7, :, :].detach(), weight.detach()]
    live = [each.requires_grad_() for each in live]
    want = gated_rms_norm(*live)
    assert torch.equal(y[..., :7, :, :], want)
    assert not y[..., 7:, :, :].any()
    dx, dgate, dweight = torch.autograd.grad(y.sum(), (x, gate, weight))
    wanted = torch.autograd.grad(want.sum(), live)
    assert torch.equal(dx[..., :7, :, :], wanted[0])
    assert torch.equal(dweight, wanted[2])
    assert not dx[..., 7:, :, :].any()
    assert not dgate[..., 7:, :, :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_results_are_rounded_once(dtype):
    x, gate, _ = tensors(9, 2, 64, dtype=dtype)
    leaves = [x, gate, torch.randn(64).requires_grad_()]
    y = gated_rms_norm(*leaves)
    want = by_hand(*(each.detach().double() for each in leaves))
    assert y.dtype == dtype
    assert_close("y", y.detach(), want, torch.finfo(dtype).eps)
    for grad, leaf in zip(torch.autograd.grad(y.sum(), leaves), leaves, strict=True):
        assert grad.dtype == leaf.dtype


def test_autocast_changes_nothing():
    leaves = tensors(9, 8, dtype=torch.float32)
    want = gated_rms_norm(*leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gated_rms_norm(*leaves), want)


def test_no_rows():
    leaves = tensors(0, 2, 8)
    y = gated_rms_norm(*leaves)
    y.sum().backward()
    assert y.shape == (0, 2, 8)
    assert not leaves[2].grad.any()


# What is saved.


def saved(function) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        function()
    return kept


def test_only_inputs_are_saved():
    leaves = tensors(9, 2, 8)
    assert {id(x) for x in saved(lambda: gated_rms_norm(*leaves))} == {id(x) for x in leaves}


@pytest.mark.parametrize("bias", [True, False])
def test_a_projection_that_does_not_save_its_input(bias):
    leaves, project = tensors(9, 2, 8), torch.nn.Linear(16, 5, bias=bias).double()
    inputs = [*leaves, *project.parameters()]
    dy = torch.randn(9, 5, dtype=torch.float64)
    y = gated_rms_norm(*leaves)
    want = torch.autograd.grad(project(y.flatten(1)), inputs, dy)

    def step():
        out = without_saving(gated_rms_norm(*leaves).flatten(1), project)
        return torch.autograd.grad(out, inputs, dy)

    assert all(map(torch.equal, step(), want))
    kept = saved(step)
    assert all(x.shape != (9, 16) for x in kept)
    assert any(x.shape == project.weight.mT.shape or x is project.weight for x in kept)


def test_what_is_saved_beside_it_goes_to_hooks_around():
    """Those of activation checkpointing, or of an offload."""
    leaves, project = tensors(9, 16), torch.nn.Linear(16, 5).double()
    packed, unpacked = [], []

    def pack(x):
        packed.append(x)
        return len(packed) - 1

    def unpack(place):
        unpacked.append(place)
        return packed[place]

    def body(*leaves):
        return without_saving(gated_rms_norm(*leaves), project).sin()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = body(*leaves)
    out.sum().backward()
    assert sorted(set(unpacked)) == list(range(len(packed)))
    got = [x.grad for x in leaves]
    for reentrant in (False, True):
        again = [x.detach().requires_grad_() for x in leaves]
        checkpoint(body, *again, use_reentrant=reentrant).sum().backward()
        assert all(map(torch.equal, [x.grad for x in again], got))


def test_without_gradients_a_projection_is_called():
    leaves = [x.detach() for x in tensors(9, 16)]
    y = gated_rms_norm(*leaves)
    assert torch.equal(without_saving(y, lambda x: x + 1), y + 1)


# torch.compile and the operators.


def test_opcheck():
    x, gate, weight = (leaf.detach() for leaf in tensors(9, 2, 8))
    for tables in ([], [torch.tensor([0, 3, 7])]):
        args = (x, gate, weight, tables, 1e-6, True)
        torch.library.opcheck(torch.ops.qla_kernels.gated_norm_fwd.default, args)
        torch.library.opcheck(torch.ops.qla_kernels.gated_norm_bwd.default, (x, *args))


def test_compiles_to_one_graph():
    leaves, project = tensors(20, 16), torch.nn.Linear(16, 5).double()

    def step(*leaves):
        return without_saving(gated_rms_norm(*leaves, 1e-5, "sigmoid"), project)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*leaves), step(*leaves), leaves)


# Errors.


HALF = functools.partial(torch.zeros, dtype=torch.bfloat16)


def on_gpu(x=None, gate=None, weight=None, capability=(9, 0)) -> str | None:
    x = HALF(16, 2, 64) if x is None else x
    gate = torch.zeros_like(x) if gate is None else gate
    weight = torch.zeros(x.shape[-1]) if weight is None else weight
    return refusal(x, gate, weight, capability=capability)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("Hopper", {"capability": (8, 0)}),
        ("x is float32", {"x": torch.zeros(16, 64)}),
        ("the norm's weight is float64", {"weight": torch.zeros(64, dtype=torch.float64)}),
        ("head dimension V=60", {"x": HALF(16, 60)}),
        ("head dimension V=520", {"x": HALF(16, 520)}),
        ("pass x.contiguous()", {"x": HALF(64, 16).T}),
        ("gate has strides", {"gate": HALF(16, 2, 70)[..., :64]}),
        ("rows of a batch of gate", {"x": HALF(2, 8, 2, 64), "gate": HALF(2, 9, 2, 64)[:, :8]}),
    ],
)
def test_what_a_hopper_gpu_refuses(text, given):
    assert text in on_gpu(**given)


def test_what_a_hopper_gpu_takes():
    projection = HALF(2, 8, 304)[..., 16:272]
    for x in (HALF(16, 64), HALF(2, 8, 4, 64), projection.unflatten(-1, (2, 128)), HALF(9, 512)):
        assert on_gpu(x, x) is None
        for dtype in (torch.float16, torch.float32, torch.bfloat16):
            assert on_gpu(x, weight=torch.zeros(x.shape[-1], dtype=dtype)) is None


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("gate is of type list", {"gate": [1]}),
        ("x has shape (8,)", {"x": torch.zeros(8)}),
        ("gate has shape (9, 4)", {"gate": torch.zeros(9, 4)}),
        ("gate is float64", {"gate": torch.zeros(9, 8, dtype=torch.float64)}),
        ("weight has shape (4,)", {"weight": torch.zeros(4)}),
        ("weight is on meta", {"weight": torch.zeros(8, device="meta")}),
        ("eps is 1", {"eps": 1}),
        ("eps is -1.0", {"eps": -1.0}),
        ("activation='relu'; need silu, swish or sigmoid", {"activation": "relu"}),
        ("cu_seqlens is float32", {"cu_seqlens": torch.zeros(2)}),
        (
            "cu_seqlens has shape (0,); need [sequences + 1]",
            {"cu_seqlens": torch.zeros(0, dtype=torch.int32)},
        ),
        ("cu_seqlens is on meta", {"cu_seqlens": torch.zeros(2, device="meta").int()}),
    ],
)
def test_malformed(text, changed):
    x, gate, weight = (leaf.detach().float() for leaf in tensors(9, 8))
    with pytest.raises(ValueError, match=f"^gated_rms_norm: .*{re.escape(text)}"):
        gated_rms_norm(**{"x": x, "gate": gate, "weight": weight, **changed})


def test_a_batch_beside_bounds():
    x, gate, weight = tensors(2, 5, 3, 8)
    with pytest.raises(ValueError, match="a batch of 2; need packed tokens"):
        gated_rms_norm(x, gate, weight, cu_seqlens=torch.tensor([0, 5]))


def test_second_derivatives_are_refused():
    leaves = tensors(9, 8)
    (dx,) = torch.autograd.grad(gated_rms_norm(*leaves).sum(), leaves[0], create_graph=True)
    with pytest.raises(Unsupported, match="first derivatives alone"):
        dx.sum().backward()


def test_forward_mode_is_refused():
    x, gate, weight = (leaf.detach() for leaf in tensors(9, 8))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(Unsupported, match="tangent"):
            gated_rms_norm(dual, gate, weight)


def test_meta_tensors_give_shapes():
    leaves = (leaf.detach().to("meta") for leaf in tensors(9, 8))
    assert gated_rms_norm(*leaves).shape == (9, 8)


def test_blocks_share_rows():
    """All run at once, take equally many steps but for one, and leave no row out."""
    for columns in COLUMNS:
        assert columns_of(columns) == columns
        for rows in (1, 31, 32, 33, 1000, 65537, 262144):
            blocks = num_blocks(rows, columns, 396)
            steps = -(-rows // pass_rows(columns))
            assert 1 <= blocks <= 396
            assert blocks * -(-steps // blocks) - steps < blocks
            assert -(-steps // blocks) == -(-steps // 396)
