"""Cutting a sequence into segments changes nothing: folded exactly, or warm within its bound."""

from typing import NamedTuple

import pytest
import torch
from einops import repeat
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import gdn
from reference.chunks import cut, sequence_spans
from reference.gdn_chunked import forward_tiles, operand_rounding, start_states, value_tiles
from reference.gdn_segments import (
    WARM_LOG_BOUND,
    SegmentMaps,
    cut_segments,
    segment_maps,
    warm_windows,
)
from tests.compare import assert_close, relative_l2
from tests.maths.inputs import BETAS, GATES, KEYS, Inputs, make

EXACT = 1e-12
WARM = 2e-5  # e^-12 = 6e-6 of the state before the window, which may be larger than the one after
SIZE = 16  # of a chunk, so that segments of several chunks stay small


def check(x: Inputs, rel: float, **options) -> None:
    want_o, want_state = gdn.recurrent(*x)
    o, state = gdn.segmented(*x, chunk_size=SIZE, **options)
    assert_close("o", o, want_o, rel)
    assert_close("final_state", state, want_state, rel)


class Parts(NamedTuple):
    """What `segmented` works with, [P, ...] by segment."""

    maps: SegmentMaps
    in_window: Tensor  # [P, chunks, HV]
    warm: Tensor  # [P, HV]
    log_bound: Tensor  # [P, HV] of |M|


def parts(x: Inputs, segment_chunks: int) -> Parts:
    segments = cut_segments(sequence_spans(1, x.q.shape[1], x.cu_seqlens), segment_chunks * SIZE)
    chunks = cut(segments.spans, SIZE, x.q.device)
    rounded = operand_rounding(None)
    tiles, gamma = forward_tiles(chunks, x.q, x.k, x.g, x.beta, rounded)
    v = value_tiles(chunks, x.v, x.q.shape[2], torch.float64)
    nothing = start_states(None, v, chunks, x.q.shape[3])
    maps = segment_maps(chunks, tiles, gamma, v, segments, nothing, False, rounded)
    in_window, warm = warm_windows(chunks, tiles.k, tiles.beta[..., 0], gamma)
    grid = torch.zeros(len(segments.spans), len(chunks.counts), x.v.shape[2], dtype=torch.bool)
    grid[chunks.sequence, chunks.step] = in_window.flatten(1)
    group = x.v.shape[2] // x.k.shape[2]
    growth = (1 - x.beta * repeat(x.k.square().sum(-1), "b t h -> b t (h r)", r=group)).abs()
    log_factors = (x.g + growth.clamp(min=1).log())[0]
    log_bound = torch.stack([log_factors[a:b].sum(0) for a, b in segments.spans.tolist()])
    return Parts(maps, grid, warm.flatten(1), log_bound)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 15, 16, 17, 64, 65, 130]), max_size=4),
    heads=st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)]),
    gate=st.sampled_from(GATES),
    key=st.sampled_from(KEYS),
    beta=st.sampled_from(BETAS),
    initial_state=st.booleans(),
    padding=st.integers(0, 2),
    segment_chunks=st.integers(1, 4),
)
def test_segmented_is_recurrent(lengths, segment_chunks, **kind):
    torch.manual_seed(0)
    x = make(lengths, **kind)
    check(x, EXACT, segment_chunks=segment_chunks, warm=False)
    check(x, WARM, segment_chunks=segment_chunks, warm=True)


@pytest.mark.parametrize("length", [0, 1, 64, 65, 200])
def test_dense_batches(length):
    check(make(length, batch=2, heads=(2, 4)), EXACT, segment_chunks=2, warm=False)


def test_sequences_that_end_where_a_segment_does():
    check(make([64, 0, 128, 63, 65]), EXACT, segment_chunks=4, warm=False)


