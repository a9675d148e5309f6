"""The causal convolution's kernels, emulated: trees, packs and dense rows, forward and backward."""

import functools

import pytest
import torch

from qla_kernels.conv import launch, ops
from qla_kernels.conv.kernels import fwd, join_parts, prefill, weight_sums
from qla_kernels.hybrid.conv_tables import tree_tables
from qla_kernels.runtime import jit
from tests.compare import FP32, assert_close
from tests.conv_check import ROUNDING, case, check, check_in_sections, check_repeats
from tests.conv_inputs import FORESTS, LENGTHS
from tests.dualkv_inputs import grown

pytestmark = pytest.mark.usefixtures("seeds", "poison")

run = functools.partial(check, fwd=launch.conv_fwd, bwd=launch.conv_bwd)
PACKS = [[300], [17, 1, 130, 2, 16, 0, 35], [0, 0, 5], [1] * 40]
TREE = grown([(33, [5, 1, 40]), (2, [1, 2, 3]), (20, [])])


@pytest.mark.parametrize("variant", fwd.VARIANTS, ids=jit.variant_id)
@pytest.mark.kernels("conv.fwd", "conv.bwd")
def test_every_variant(variant):
    kind = {"dtype": getattr(torch, variant.dtype), "width": variant.W}
    for lengths in PACKS:
        run(case(lengths, "cpu", padding=3, **kind))
    run(case((3, 50), "cpu", **kind))
    run(case((1, 7), "cpu", **kind))
    run(case(TREE, "cpu", channels=136, **kind))


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("name", [name for name in FORESTS if name != "nothing"])
def test_trees(name, width):
    run(case(FORESTS[name], "cpu", width=width))


@pytest.mark.parametrize("tokens", [1, 2, 5, 37, 70, 1000])
def test_runs_of_any_length(tokens, monkeypatch):
    """Shorter than what a warp loads ahead, ends inside it, longer than the batch."""
    monkeypatch.setattr(launch, "run_tokens", lambda *_: tokens)
    for lengths in ([200], [3, 1, 90, 0, 40]):
        run(case(lengths, "cpu", padding=3))
    run(case(TREE, "cpu", 136))


@pytest.mark.parametrize("variant", join_parts.VARIANTS, ids=jit.variant_id)
@pytest.mark.kernels("conv.join_parts")
def test_many_parts(variant):
    """More than a CTA loads at a time, and a number that its warps do not divide."""
    dtype = getattr(torch, variant.dtype)
    for leaves in (1, 33, 70):
        run(case(grown([(6, [1 + i % 3 for i in range(leaves)])]), "cpu", 136, dtype=dtype))


@pytest.mark.parametrize("variant", weight_sums.VARIANTS, ids=jit.variant_id)
@pytest.mark.parametrize("blocks", [1, 15, 16, 65, 200])
@pytest.mark.kernels("conv.weight_sums")
def test_sums_over_any_number_of_blocks(variant, blocks):
    W, C = variant.W, 40
    sums, dweight, dbias = torch.randn(blocks, W + 1, C), torch.empty(C, W), torch.empty(C)
    found = dweight.view(torch.uint8).flatten(), dbias.view(torch.uint8)
    jit.compile(weight_sums, variant)(sums, *found, 0, 0, W + 1)
    want = sums.double().sum(0)
    assert_close("dweight", dweight, want[:W].T, FP32)
    assert_close("dbias", dbias, want[W], FP32)


@pytest.mark.parametrize("parameters", list(ROUNDING))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("silu", [True, False])
def test_parameters_of_any_dtype(parameters, bias, silu):
    run(case([20, 9], "cpu", parameters=parameters, bias=bias, silu=silu))


@pytest.mark.parametrize("channels", [8, 120, 128, 136, 264])
def test_any_number_of_channels(channels):
    run(case([20, 9], "cpu", channels))
    run(case(FORESTS["short nodes"], "cpu", channels))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_tokens_of_no_sequence_are_not_read(lengths):
    for bounds in (torch.int32, torch.int64):
        run(case(lengths, "cpu", padding=40, bounds=bounds))


def test_a_slice_of_a_projection():
    for of in ([20, 9], FORESTS["turns"], (2, 20)):
        run(case(of, "cpu", projection=16))


def test_a_gradient_of_any_strides():
    x = case([20, 9], "cpu")
    for dy in (torch.ones(1, 1, 1).bfloat16().expand(x.dy.shape), x.dy.mT.contiguous().mT):
        run(x._replace(dy=dy))
    rows = case((3, 20), "cpu")
    longer = torch.randn(3, 30, 40).bfloat16()
    run(rows._replace(dy=longer[:, :20]))  # rows that do not flatten


def test_no_tokens_take_no_launch(monkeypatch):
    monkeypatch.setattr(jit, "compile", None)
    for of in ([], (0, 5), (2, 0)):
        *call, dy = case(of, "cpu")
        assert launch.conv_fwd(*call).shape == dy.shape
        assert not launch.conv_bwd(dy, *call).dweight.any()


def test_values_of_every_size():
    """The logistic function at its ends: y and dx are finite, and 0 or z."""
    x = case([4], "cpu", bias=False)
    for size in (1e2, 1e4, 1e30):
        scaled = x._replace(x=x.x * size)
        assert launch.conv_fwd(*scaled[:-1]).isfinite().all()
        assert launch.conv_bwd(x.dy, *scaled[:-1]).dx.isfinite().all()


# Heads that share a warp in every way, with and without idle lanes or places past the last
HEADS = [
    (3, 16),
    (5, 32),
    (2, 64),
    (3, 64),
    (1, 48),
    (2, 96),
    (1, 128),
    (3, 112),
    (2, 192),
    (1, 256),
]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads_of_every_size(heads):
    count, size = heads
    for others in (0, 8, 136):
        run(case([20, 1, 9], "cpu", count * size + others, heads=heads, padding=3))
    run(case(FORESTS["short nodes"], "cpu", count * size + 8, heads=heads, bias=False))


