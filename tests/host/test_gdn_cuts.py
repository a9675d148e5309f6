"""`segments_of` says what a launch cuts, for every kind of call."""

import random
from typing import Any

import pytest
import torch

from qla_kernels import Unsupported
from qla_kernels.gdn import keywords, segments_of
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.launch import forward, states
from qla_kernels.gdn.launch.states import BackwardBatch
from qla_kernels.gdn.lengths import device_spacing
from qla_kernels.gdn.plan import band_of
from qla_kernels.runtime import device
from qla_kernels.tile.constants import CHUNK

SMS = 132
SIZES = (128, 128), (64, 64), (96, 192), (256, 512), (128, 256)
HEADS = (2, 8), (4, 8), (16, 32), (6, 6), (16, 64)


class Asked(Exception):
    """What a launch cuts: the most chunks of a segment, or rows of bands."""


@pytest.fixture(autouse=True)
def on_a_hopper_gpu(monkeypatch):
    monkeypatch.setattr(device, "sm_count", lambda of: SMS)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def call_of(lengths, heads, sizes, packed, on_host) -> Call:
    """A call as launches get it; what they read of lengths are numbers on the host."""
    (H, HV), (K, V) = heads, sizes
    B, T = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    bounds = torch.tensor([0, *lengths]).cumsum(0).int() if packed else None
    return Call(
        *(meta(B, T, H, K), meta(B, T, H, K), meta(B, T, HV, V)),
        *(meta(B, T, HV, dtype=torch.float32), meta(B, T, HV)), 1.0, None,
        *(bounds, bounds if on_host else None),
    )  # fmt: skip


