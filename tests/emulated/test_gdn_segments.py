"""Sequences in segments, emulated: where they are cut, the states that enter them, the whole."""

import pytest
import torch
from torch import Tensor

from qla_kernels.gdn.bands import banded
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.launch import segments
from qla_kernels.gdn.lengths import device_spacing
from qla_kernels.gdn.plan import EXACT_LOG_BOUND, WARM_LOG_BOUND, Plan
from qla_kernels.lab.selftest.gdn_segment_plan import sequence_chunks_of
from qla_kernels.lab.selftest.gdn_segments import (
    FP32,
    GIVEN,
    NEVER,
    RATIO,
    SOLVING,
    CutResults,
    SegmentedCall,
    batch,
    check_starts,
    expected,
    maps,
    run,
    starts,
    states_between,
)
from tests.compare import assert_close, relative_l2

pytestmark = [pytest.mark.usefixtures("seeds"), pytest.mark.usefixtures("poison")]


def check(x: SegmentedCall, got: CutResults) -> None:
    want, rounded = expected(x), expected(x, x.q.dtype)
    assert not got.o[:, x.bounds[-1] :].any(), "rows of padding tokens are not 0"
    for head in range(x.v.shape[2]):
        for name, a, b, c in (
            ("o", got.o[:, :, head], want.o[:, :, head], rounded.o[:, :, head].to(x.q.dtype)),
            (
                "final state",
                *(y[:, head] for y in (got.final, want.final_state, rounded.final_state)),
            ),
        ):
            limit = RATIO * relative_l2(c, b) + FP32
            assert_close(f"{name} of head {head}", a, b, limit)


@pytest.mark.parametrize("tokens", [1, 100, 4000])
def test_heads_that_forget_least_come_first(tokens):
    """Of equals the first one; what is no number comes last, and nobody is left out."""
    keep = torch.tensor([-3.0, 0.0, torch.nan, -0.01, 0.0, -torch.inf, -3.0])
    g = keep.expand(1, tokens + 2, 7).clone()
    g[:, tokens:] = torch.nan
    cut = segments.cut(g, torch.tensor([0, tokens]), 2)
    assert cut.heads.tolist() == [1, 4, 3, 0, 6, 2, 5]
    many = torch.randn(40).sort(descending=True).values
    cut = segments.cut(
        many.flip(0).expand(1, tokens, 40).contiguous(), torch.tensor([0, tokens]), 2
    )
    assert cut.heads.tolist() == list(range(39, -1, -1))


def test_open_ends_have_segments_of_their_own():
    """Two sequences of 3 and 2 chunks, the last of which is cut short."""
    cu_seqlens = torch.tensor([0, 192, 300])
    cut = segments.cut(torch.zeros(1, 300, 1), cu_seqlens, 2, segments.OpenEnds(2, 0b11))
    assert cut.bounds.tolist()[:7] == [0, 0, 64, 192, 300, 300, 300]
    assert cut.starts_of.tolist()[:6] == [0, -1, -1, 1, -1, -1]
    assert cut.ends_of.tolist()[:6] == [-1, -1, 0, -1, 1, -1]
    assert cut.first_segment.tolist() == [0, 3, 5]


