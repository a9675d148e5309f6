"""The gradients written out by hand are autograd's through the recurrence, in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import gdn
from tests.compare import assert_close
from tests.maths.inputs import BETAS, CASES, GATES, KEYS, Inputs, make

EXACT = 1e-12


def gradients(x: Inputs, do: Tensor, dht: Tensor | None) -> gdn.Backward:
    """By autograd of the definition."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (*x[:5], x.initial_state)]
    o, final_state = gdn.recurrent(*leaves[:5], x.scale, leaves[5], x.cu_seqlens)
    loss = (o * do).sum() + (0 if dht is None else (final_state * dht).sum())
    wanted = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad(loss, wanted, materialize_grads=True))
    dq, dk, dv, dg, dbeta, dh0 = (None if t is None else next(found) for t in leaves)
    return gdn.Backward(dq, dk, dv, dbeta, dg, dh0)


def by_hand(x: Inputs, do: Tensor, dht: Tensor | None, **options) -> gdn.Backward:
    saved = gdn.chunked(*x, **options)
    return gdn.chunked_backward(
        x.q,
        x.k,
        x.v,
        saved.g_cum,
        x.beta,
        saved.A,
        do,
        dht,
        x.scale,
        x.initial_state,
        x.cu_seqlens,
        **options,
    )


def check(
    x: Inputs,
    with_dht: bool = True,
    rel: float = EXACT,
    at_least: float = 0.0,
    chunk_size: int = 64,
) -> None:
    num_sequences = x.q.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    tokens = x.q.shape[1] if x.cu_seqlens is None else int(x.cu_seqlens[-1])
    do = torch.randn_like(x.v)
    do[:, tokens:] = torch.nan
    dht = torch.randn(num_sequences, x.v.shape[2], x.q.shape[3], x.v.shape[3]).double()
    dht = dht if with_dht else None
    # NaN rows belong to no sequence, but times autograd's zeros they would be NaN.
    live = x._replace(**{n: getattr(x, n)[:, :tokens] for n in ("q", "k", "v", "g", "beta")})
    want = gradients(live, do[:, :tokens], dht)
    got = by_hand(x, do, dht, chunk_size=chunk_size)
    for name in ("dq", "dk", "dv", "dbeta", "dg"):
        assert_close(
            name, getattr(got, name)[:, :tokens], getattr(want, name), rel, at_least=at_least
        )
        assert (getattr(got, name)[:, tokens:] == 0).all(), f"{name} of no sequence's tokens"
    if x.initial_state is None:
        assert got.dh0 is None
    else:
        assert_close("dh0", got.dh0, want.dh0, rel, at_least=at_least)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(with_dht=st.booleans(), chunk_size=st.sampled_from([16, 64]), **CASES)
def test_backward_is_autograd(with_dht, chunk_size, lengths, **kind):
    torch.manual_seed(0)
    check(make(lengths, **kind), with_dht, at_least=1e-3, chunk_size=chunk_size)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("beta", BETAS)
def test_every_pair_of_extremes(gate, key, beta):
    check(make([0, 17, 0, 33, 1], gate=gate, key=key, beta=beta, heads=(1, 4)), chunk_size=16)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128])
def test_dense_batches(length):
    check(make(length, batch=2, heads=(2, 4)))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [0, 5], [5, 0, 70]])
def test_empty_sequences_pass_gradients_through(lengths):
    x = make(lengths, padding=1)
    check(x)
    dht = torch.randn_like(x.initial_state)
    got = by_hand(x, torch.randn_like(x.v), dht)
    for n, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(got.dh0[n], dht[n])


