"""The backward at K = 256, emulated: its chains, its gradients, and both of its kinds of sums."""

import pytest
import torch
from torch import Tensor

from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.launch import chains
from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.lab.selftest import gdn_chains, gdn_wide_backward
from qla_kernels.lab.selftest.gdn_backward import SavedTensors, backward, check, gradients, saved
from qla_kernels.lab.selftest.gdn_calls import small
from qla_kernels.lab.selftest.gdn_inputs import gates, keys

pytestmark = pytest.mark.usefixtures("seeds", "poison")

K = 256
SIZES = (K, 64)
CHAINS = pytest.mark.kernels("gdn.wide_states", "gdn.wide_dstate")
ALL = pytest.mark.kernels("gdn.wide_states", "gdn.wide_dstate", "gdn.wide_grads")


def same(got: GdnBackward, want: GdnBackward) -> None:
    for name in GdnBackward._fields:
        a, b = getattr(got, name), getattr(want, name)
        assert a is b is None or torch.equal(a, b), name


@CHAINS
@pytest.mark.parametrize("gate", ["none", "strong", "total"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chains_with_gates_at_the_edge(gate, dtype):
    x = gdn_chains.case([130, 65], dtype, (1, 1), SIZES, gate, "low rank")
    gdn_wide_backward.check(x, gdn_wide_backward.run(x))


@CHAINS
@pytest.mark.parametrize("seed", range(6))
def test_interleavings_of_chains(seed, seeds):
    """Two value heads of two tiles, in three sequences: more CTAs than SMs."""
    seeds["seed"] = seed
    x = gdn_chains.case([70, 1, 200], heads=(1, 2), sizes=(K, 128))
    gdn_wide_backward.check(x, gdn_wide_backward.run(x))


@CHAINS
def test_chains_read_strides_in_place():
    x = gdn_chains.case([70, 65], heads=(2, 2), sizes=(K, 128))
    want = gdn_wide_backward.run(x)
    wide = torch.cat([x.q, x.k], 2), torch.cat([x.v, x.do], 2)  # slices of one projection
    slices = dict(zip(("q", "k"), wide[0].split(2, 2), strict=True))
    slices |= dict(zip(("v", "do"), wide[1].split(2, 2), strict=True))
    v_first = {name: getattr(x, name).mT.contiguous().mT for name in ("h0", "dht")}
    for changed in (slices, v_first):
        got = gdn_wide_backward.run(x._replace(**changed))
        assert all(map(torch.equal, got, want))


@pytest.mark.kernels("gdn.wide_states")
def test_states_of_chunks_as_a_forward_returns_them():
    x = gdn_chains.case([100, 0, 65], heads=(1, 2), sizes=SIZES)
    bounds, kept = x.cu_seqlens, gdn_chains.prepared(x)
    call = Call(x.q, x.k, x.v, x.g, x.beta, x.scale, x.h0, bounds, bounds)
    want = gdn_wide_backward.run(x, kept).h
    h = chains.public_states(call, Options(), x.beta, x.h0, kept)
    assert torch.equal(h[0].mT, want)
    assert torch.equal(
        chains.public_states(call, Options(state_v_first=True), x.beta, x.h0, kept)[0], want
    )


@ALL
@pytest.mark.parametrize("gate", ["none", "mild", "strong", "total"])
def test_gates_and_keys_at_the_edge(gate):
    x = small([130, 65], heads=(1, 1), sizes=SIZES)
    x["g"][0, :195] = gates(gate, 195, 1)
    x["k"][0, :195] = keys("low rank", 195, 1, K).bfloat16()
    do, dht = gradients(x)
    check(x, do, dht, backward(x, do, dht))


@ALL
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_beta_at_its_ends(beta):
    """dbeta is no quotient by beta."""
    x = small([100], sizes=SIZES)
    x["beta"][:, :100] = beta
    do, dht = gradients(x)
    check(x, do, dht, backward(x, do, dht))


@ALL
def test_many_tiles_of_values():
    """V of FLA's default is 512: eight tiles, two value heads a key head."""
    x = small([100], heads=(1, 2), sizes=(K, 512))
    do, dht = gradients(x)
    check(x, do, dht, backward(x, do, dht))


@ALL
def test_interleavings_leave_no_trace(seeds):
    """Pairs of chunk and key head for several rounds of the CTAs, tails among them."""
    x = small([70, 1, 200], heads=(2, 4), sizes=SIZES)
    do, dht = gradients(x)
    kept = saved(x)
    want = backward(x, do, dht, kept)
    check(x, do, dht, want)
    for seeds["seed"] in range(1, 6):
        same(backward(x, do, dht, kept), want)


@ALL
@pytest.mark.kernels("gdn.l2norm", "gdn.l2norm_bwd")
def test_activations_as_a_model_uses_them():
    x = small([33, 0, 100], heads=(1, 2), sizes=(K, 128), activations=True)
    do, dht = gradients(x)
    check(x, do, dht, backward(x, do, dht))


@ALL
def test_neighbours_of_a_sequence_do_not_matter():
    x = small([70, 100, 33], heads=(1, 1), sizes=SIZES)
    do, dht = gradients(x)
    kept = saved(x)
    want = backward(x, do, dht, kept)
    for t in (x["q"], x["k"], x["v"], x["beta"], do, *kept):
        t[:, 70:170] = torch.nan
    got = backward(x, do, dht, kept)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        for part in (slice(0, 70), slice(170, None)):
            assert torch.equal(getattr(got, name)[:, part], getattr(want, name)[:, part]), name
    assert torch.equal(got.dh0[[0, 2]], want.dh0[[0, 2]])


@ALL
def test_a_batch_is_its_packing_and_absent_gradients_are_zeros():
    x = small(batch=2, tokens=70, heads=(1, 1), sizes=SIZES)
    do, _ = gradients(x)
    kept = saved(x)
    want = backward(x, do, None, kept)
    check(x, do, None, want)

    def pack(t: Tensor) -> Tensor:
        return t.flatten(0, 1)[None]

    packed = {name: t if name == "initial_state" else pack(t) for name, t in x.items()}
    packed["cu_seqlens"] = torch.tensor([0, 70, 140])
    got = backward(packed, pack(do), None, SavedTensors(*map(pack, kept)))
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(getattr(got, name).view_as(getattr(want, name)), getattr(want, name))
    assert torch.equal(got.dh0, want.dh0)


@ALL
def test_rows_that_do_not_flatten_run_one_by_one():
    """Head-major q, k and v of a batch: each row is a launch of its own."""
    x = small(batch=2, tokens=70, heads=(1, 2), sizes=SIZES)
    do, dht = gradients(x)
    kept = saved(x)
    want = backward(x, do, dht, kept)
    for name in ("q", "k", "v"):
        x[name] = x[name].transpose(1, 2).contiguous().transpose(1, 2)
    same(backward(x, do, dht, kept), want)


def test_without_tokens_states_pass_through():
    x = small([0, 0], sizes=SIZES, padding=0)
    do, dht = gradients(x)
    got = backward(x, do, dht)
    assert torch.equal(got.dh0, dht)