@pytest.mark.parametrize("gate", ["none", "mild", "strong", "total"])
@pytest.mark.parametrize("solves", [True, False])
def test_gates_and_keys_at_the_edge(gate, solves):
    x = batch([450, 70], gate=gate, key="low rank")
    check_starts(x, starts(x, 2, WARM_LOG_BOUND, solves), 2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("solves", [True, False])
def test_interleavings(seed, solves, seeds):
    """Heads of which some fold, of three sequences: more CTAs than SMs."""
    seeds["seed"] = seed
    x = batch([250, 1, 190], heads=(1, 3))
    x.g[..., 2] = 0
    check_starts(x, starts(x, 1, WARM_LOG_BOUND, solves), 1)


@pytest.mark.parametrize("solves", [True, False])
def test_warm_and_cold_heads_and_segments_side_by_side(solves):
    """Head 0 forgets everywhere, head 1 nowhere, head 2 in the middle of the sequence."""
    x = batch([10 * 64], heads=(1, 3), gate="none")
    x.g[..., 0] = -0.2
    x.g[:, 4 * 64 : 6 * 64, 2] = -0.2
    check_starts(x, starts(x, 2, WARM_LOG_BOUND, solves), 2)


@pytest.mark.parametrize("solves", [True, False])
def test_a_warm_head_reads_its_window_alone(solves):
    """64 tokens leave e^-12.8: what comes before them may be anything, unless all is asked for."""
    x = batch([8 * 64])
    x.g[..., 0] = -0.2
    x.g[..., 1] = 0
    want = starts(x, 4, WARM_LOG_BOUND, solves)
    cut = segments.cut(x.g, x.cu_seqlens, 4)

    def entered(limit: float) -> Tensor:
        found = maps(x, cut, limit, solves)
        return segments.start_states(found, x.h0, cut)[1]

    x.v[:, : 3 * 64] = torch.nan
    assert torch.equal(entered(WARM_LOG_BOUND)[0], want[1, 0])
    assert entered(WARM_LOG_BOUND)[1].isnan().all()
    assert entered(-13.0)[0].isnan().all()
    assert entered(NEVER)[0].isnan().all()


@pytest.mark.parametrize("solves", [True, False])
def test_exact_leaves_out_only_maps_that_are_zero(solves):
    """Head 0 leaves e^-104.5 of a state after two chunks, head 1 e^-103."""
    x = batch([6 * 64], gate="none")
    x.g[..., 0] = -104.5 / 128
    x.g[..., 1] = -103 / 128
    cut = segments.cut(x.g, x.cu_seqlens, 2)
    never, exact = (maps(x, cut, limit, solves) for limit in (NEVER, EXACT_LOG_BOUND))
    assert never.cold[1].tolist() == [1, 1]
    assert exact.cold[1].tolist() == [0, 1]
    assert not never.M[1, 0].any()
    states = (segments.start_states(found, x.h0, cut)[:3] for found in (never, exact))
    assert torch.equal(*states)


@pytest.mark.parametrize("length", [9, 33])
@pytest.mark.parametrize("solves", [True, False])
def test_a_window_may_be_anywhere_in_a_long_segment(length, solves):
    """The decay of one chunk, e^-12.8, lies so many chunks before the end of a segment of 41."""
    x = batch([82 * 64], heads=(1, 1), sizes=(64, 64), gate="none", h0=False)
    first = (41 - length) * 64
    x.g[:, first : first + 64] = -0.2
    x.v[:, :first] = torch.nan
    assert starts(x, 41, WARM_LOG_BOUND, solves)[1].isfinite().all()
    x.v[:, first] = torch.nan
    assert starts(x, 41, WARM_LOG_BOUND, solves)[1].isnan().any()


@pytest.mark.parametrize("solves", [True, False])
def test_keys_that_grow_the_state_lengthen_the_window(solves):
    """One chunk decays by e^-13, but the last three tokens multiply the state by up to 11 each.

    What was written before that chunk is the whole state: nothing is written after it.
    """
    x = batch([8 * 64], heads=(1, 1), gate="none", h0=False)
    x.g[:] = -13 / 64
    x.k[:] = torch.nn.functional.normalize(torch.randn(128), dim=-1).to(x.k.dtype)
    x.beta[:, : 8 * 64] = 1
    x.beta[:, 3 * 64 : 4 * 64] = 0
    x.k[:, 4 * 64 - 3 : 4 * 64] *= 12**0.5
    x.beta[:, 4 * 64 - 3 : 4 * 64] = 1
    x.v[:, 3 * 64 :] = 0
    want = states_between(x, 4)[1]
    got = starts(x, 4, WARM_LOG_BOUND, solves)[1]
    assert want.abs().max() > 1e-4
    assert relative_l2(got, want) < 0.1
    if solves:  # 0 and 1 are the same in 16 bits
        narrow = x._replace(beta=x.beta.to(x.k.dtype))
        assert torch.equal(starts(narrow, 4, WARM_LOG_BOUND, solves)[1], got)
    else:  # squares of keys as kkt_solve has found them
        assert relative_l2(run(x, 4, WARM_LOG_BOUND, grows=True).starts[1], want) < 0.1
    x.k[:, 4 * 64 - 3 : 4 * 64] /= 12**0.5
    assert not starts(x, 4, WARM_LOG_BOUND, solves)[1].any(), "by its gates one chunk was enough"
    if not solves:
        assert not run(x, 4, WARM_LOG_BOUND, grows=True).starts[1].any()


@pytest.mark.parametrize("key", ["unit", "low rank"])
def test_many_segments_that_forget_nothing(key):
    """A rounding a segment would add up; 33 segments, each of one chunk."""
    x = batch([33 * 64], heads=(1, 1), gate="none", key=key)
    want, rounded = states_between(x, 1)[-1], states_between(x, 1, x.k.dtype)[-1]
    got = starts(x, 1, WARM_LOG_BOUND)[-1]
    assert relative_l2(got, want) < RATIO * relative_l2(rounded, want)


@pytest.mark.parametrize("limit", [WARM_LOG_BOUND, NEVER])
@pytest.mark.parametrize("kernel", [GIVEN, SOLVING])
def test_a_forward_in_segments(limit, kernel, seeds):
    for seed, (lengths, most) in enumerate((([400], 3), ([64, 200, 0, 300], 2), ([0, 65], 1))):
        seeds["seed"] = seed
        x = batch(lengths, h0=seed != 1)
        x.g[..., 1] = 0
        check(x, run(x, most, limit, kernel))


def test_keys_of_one_head_and_values_of_several():
    x = batch([400, 100], heads=(2, 6))
    check(x, run(x, 2, WARM_LOG_BOUND))


def test_neighbours_of_a_sequence_do_not_matter():
    x = batch([200, 300, 200])
    want = run(x, 2, WARM_LOG_BOUND)
    for rows in (x.q, x.k, x.v, x.g, x.beta):
        rows[:, 200:500] = torch.nan
    got = run(x, 2, WARM_LOG_BOUND)
    for part in (slice(0, 200), slice(500, None)):
        assert torch.equal(got.o[:, part], want.o[:, part])
    assert torch.equal(got.final[[0, 2]], want.final[[0, 2]])


def test_strides_are_read_in_place():
    x = batch([300], heads=(2, 2))
    want = starts(x, 2, WARM_LOG_BOUND)
    wide = torch.cat([x.q, x.k, x.v], 2)  # slices of one projection
    _, k, v = wide.split(2, 2)
    head_major = {
        name: getattr(x, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "kv"
    }
    v_first = {"h0": x.h0.mT.contiguous().mT}
    for changed in ({"k": k, "v": v}, head_major, v_first):
        assert torch.equal(starts(x._replace(**changed), 2, WARM_LOG_BOUND), want)


@pytest.mark.parametrize("lengths", [[330, 1, 0, 70], [100, 130]])
@pytest.mark.parametrize("taken", ["segments", "whole"])
@pytest.mark.parametrize("h0", [True, False])
def test_one_path_has_the_tokens_and_the_others_write_nothing(lengths, taken, h0):
    """Bit for bit: the path that the longest sequence decides on gives what it gives alone."""
    x = batch(lengths, h0=h0)
    longest, other = -(-max(lengths) // 64), 2 if taken == "segments" else 4
    first, second = (SOLVING, GIVEN) if taken == "segments" else (GIVEN, SOLVING)
    segments_of = {GIVEN: 6, SOLVING: 0}
    rows = ((0, first), (longest, second), (longest + other, first))
    by_length = {least: (kernel, segments_of[kernel]) for least, kernel in rows}
    found = banded(by_length, GIVEN, WARM_LOG_BOUND)

    def outputs() -> launch.Outputs:
        final = x.g.new_empty(len(lengths), x.v.shape[2], 128, 128)
        saved = launch.SavedChunks.empty(x.q, x.g)
        return launch.Outputs(torch.empty_like(x.v), final, saved)

    got, want, scale = outputs(), outputs(), 128**-0.5
    given = launch.FlatBatch(x.q, x.k, x.v, x.g, x.beta, x.h0, x.cu_seqlens)
    kept = launch.forward_by_length(given, scale, found, got, saves=True)
    most = device_spacing(sequence_chunks_of(lengths), 6)
    alone = Plan(GIVEN, most, WARM_LOG_BOUND) if taken == "segments" else Plan(SOLVING, None)
    launch.forward_batch(given, scale, alone, want)
    assert kept is None
    assert torch.equal(got.o, want.o)
    assert torch.equal(got.ht, want.ht)
    live = slice(0, x.bounds[-1])
    for a, b in zip(got.saved, want.saved, strict=True):
        assert torch.equal(a[:, live].nan_to_num(7), b[:, live].nan_to_num(7))
    check(x, CutResults(got.o, got.ht, x.cu_seqlens, got.ht))
