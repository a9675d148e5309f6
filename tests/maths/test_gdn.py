"""The chunked gated delta rule is the recurrence: forward, in fp64, over lengths and extremes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import gdn
from reference.chunks import cut, sequence_spans
from tests.compare import assert_close
from tests.maths.inputs import BETAS, CASES, GATES, KEYS, Inputs, make

EXACT = 1e-12


def check(x: Inputs, rel: float = EXACT, chunk_size: int = 64) -> None:
    tokens = x.q.shape[1] if x.cu_seqlens is None else int(x.cu_seqlens[-1])
    want_o, want_state = gdn.recurrent(*x)
    got = gdn.chunked(*x, chunk_size=chunk_size)
    assert_close("o", got.o, want_o, rel)
    assert_close("final_state", got.final_state, want_state, rel)
    for name in ("g_cum", "A", "o"):
        assert (getattr(got, name)[:, tokens:] == 0).all(), f"{name} of no sequence's tokens"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(chunk_size=st.sampled_from([16, 64]), **CASES)
def test_chunked_is_recurrent(chunk_size, lengths, **kind):
    torch.manual_seed(0)
    check(make(lengths, **kind), chunk_size=chunk_size)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("beta", BETAS)
def test_every_pair_of_extremes(gate, key, beta):
    check(make([0, 70, 0, 129, 1, 0], gate=gate, key=key, beta=beta, heads=(1, 4), padding=2))


@pytest.mark.parametrize("length", [0, 1, 15, 16, 63, 64, 65, 127, 128])
def test_dense_batches(length):
    check(make(length, batch=3, heads=(2, 4)))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [0, 5], [5, 0], [5, 0, 64]])
def test_empty_sequences_pass_their_state_through(lengths):
    x = make(lengths, padding=1)
    check(x)
    got = gdn.chunked(*x).final_state
    for n, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(got[n], x.initial_state[n])


def test_no_batch_rows():
    got = gdn.chunked(*make(5, batch=0))
    assert got.o.shape == (0, 5, 2, 5)
    assert got.h.shape == (0, 0, 2, 6, 5)
    assert got.final_state.shape == (0, 2, 6, 5)


def test_long_keys_that_decay_stay_finite_in_fp32():
    """|k|^2 = 128 and g = -2: the inverse without gates overflows, the gated one does not."""
    x = make(256, sizes=(64, 16), gate="firm")
    k = x.k * 128**0.5
    want, _ = gdn.recurrent(x.q, k, x.v, x.g, x.beta)
    assert_close("o in fp64", gdn.chunked(x.q, k, x.v, x.g, x.beta).o, want, EXACT)
    single = [t.float() for t in (x.q, k, x.v, x.g, x.beta)]
    assert_close("o in fp32", gdn.chunked(*single).o, want, 2e-6)
    q, k, v, g, beta = single
    gate_free = gdn.chunked(q, k, v, torch.zeros_like(g), beta).A
    assert not gate_free.isfinite().all()


@pytest.mark.parametrize("beta", ["random", "one", "two"])
def test_keys_in_few_dimensions_that_never_decay(beta):
    """1024 tokens whose keys share 8 of 32 dimensions: each is corrected many times over."""
    x = make(1024, heads=(1, 1), sizes=(32, 8), gate="zero", beta=beta)
    basis = torch.randn(8, 32, dtype=torch.float64)
    k = gdn.l2norm(torch.randn(1, 1024, 1, 8, dtype=torch.float64) @ basis)
    check(x._replace(k=k), rel=1e-11 if beta == "two" else EXACT)


def test_chunk_size_does_not_matter():
    x = make([100, 37])
    want = gdn.chunked(*x)
    for chunk_size in (1, 7, 32, 200):
        got = gdn.chunked(*x, chunk_size=chunk_size)
        assert_close("o", got.o, want.o, EXACT)
        assert got.A.shape[-1] == chunk_size


def test_packed_is_one_by_one():
    lengths = [3, 0, 64, 65, 128, 1]
    x = make(lengths, heads=(2, 4))
    packed = gdn.chunked(*x)
    h = packed.h
    for n, rows in enumerate(torch.arange(sum(lengths)).split(lengths)):
        alone = (t[:, rows] for t in x[:5])
        want = gdn.chunked(*alone, None, x.initial_state[n : n + 1])
        for name in ("g_cum", "A", "o"):
            assert_close(name, getattr(packed, name)[:, rows], getattr(want, name), 1e-14)
        assert_close("final_state", packed.final_state[n : n + 1], want.final_state, 1e-14)
        own, h = h[:, : want.h.shape[1]], h[:, want.h.shape[1] :]
        assert_close("h", own, want.h, 1e-14)
    assert h.shape[1] == 0


def test_states_before_each_chunk():
    x = make(130)
    h = gdn.chunked(*x).h
    assert torch.equal(h[:, 0], x.initial_state)
    for i, tokens in ((1, 64), (2, 128)):
        _, want = gdn.recurrent(*(t[:, :tokens] for t in x[:5]), initial_state=x.initial_state)
        assert_close(f"h of chunk {i}", h[:, i], want, EXACT)


def test_neighbours_full_of_nan_do_not_leak():
    """The tile of a sequence's last chunk reaches into the next sequence."""
    x = make([70, 70, 70])
    want = gdn.chunked(*x)
    poisoned = [t.clone() for t in x[:5]]
    for t in poisoned:
        t[:, 70:140] = torch.nan
    got = gdn.chunked(*poisoned, *x[5:])
    for rows in (slice(0, 70), slice(140, 210)):
        assert torch.equal(got.o[:, rows], want.o[:, rows])
    assert torch.equal(got.final_state[[0, 2]], want.final_state[[0, 2]])


def test_head_groups_change_nothing(monkeypatch):
    x = make([100, 37], heads=(3, 6))
    want = gdn.chunked(*x)
    monkeypatch.setattr("reference.gdn_chunked.TEMPORARY_BYTES", {"cpu": 1})
    for got, expected in zip(gdn.chunked(*x), want, strict=True):
        assert_close("one key head at a time", got, expected, 1e-14)


def test_many_short_sequences_are_one_step():
    """The chain's length is the longest sequence's, however many there are."""
    bounds = torch.arange(301) * 7
    chunks = cut(sequence_spans(1, 2100, bounds), 64, torch.device("cpu"))
    assert chunks.counts == [300]
    assert chunks.rows.shape == (300, 64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_result_dtypes(dtype):
    x = make([65, 3])
    inputs = (t.to(dtype) for t in x[:5])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    got = gdn.chunked(*inputs, initial_state=x.initial_state.to(dtype), cu_seqlens=x.cu_seqlens)
    assert (got.A.dtype, got.o.dtype, got.h.dtype) == (dtype, dtype, dtype)
    assert (got.g_cum.dtype, got.final_state.dtype) == (wide, wide)


def test_cu_seqlens_of_int32():
    x = make([65, 3])
    assert torch.equal(gdn.chunked(*x).o, gdn.chunked(*x._replace(cu_seqlens=x.cu_seqlens.int())).o)
