"""The whole CUDA backward, emulated: launch_backward.gdn_bwd on CPU tensors, kernel by kernel."""

import pytest
import torch
from torch import Tensor

from qla_kernels.gdn.launch import backward as launch_backward
from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.lab.selftest.gdn_backward import SavedTensors, backward, check, gradients, saved
from qla_kernels.lab.selftest.gdn_calls import small
from qla_kernels.lab.selftest.gdn_inputs import gates, keys
from qla_kernels.runtime import jit
from reference import gdn
from tests.compare import assert_close

pytestmark = pytest.mark.usefixtures("seeds")


def same(got: GdnBackward, want: GdnBackward, *names: str) -> None:
    for name in names or GdnBackward._fields:
        a, b = getattr(got, name), getattr(want, name)
        assert a is b is None or torch.equal(a, b), name


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("gate", ["none", "mild", "strong", "total", "positive"])
@pytest.mark.parametrize("key", ["unit", "low rank"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_and_keys_at_the_edge(gate, key, dtype):
    x = small([130, 65], dtype)
    x["g"][0, :195] = gates("none", 195, 2) + 0.05 if gate == "positive" else gates(gate, 195, 2)
    x["k"][0, :195] = keys(key, 195, 1, 128).to(dtype)
    do, dht = gradients(x)
    check(x, do, dht, backward(x, do, dht))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_beta_at_its_ends(beta):
    """dbeta is no quotient by beta."""
    x = small([100])
    x["beta"][:, :100] = beta
    do, dht = gradients(x)
    check(x, do, dht, backward(x, do, dht))


@pytest.mark.usefixtures("poison")
def test_interleavings_leave_no_trace(seeds):
    """Pairs of chunk and key head for several rounds of the CTAs, tails among them."""
    x = small([70, 1, 200, 128], heads=(2, 4))
    do, dht = gradients(x)
    kept = saved(x)
    want = backward(x, do, dht, kept)
    check(x, do, dht, want)
    for seeds["seed"] in range(1, 6):
        same(backward(x, do, dht, kept), want)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_activations_as_a_model_uses_them(allow_neg_eigval):
    x = small([33, 0, 100], heads=(2, 4), activations=True, allow_neg_eigval=allow_neg_eigval)
    do, dht = gradients(x)
    check(x, do, dht, backward(x, do, dht))


@pytest.mark.usefixtures("poison")
def test_gradients_have_the_dtypes_of_their_inputs():
    x = small([70], activations=True)
    for name in ("g", "beta", "initial_state", "A_log", "dt_bias"):
        x[name] = x[name].bfloat16()
    do, dht = gradients(x)
    got = backward(x, do, dht)
    assert {got.dbeta.dtype, got.dg.dtype, got.dA_log.dtype} == {torch.bfloat16}
    assert got.dh0.dtype == torch.float32
    check(x, do, dht, got)


@pytest.mark.usefixtures("poison")
def test_absent_gradients_are_zeros():
    """An unused final state, and an unused o, whose gradient autograd expands from one zero."""
    x = small([100, 3])
    do, dht = gradients(x)
    check(x, do, None, backward(x, do))
    nothing = x["v"].new_zeros(()).expand(x["v"].shape)
    check(x, nothing, dht, backward(x, nothing, dht))


@pytest.mark.usefixtures("poison")
def test_a_state_that_needs_no_gradient_gets_none():
    x = small([70, 3])
    do, dht = gradients(x)
    want = backward(x, do, dht)
    got = backward(x, do, dht, output_dh0=False)
    assert got.dh0 is None
    same(got, want._replace(dh0=None))


@pytest.mark.usefixtures("poison")
def test_state_v_first_is_the_same_bits():
    x = small([100, 3])
    do, dht = gradients(x)
    want = backward(x, do, dht)
    h0 = x["initial_state"].mT.contiguous()
    got = backward(x, do, dht.mT.contiguous(), state_v_first=True, initial_state=h0)
    assert got.dh0.is_contiguous()
    same(got._replace(dh0=got.dh0.mT), want)


@pytest.mark.usefixtures("poison")
def test_neighbours_of_a_sequence_do_not_matter():
    x = small([70, 100, 33])
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


@pytest.mark.usefixtures("poison")
def test_a_batch_is_its_rows_and_its_packing():
    x = small(batch=3, tokens=70)
    do, dht = gradients(x)
    kept = saved(x)
    want = backward(x, do, dht, kept)
    check(x, do, dht, want)

    def pack(t: Tensor) -> Tensor:
        return t.flatten(0, 1)[None]

    packed = {name: t if name == "initial_state" else pack(t) for name, t in x.items()}
    packed["cu_seqlens"] = torch.tensor([0, 70, 140, 210])
    got = backward(packed, pack(do), dht, SavedTensors(*map(pack, kept)))
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(getattr(got, name).view_as(getattr(want, name)), getattr(want, name))
    assert torch.equal(got.dh0, want.dh0)
    for b in range(3):
        row = {name: t[b : b + 1] for name, t in x.items()}
        got = backward(
            row, do[b : b + 1], dht[b : b + 1], SavedTensors(*(t[b : b + 1] for t in kept))
        )
        for name in ("dq", "dk", "dv", "dg", "dbeta", "dh0"):
            assert torch.equal(getattr(got, name)[0], getattr(want, name)[b]), name


@pytest.mark.usefixtures("poison")
def test_strides_are_read_in_place():
    x = small(batch=2, tokens=70, heads=(2, 2))
    do, dht = gradients(x)
    kept = saved(x)
    want = backward(x, do, dht, kept)
    fused = torch.cat([x["q"], x["k"], x["v"]], 2)  # slices of one projection
    slices = dict(zip("qkv", fused.split(2, 2), strict=True))
    head_major = {n: x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    beta_last = {"beta": x["beta"].mT.contiguous().mT}
    for changed in (slices, head_major, beta_last):
        same(backward(x, do, dht, kept, **changed), want)


@pytest.mark.usefixtures("poison")
def test_a_gradient_comes_in_any_strides():
    x = small(batch=2, tokens=70, heads=(2, 2))
    do, dht = gradients(x)
    kept = saved(x)
    want = backward(x, do, dht, kept)
    head_major = do.transpose(1, 2).contiguous().transpose(1, 2)
    size_first = do.mT.contiguous().mT
    wider = torch.cat([do, do], -1)[..., 1:129]  # begins 2 bytes past a multiple of 16
    wider.copy_(do)
    for other in (head_major, size_first, wider):
        same(backward(x, other, dht.mT.contiguous().mT, kept), want)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("bounds", [torch.int32, torch.int64])
def test_l2norm_of_padding_tokens(bounds):
    """They may hold NaN, and their gradient is 0."""
    x, dy = (torch.randn(1, 70, 5, 64).bfloat16() for _ in range(2))
    for end in (0, 1, 69, 70):
        x[:, end:], dy[:, end:] = torch.nan, torch.nan
        cu_seqlens = torch.tensor([0, end // 2, end], dtype=bounds)
        dx = launch_backward.l2norm_bwd(x, dy, cu_seqlens)
        assert not dx[:, end:].any()
        live = [t[:, :end].double() for t in (x, dy)]
        assert_close("dx", dx[:, :end], gdn.l2norm_backward(*live), 3e-3)
        x, dy = (torch.randn(1, 70, 5, 64).bfloat16() for _ in range(2))


@pytest.mark.parametrize("shape", [{"batch": 0}, {"tokens": 0}, {"lengths": [], "padding": 5}])
def test_nothing_to_do(shape, monkeypatch):
    monkeypatch.setattr(jit, "compile", None)  # no kernel runs
    x = small(**shape)
    do, dht = gradients(x)
    kept = SavedTensors(torch.empty_like(x["g"]), x["q"].new_empty(*x["g"].shape, 64))
    got = backward(x, do, dht, kept)
    for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v"), ("dg", "g"), ("dbeta", "beta")):
        assert getattr(got, name).shape == x[like].shape
        assert not getattr(got, name).any()
    assert torch.equal(got.dh0, dht)
    assert not backward(x, do, None, kept).dh0.any()


def test_l2norm_of_nothing(monkeypatch):
    monkeypatch.setattr(jit, "compile", None)  # no kernel runs
    x = torch.empty(2, 0, 3, 64, dtype=torch.bfloat16)
    assert launch_backward.l2norm_bwd(x, x, None).shape == x.shape