@pytest.mark.parametrize("variant", fwd.VARIANTS, ids=jit.variant_id)
@pytest.mark.kernels("conv.fwd", "conv.bwd")
def test_heads_in_every_variant(variant):
    kind = {"dtype": getattr(torch, variant.dtype), "width": variant.W}
    for heads in ((2, 64), (1, 192)):
        run(case([70, 1, 2, 40], "cpu", 200, heads=heads, silu=False, **kind))
        run(case(TREE, "cpu", 200, heads=heads, **kind))
        run(case((2, 30), "cpu", 200, heads=heads, **kind))


@pytest.mark.parametrize("tokens", [1, 3, 37, 1000])
def test_heads_in_runs_of_any_length(tokens, monkeypatch):
    monkeypatch.setattr(launch, "run_tokens", lambda *_: tokens)
    for heads in ((1, 128), (1, 256)):
        run(case([3, 1, 90, 0, 40], "cpu", 264, heads=heads, projection=16))


def test_a_gradient_in_sections():
    for heads, sizes in (
        ((2, 64), [64, 64, 40]),
        ((4, 16), [32, 32, 8]),
        ((2, 192), [192, 192, 200]),
    ):
        x = case([20, 9], "cpu", sum(sizes), heads=heads)
        check_in_sections(x, sizes, launch.conv_bwd)
        check_in_sections(x, [sizes[0], sum(sizes[1:])], launch.conv_bwd)


def test_heads_of_zeros_and_of_numbers_of_every_size():
    """y is 0 for a head of zeros; its gradient and those of large numbers are finite."""
    x = case([9], "cpu", 136, heads=(1, 128), bias=False)
    assert not launch.conv_fwd(*x._replace(x=0 * x.x)[:-1]).any()
    for size in (0, 1e-4, 1e2, 1e4, 1e30):
        scaled = x._replace(x=x.x * size)
        assert launch.conv_fwd(*scaled[:-1]).isfinite().all()
        assert launch.conv_bwd(x.dy, *scaled[:-1]).dx.isfinite().all()


def test_interleavings_leave_no_trace(seeds):
    x = case(TREE, "cpu", channels=136)
    wide = case([70, 9], "cpu", channels=264, heads=(1, 256))

    def bwd(*args):
        seeds["seed"] += 1
        return launch.conv_bwd(*args)

    for given in (x, wide):
        check_repeats(given, launch.conv_fwd, bwd, times=4)


def test_wrong_tables_stay_inside():
    """The emulator reports accesses outside of tensors; there is nothing to compare."""
    broken = [
        [torch.tensor(bounds, dtype=torch.int32)]
        for bounds in ([0, 90, 20], [5, 3, 60], [-7, 2**30, -(2**31)], [40], [70, 80])
    ]
    tables = tree_tables(TREE.nodes, len(TREE.tout), 4)
    for name in tables._fields:
        for value in (-(2**31), -5, 7, 2**31 - 1):
            wrong = torch.full_like(getattr(tables, name), value)
            broken.append(list(tables._replace(**{name: wrong})))
    for given in broken:
        x = case(TREE, "cpu", channels=8)._replace(tables=given)
        launch.conv_fwd(*x[:-1])
        launch.conv_bwd(x.dy, *x[:-1])


PLACES = {
    "tokens": lambda slots, C, W: torch.randn(slots, W - 1, C).mT,
    "channels": lambda slots, C, W: torch.randn(slots, C, W - 1),
    "more places": lambda slots, C, W: torch.randn(slots, C, W + 2),
}
PROMPTS = [  # lengths, heads, channels, form of the pool
    ([1, 1, 2, 40, 3, 0, 9, 70], (0, 0), 40, "tokens"),
    ([17, 1, 2], (2, 16), 40, "channels"),
    ([2] * 20, (2, 128), 264, "more places"),
    ([130], (1, 160), 168, "tokens"),
]


@pytest.mark.kernels("conv.prefill")
@pytest.mark.parametrize("tokens", [1, 2, 5, 37])
@pytest.mark.parametrize("variant", prefill.VARIANTS, ids=jit.variant_id)
def test_prompts_go_on_from_a_pool(variant, tokens, monkeypatch):
    """Runs of any length; sequences that start from nothing, keep tokens on the way, are short."""
    monkeypatch.setattr(launch, "run_tokens", lambda *_: tokens)
    W, dtype = variant.W, getattr(torch, variant.dtype)
    for lengths, heads, C, form in PROMPTS:
        N = len(lengths)
        pool = PLACES[form](2 * N + 3, C, W).to(dtype)
        ends, kept = (torch.randperm(2 * N + 2)[: 2 * N].int() + 1).split(N)
        starts = torch.where(torch.rand(N) < 0.6, ends, 0).int()
        offsets = torch.tensor([n * (i % 3) // 2 for i, n in enumerate(lengths)]).int()
        x = torch.randn(sum(lengths) + 3, C + 8).to(dtype)[:, :C]
        x[sum(lengths) :] = torch.nan
        weight, bias = torch.randn(C, W).to(dtype), torch.randn(C).to(dtype)
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        tables = bounds, starts, ends, offsets, kept
        exact, want_pool = x.nan_to_num().double(), pool.double()
        call = weight.double(), bias.double(), *tables, 0, True, *heads
        want = ops.conv_prefill(exact, want_pool, *call)
        y = launch.conv_prefill(x, pool, weight, bias, *tables, 0, True, *heads)
        assert torch.equal(pool.double(), want_pool)
        assert_close("y", y, want, ROUNDING[dtype])