class ByHand(torch.autograd.Function):
    """The two halves as autograd sees them, for gradcheck."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, cu_seqlens):
        x = Inputs(q, k, v, g, beta, None, initial_state, cu_seqlens)
        saved = gdn.chunked(*x, chunk_size=2)
        ctx.save_for_backward(q, k, v, saved.g_cum, beta, saved.A, initial_state, cu_seqlens)
        return saved.o, saved.final_state

    @staticmethod
    def backward(ctx, do, dht):
        *first, initial_state, cu_seqlens = ctx.saved_tensors
        grads = gdn.chunked_backward(*first, do, dht, None, initial_state, cu_seqlens, chunk_size=2)
        dq, dk, dv, dbeta, dg, dh0 = grads
        return dq, dk, dv, dg, dbeta, dh0, None


@pytest.mark.parametrize(
    ("lengths", "heads"), [([3, 0, 1, 2], (1, 2)), ([5], (2, 2)), (3, (1, 1))], ids=str
)
def test_gradcheck(lengths, heads):
    x = make(lengths, heads=heads, sizes=(2, 2))
    leaves = [t.requires_grad_() for t in (*x[:5], x.initial_state)]
    assert torch.autograd.gradcheck(ByHand.apply, (*leaves, x.cu_seqlens))


def test_autograd_through_the_chunked_form_agrees():
    x = make([70, 3], heads=(1, 2))
    do, dht = torch.randn_like(x.v), torch.randn_like(x.initial_state)
    leaves = [t.detach().requires_grad_() for t in (*x[:5], x.initial_state)]
    saved = gdn.chunked(*leaves[:5], None, leaves[5], x.cu_seqlens)
    want = torch.autograd.grad([saved.o, saved.final_state], leaves, [do, dht])
    got = by_hand(x, do, dht)
    for name, expected in zip(("dq", "dk", "dv", "dg", "dbeta", "dh0"), want, strict=True):
        assert_close(name, getattr(got, name), expected, EXACT)


@pytest.mark.parametrize("gate", ["strong", "total"])
def test_dg_keeps_its_digits_when_a_final_state_has_a_gradient(gate):
    """dg is of order e^-20 or e^-70, <K, dKi> of the last token of order 1: it must not be added
    and taken away again."""
    x = make([64, 10, 130], gate=gate)
    do, dht = torch.randn_like(x.v), torch.randn_like(x.initial_state)
    want = gradients(x, do, dht).dg
    assert want.abs().max() < 1e-6
    assert_close("dg in fp64", by_hand(x, do, dht).dg, want, EXACT)
    single = Inputs(*(t.float() for t in x[:5]), None, x.initial_state.float(), x.cu_seqlens)
    if gate == "strong":  # e^-70 per token is a subnormal number in fp32 after two
        got = by_hand(single, do.float(), dht.float()).dg
        assert_close("dg in fp32", got, want, 1e-5)


def test_neighbours_full_of_nan_do_not_leak():
    x = make([70, 70, 70])
    saved, do = gdn.chunked(*x), torch.randn_like(x.v)
    rest = (None, None, x.initial_state, x.cu_seqlens)
    want = gdn.chunked_backward(x.q, x.k, x.v, saved.g_cum, x.beta, saved.A, do, *rest)
    poisoned = [t.clone() for t in (x.q, x.k, x.v, saved.g_cum, x.beta, saved.A, do)]
    for t in poisoned:
        t[:, 70:140] = torch.nan
    got = gdn.chunked_backward(*poisoned, *rest)
    for name in ("dq", "dk", "dv", "dbeta", "dg"):
        for rows in (slice(0, 70), slice(140, 210)):
            assert torch.equal(getattr(got, name)[:, rows], getattr(want, name)[:, rows])
    assert torch.equal(got.dh0[[0, 2]], want.dh0[[0, 2]])


def test_packed_is_one_by_one():
    lengths = [3, 0, 65, 128]
    x = make(lengths, heads=(2, 4))
    do, dht = torch.randn_like(x.v), torch.randn_like(x.initial_state)
    packed = by_hand(x, do, dht)
    for n, rows in enumerate(torch.arange(sum(lengths)).split(lengths)):
        alone = Inputs(*(t[:, rows] for t in x[:5]), None, x.initial_state[n : n + 1], None)
        want = by_hand(alone, do[:, rows], dht[n : n + 1])
        for name in ("dq", "dk", "dv", "dbeta", "dg"):
            assert_close(name, getattr(packed, name)[:, rows], getattr(want, name), 1e-14)
        assert_close("dh0", packed.dh0[n : n + 1], want.dh0, 1e-14)


def test_head_groups_change_nothing(monkeypatch):
    x = make([100, 37], heads=(3, 6))
    do, dht = torch.randn_like(x.v), torch.randn_like(x.initial_state)
    want = by_hand(x, do, dht)
    monkeypatch.setattr("reference.gdn_chunked.TEMPORARY_BYTES", {"cpu": 1})
    for got, expected in zip(by_hand(x, do, dht), want, strict=True):
        assert_close("one key head at a time", got, expected, 1e-14)
    assert by_hand(x._replace(initial_state=None), do, dht).dh0 is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_result_dtypes(dtype):
    x = make([65, 3])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    cast = Inputs(*(t.to(dtype) for t in x[:4]), x.beta.float(), None, *x[6:])
    got = by_hand(cast, torch.ones_like(cast.v[:1, :1]).expand_as(cast.v), None)
    assert (got.dq.dtype, got.dk.dtype, got.dv.dtype) == (dtype, dtype, dtype)
    assert (got.dbeta.dtype, got.dg.dtype, got.dh0.dtype) == (torch.float32, wide, wide)


def in_parts(x: Inputs, parts: int) -> Inputs:
    """The same call with each part of V as a value head, and with one more column of zeros in K."""
    q, k, v, g, beta, scale, h0, bounds = x
    scale = x.q.shape[3] ** -0.5 if scale is None else scale
    q, k = (torch.nn.functional.pad(t, (0, 1)) for t in (q, k))
    v = v.unflatten(3, (parts, -1)).flatten(2, 3)
    g, beta = (t.repeat_interleave(parts, 2) for t in (g, beta))
    h0 = torch.nn.functional.pad(h0, (0, 0, 0, 1))
    h0 = h0.unflatten(3, (parts, -1)).transpose(2, 3).flatten(1, 2)
    return Inputs(q, k, v, g, beta, scale, h0, bounds)


@pytest.mark.parametrize("parts", [2, 3])
def test_columns_of_v_are_value_heads_and_zeros_of_k_are_nothing(parts):
    """Gates that parts share have the sums of their gradients; added columns have none."""
    x = make([70, 0, 130], heads=(2, 4), sizes=(5, 6), initial_state=True)
    split = in_parts(x, parts)
    do, dht = torch.randn_like(x.v), torch.randn_like(x.initial_state)
    apart = in_parts(x._replace(v=do, initial_state=dht), parts)
    want, got = by_hand(x, do, dht), by_hand(split, apart.v, apart.initial_state)
    exact = {"rtol": EXACT, "atol": EXACT}
    for name in ("dq", "dk"):
        torch.testing.assert_close(getattr(got, name)[..., :-1], getattr(want, name), **exact)
    torch.testing.assert_close(got.dv.flatten(2), want.dv.flatten(2), **exact)
    for name in ("dg", "dbeta"):
        sums = getattr(got, name).unflatten(2, (-1, parts)).sum(3)
        torch.testing.assert_close(sums, getattr(want, name), **exact)
    heads = in_parts(x._replace(initial_state=want.dh0), parts).initial_state
    torch.testing.assert_close(got.dh0[:, :, :-1], heads[:, :, :-1], **exact)
    assert not got.dh0[:, :, -1].any()