def counted(lengths, most):
    """Segments of each sequence."""
    chunks = (-(n // -CHUNK) for n in lengths)
    return tuple(1 if most is None else max(1, -(n // -most)) for n in chunks)


def in_bands(rows, lengths):
    chunks = tuple((-(n // -CHUNK), 1) for n in lengths)
    room = band_of(rows, chunks)[-1]
    return device_spacing(chunks, room) if room else None


def launched(lengths, heads, sizes, direction, packed, on_host, bound, monkeypatch):
    """Segments of each sequence by the code that launches, up to its first launch."""
    call = call_of(lengths, heads, sizes, packed, on_host)
    options = Options(is_train=True, warm_log_bound=bound, enable_fwd_cp_cache=None)
    found, _ = forward.planned(call, options)
    most = in_bands(found.bands, lengths) if found.bands else found.segment_chunks
    if direction == "fwd":
        return counted(lengths, most)
    cache, K = [], sizes[0]
    if found.has_segments and not found.whole and K != 256 and forward._keeps(call, options, found):
        cache = [meta(found.capacity(len(lengths), sum(lengths)) + 1)] * 8
    v = call.v
    x: Any = BackwardBatch(
        *(call.q, call.k, v, v, call.g, call.beta, call.beta, 1.0),
        *(meta(len(lengths) + 1, dtype=torch.int32), None, None, None),
    )

    def says(what):
        def ask(*given, **named):
            raise Asked(what(*given, **named))

        return ask

    monkeypatch.setattr(states, "chains", says(lambda *_: None))
    monkeypatch.setattr(states, "value_chains", says(lambda *_: None))
    own = says(lambda g, ends, most, bands: ("bands", bands) if bands else most)
    monkeypatch.setattr(states.segments, "cut", own)
    monkeypatch.setattr(states, "segmented_chains", says(lambda *_: ("kept",)))
    known = not packed or on_host
    with pytest.raises(Asked) as asked:
        states.states_around(x, v, options, call.cu_seqlens_cpu, cache, known)
    (said,) = asked.value.args
    if isinstance(said, tuple):
        return counted(lengths, most if said[0] == "kept" else in_bands(said[1], lengths))
    return counted(lengths, said)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("form", ["rows", "packed", "by the device"])
def test_it_says_what_a_launch_cuts(direction, form, monkeypatch):
    draw, seen = random.Random(f"{direction} {form}"), set()
    packed, on_host = form != "rows", form != "by the device"
    for i in range(150):
        heads, sizes = draw.choice(HEADS), draw.choice(SIZES)
        count = draw.choice((1, 1, 2, 3, 8))
        lengths = [draw.choice((1, 100, 2048, 5000, 8200, 16384, 40000)) for _ in range(count)]
        lengths = lengths if packed else lengths[:1] * count
        bound = draw.choice((-12.0, -12.0, -20.0, -104.0))
        with monkeypatch.context() as patch:
            want = launched(lengths, heads, sizes, direction, packed, on_host, bound, patch)
        found = segments_of(
            lengths, heads, *sizes, direction=direction, packed=packed, cu_seqlens_cpu=on_host,
            warm_log_bound=bound,
        )  # fmt: skip
        assert found.segments == want, (i, lengths, heads, sizes, bound)
        assert found.cut == (max(want) > 1)
        if found.cut:
            longest = [-(-n // count) for n, count in zip(lengths, want, strict=True)]
            assert max(longest) <= found.segment_tokens
        seen.add((found.cut, sizes[0] == 256))
    assert {cut for cut, _ in seen} == {True, False}
    assert direction == "fwd" or (True, True) not in seen  # K = 256


def test_what_a_call_says_of_exactness_counts(monkeypatch):
    """Folding every head takes time, so that fewer sequences are cut."""
    shape = [2048], (16, 48)
    exact = [segments_of([n], (4, 16), exact=True) for n in range(1024, 9000, 512)]
    usual = [segments_of([n], (4, 16)) for n in range(1024, 9000, 512)]
    assert exact != usual
    assert exact == [
        segments_of([n], (4, 16), warm_log_bound=-104.0) for n in range(1024, 9000, 512)
    ]
    monkeypatch.setattr(keywords, "EXACT_BY_DEFAULT", True)
    assert exact == [segments_of([n], (4, 16)) for n in range(1024, 9000, 512)]
    monkeypatch.setattr(keywords, "INVARIANT_BY_DEFAULT", True)
    assert not any(segments_of([n], (4, 16)).cut for n in range(1024, 9000, 512))
    assert not segments_of(*shape).cut


def test_fewer_sms_are_filled_by_fewer_segments():
    few, many = (segments_of([16384], (2, 8), sm_count=n) for n in (66, 132))
    assert 1 < few.segments[0] < many.segments[0]
    assert segments_of([16384], (2, 8)) == many


def test_it_is_a_sentence():
    assert str(segments_of([8192])) == "The forward cuts 1 sequence of 8192 tokens into 4 segments."
    assert str(segments_of([8192], direction="bwd")) == "The backward cuts no sequence."
    lengths = [8192, 8192, 64, 9000, 10000, 11000, 12000, 1]
    found = segments_of(lengths, (2, 8))
    n = found.segments[0]
    assert str(found).startswith(
        f"The forward cuts 2 sequences of 8192 tokens into {n} segments, 1 "
    )
    assert str(found).endswith("segments, 2 more, and leaves 2 whole.")


def test_no_tokens_are_no_segments():
    assert segments_of([]).segments == ()
    assert segments_of([0, 0]).segments == (1, 1)
    assert not segments_of([0]).cut


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lengths": 8192}, "lengths is 8192; need a sequence of whole numbers of tokens"),
        ({"lengths": [-1]}, r"lengths is \[-1\]; need a sequence"),
        ({"heads": (16, 24)}, r"heads is \(16, 24\); need key heads and value heads, a multiple"),
        ({"heads": 16}, "heads is 16; need key heads"),
        ({"direction": "both"}, "direction is 'both'; need 'fwd' or 'bwd'"),
        ({"sm_count": 0}, "sm_count is 0; need a number of SMs"),
        ({"packed": False, "lengths": [1, 2]}, "need rows of one length, or packed=True"),
        ({"warm_log_bound": 1.0}, "warm_log_bound is 1.0; need less than 0"),
        ({"exact": True, "warm_log_bound": -1.0}, "need exact=True to leave out nothing"),
    ],
)
def test_what_it_cannot_answer_it_refuses(arguments, said):
    with pytest.raises(ValueError, match=f"segments_of: .*{said}"):
        segments_of(**{"lengths": [8192], **arguments})


def test_sizes_that_no_kernel_runs_are_unsupported():
    with pytest.raises(Unsupported, match="K = 100, V = 100; need K a multiple of 16"):
        segments_of([8192], head_dim=100)