@pytest.mark.parametrize("gate", ["mild", "zero", "some -inf"])
@pytest.mark.parametrize("key", ["unit", "low rank"])
def test_a_segment_is_an_affine_map_and_its_adjoint_is_the_transpose(gate, key):
    x = make(64, gate=gate, key=key)
    b, M, _ = parts(x, segment_chunks=4).maps
    _, end = gdn.recurrent(*x)
    assert_close("M S + b", M @ x.initial_state + b, end, EXACT)
    saved, dht, no_do = gdn.chunked(*x), torch.randn_like(x.initial_state), torch.zeros_like(x.v)
    first, rest = (x.q, x.k, x.v, saved.g_cum, x.beta, saved.A), (x.initial_state, x.cu_seqlens)
    dh0 = gdn.chunked_backward(*first, no_do, dht, None, *rest).dh0
    assert_close("M^T dS", M.mT @ dht, dh0, EXACT)


@pytest.mark.parametrize("gate", ["mild", "zero", "positive", "firm"])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("beta", BETAS)
def test_the_bound_holds(gate, key, beta):
    found = parts(make([64, 64], gate=gate, key=key, beta=beta), segment_chunks=2)
    norms = torch.linalg.matrix_norm(found.maps.M, 2)
    assert (norms.log() <= found.log_bound + 1e-9).all()


def test_warm_and_folded_heads_side_by_side():
    """Head 0 never decays and is folded; head 1 loses e^-8 a chunk, so two chunks are enough."""
    x = make(6 * 4 * SIZE, sizes=(8, 5))
    x.g[..., 0] = 0
    x.g[..., 1] = -0.5
    found = parts(x, segment_chunks=4)
    assert not found.warm[:, 0].any()
    assert found.warm[:, 1].all()
    assert found.in_window[:, :, 0].all()
    assert found.in_window[:, :, 1].sum(1).tolist() == [2] * 6
    check(x, WARM, segment_chunks=4, warm=True)
    want, _ = gdn.recurrent(*x)
    o, _ = gdn.segmented(*x, chunk_size=SIZE, segment_chunks=4, warm=True)
    assert_close("the folded head", o[:, :, 0], want[:, :, 0], EXACT)
    assert relative_l2(o[:, :, 1], want[:, :, 1]) > 1e-9, "the warm head was not truncated"


def test_the_first_segment_is_never_truncated():
    """Its end state costs nothing extra: it starts from the initial state."""
    x = make(2 * 4 * SIZE)
    x.g[:] = -0.5  # e^-16 over the two chunks of a window: truncation would show
    assert parts(x, segment_chunks=4).warm.all()
    check(x, EXACT, segment_chunks=4, warm=True)


def test_keys_that_grow_the_state_lengthen_the_window():
    """Two chunks decay by e^-13, but three of their tokens have beta |k|^2 = 12: each multiplies
    the state along its key by -11, together by e^7.2. By decay alone two chunks would look enough.
    """
    window = 2 * SIZE
    x = make(2 * window, heads=(1, 1), sizes=(2, 5), beta="one", key="one direction")
    x.g[:] = -13 / window
    x.k[:, -3:] *= 12**0.5
    x.beta[:, window:-3] = 0  # what was written before the window is the whole state after it
    x.v[:, window:] = 0
    assert x.g[:, -window:].sum() < WARM_LOG_BOUND
    assert parts(x, segment_chunks=4).in_window.sum() == 3

    three_segments = Inputs(*(torch.cat([t] * 3, 1) for t in x[:5]), *x[5:])
    check(three_segments, WARM, segment_chunks=4, warm=True)
    assert gdn.recurrent(*x)[1].abs().max() > 1e-3
    assert (gdn.recurrent(*(t[:, -window:] for t in x[:5]))[1] == 0).all()


@pytest.mark.parametrize(
    ("length", "g", "warm"), [(1.0, 0.0, False), (12.0, -1.0, False), (128.0, -20.0, True)]
)
def test_keys_in_few_dimensions_through_many_segments(length, g, warm):
    """Where keys of squared length 12 may outgrow the decay, segments are folded: exactly."""
    x = make(1024, heads=(1, 1), sizes=(32, 8))
    basis = torch.randn(8, 32, dtype=torch.float64)
    k = length**0.5 * gdn.l2norm(torch.randn(1, 1024, 1, 8, dtype=torch.float64) @ basis)
    x = x._replace(k=k, g=torch.full_like(x.g, g))
    assert (parts(x, segment_chunks=2).warm == warm).all()
    check(x, WARM if warm else EXACT, segment_chunks=2, warm=True)
    check(x, EXACT, segment_chunks=2, warm=False)
