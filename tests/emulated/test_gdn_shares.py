"""Equal shares of chunks for CTAs, emulated: the bits are those of whole items."""

import math

import pytest
import torch

import qla_kernels.tile.language as T
from qla_kernels.gdn import bands, plan
from qla_kernels.gdn.kernels import fused_fwd
from qla_kernels.gdn.kernels.chain import forward as chain_forward
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.lab.emulator import EmulatedKernel
from qla_kernels.lab.selftest.gdn_calls import small
from qla_kernels.lab.selftest.gdn_forward import check, check_saved, forward
from qla_kernels.lab.selftest.gdn_shares import KERNEL, SHARED, assert_same_bits, both
from qla_kernels.runtime import device, jit

pytestmark = [
    pytest.mark.usefixtures("seeds", "poison"), pytest.mark.kernels("gdn.share_table"),
]  # fmt: skip

WITHOUT = {"initial_state": None}


@pytest.mark.parametrize("seed", range(6))
def test_interleavings(seed, seeds):
    """Shares of 7 or 8 chunks, of pieces with and without tails, some of them empty."""
    seeds["seed"] = seed
    x = small([70, 0, 1, 200, 128, 0], heads=(1, 3))
    want, got = both(x, is_train=True)
    assert_same_bits(x, want, got)
    check(x, got.o, got.final_state)
    check_saved(x, got.g_cum, got.A)


@pytest.mark.parametrize(
    ("lengths", "heads", "ctas"),
    [
        ([1], (1, 1), 4),  # fewer chunks than CTAs
        ([64, 65], (1, 1), 8),
        ([700], (1, 1), 5),  # an item longer than several shares: each CTA takes and gives
        ([640, 30], (1, 2), 5),
        ([256, 256], (1, 2), 4),  # borders of shares are those of items
        ([129] * 3, (2, 4), 5),
        ([0, 0], (1, 2), 4),
        ([300], (1, 1), 1),  # one CTA for all
    ],
)
def test_shares_of_every_kind(lengths, heads, ctas, monkeypatch):
    monkeypatch.setattr(device, "sm_count", lambda _: ctas)
    x = small(lengths, heads=heads)
    for changed in ({}, WITHOUT, {"output_final_state": False}):
        want, got = both(x | changed)
        assert_same_bits(x, want, got)


def test_a_state_that_is_not_taken_shows(monkeypatch):
    """What is compared depends on the states that go from CTA to CTA."""
    monkeypatch.setattr(chain_forward, "take_state", lambda *_: T.evaluate(0))
    variant = fused_fwd.Variant("bfloat16", 128, 128, True, shares=True)
    broken, compile = EmulatedKernel(fused_fwd.build(variant), fused_fwd.PASS_CONFIGS), jit.compile
    taken = {(fused_fwd, variant): broken}
    monkeypatch.setattr(jit, "compile", lambda *of: taken.get(of) or compile(*of))
    x = small([700], heads=(1, 1))
    with pytest.raises(AssertionError, match="numbers differ"):
        assert_same_bits(x, *both(x))


def test_fp16():
    x = small([130, 65, 300], torch.float16)
    want, got = both(x, is_train=True)
    assert_same_bits(x, want, got)


@pytest.mark.parametrize("sizes", [(128, 256), (96, 128)])
def test_two_tiles_of_v_and_keys_of_fewer_numbers(sizes):
    x = small([200, 65], sizes=sizes, heads=(1, 3))
    want, got = both(x, is_train=True)
    assert_same_bits(x, want, got)


def test_a_dense_batch_with_states_of_any_strides():
    x = small(batch=3, tokens=170, heads=(1, 3))
    want, got = both(x)
    assert_same_bits(x, want, got)
    check(x, got.o, got.final_state)
    v_first = x | {"initial_state": x["initial_state"].mT.contiguous(), "state_v_first": True}
    _, turned = both(v_first)
    assert torch.equal(turned.o, got.o)
    assert torch.equal(turned.final_state.mT, got.final_state)


def test_a_beta_of_16_bits_and_raw_gates():
    x = small([33, 0, 150], heads=(2, 4), activations=True)
    want, got = both(x)
    assert_same_bits(x, want, got)
    x["beta"] = x["beta"].bfloat16()
    want, got = both(x)
    assert_same_bits(x, want, got)


SEGMENTS = ForwardChoice(64, True)
BY_LENGTH = {  # two value heads: at most two chunks of a longest sequence are cut, or items whole
    "one path": SHARED._replace(most_cut=2),
    "shares, or segments from 4 chunks on": bands.banded(
        {0: (KERNEL, 0), 4: (SEGMENTS, 6)}, SEGMENTS, -12.0, most_cut=2
    ),
}


@pytest.mark.parametrize("taken", BY_LENGTH)
def test_lengths_that_the_device_alone_knows(taken):
    """One plan, and so one graph, for any lengths: shares, whole items, or another path."""
    x = small([128, 70, 128, 26], heads=(1, 2))
    for lengths in ([128, 70, 128, 26], [0, 65, 1, 100], [64, 100, 188, 0], [1, 31, 20, 300]):
        x["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
        want, got = both(x, BY_LENGTH[taken], is_train=True)
        if max(lengths) <= 192 or taken == "one path":
            assert_same_bits(x, want, got, f"{lengths}: ")
        check(x, got.o, got.final_state)


def noted(monkeypatch) -> list[str]:
    """Returns the names of the kernels that are launched from now on."""
    launched, compile = [], jit.compile

    def note(module, variant):
        launched.append(module.__name__.rpartition(".")[2])
        return compile(module, variant)

    monkeypatch.setattr(jit, "compile", note)
    return launched


@pytest.fixture
def gaining(monkeypatch):
    """Shares are taken wherever they can be."""
    monkeypatch.setattr(plan, "gains", lambda shared, _: shared < math.inf)
    monkeypatch.setattr(bands, "SHARES_LOSE", math.inf)
    caches = plan.forward, bands.forward, bands._forward
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_a_plan_with_shares(monkeypatch, gaining):
    """Not where results may not depend on the batch, or where items fit a wave of CTAs."""
    launched = noted(monkeypatch)
    x = small([200, 250], heads=(1, 3))
    alone = small([200, 250], heads=(1, 2))
    calls = (
        (x | {"cu_seqlens_cpu": x["cu_seqlens"]}, True),
        (small(batch=2, tokens=200, heads=(1, 3)), True),
        (x, True),
        (alone, False),
        (alone | {"cu_seqlens_cpu": alone["cu_seqlens"]}, False),
        (x | {"cu_seqlens_cpu": x["cu_seqlens"], "auto_cp": False}, False),
        (x | {"auto_cp": False}, False),
    )
    for given, shared in calls:
        launched.clear()
        done = forward(given)
        check(given, done.o, done.final_state)
        assert ("share_table" in launched) == shared
