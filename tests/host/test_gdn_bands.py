"""Plans for lengths that the device alone knows: decided from numbers, close to known lengths."""

import random
import statistics
from collections import Counter
from functools import partial

import pytest
import torch

from qla_kernels.gdn import bands, plan, times
from qla_kernels.gdn import lengths as of_lengths
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.lengths import Lengths, cut_lengths, num_segments, sequence_chunks
from qla_kernels.gdn.plan import EXACT_LOG_BOUND, WARM_LOG_BOUND, Plan
from qla_kernels.gdn.times import SHARING, whole_time
from qla_kernels.runtime import device
from qla_kernels.tile.constants import CHUNK

SMS = 132
HEADS = [8, 16, 32, 48, 64]
ROWS = [[24576, 8192], [16384, 8192, 4096, 4096], [1024] * 8, [8192] * 4, [32768]]


def sequences(lengths: list[int]) -> Lengths:
    return tuple(sorted(Counter(-(-length // CHUNK) for length in lengths).items()))


def broken(count: int, seed: int, tokens: int = 32768) -> list[int]:
    """Returns the lengths of `count` parts of a line that is broken at random."""
    cuts = sorted(random.Random(seed).sample(range(1, tokens), count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]


def shape(heads: int) -> tuple[int, int, int, int]:
    return heads, 128, 128, SMS


def forward(lengths: list[int], heads: int, **options) -> Plan:
    return bands.forward((len(lengths), sum(lengths)), shape(heads), **options)


def kernel_of(found: Plan, band: plan.Band) -> times.ForwardChoice:
    return (found.kernel, *found.whole)[band.path]


def time_of(chosen: Plan, lengths: list[int], heads: int) -> float:
    time = plan.forward_time(chosen, sequences(lengths), shape(heads))
    return whole_time(time) if chosen.segment_chunks is None else time


def taken_time(found: Plan, lengths: list[int], heads: int) -> float:
    """Returns the model's time of the path that is taken, without what the others take."""
    chunks = sequences(lengths)
    kernel = kernel_of(found, plan.band_of(found.bands, chunks))
    if kernel == SHARING and found.most_cut is not None:
        shared = whole_time(times.shares(chunks, shape(heads)))
        if max(n for n, _ in chunks) <= found.most_cut:  # as share_table decides
            return shared
        return time_of(Plan(kernel), lengths, heads) + bands.TABLES_TIME
    return time_of(Plan(kernel, found.cut(chunks), found.warm_log_bound), lengths, heads)


def known_time(lengths: list[int], heads: int) -> float:
    known = plan.forward(sequence_chunks(0, 0, lengths), shape(heads))
    if known.shares:
        return whole_time(times.shares(sequences(lengths), shape(heads)))
    return time_of(known, lengths, heads)


def over_known(lengths: list[int], heads: int) -> float:
    """Returns the model's time of the path that is taken over that of a plan for known lengths."""
    return taken_time(forward(lengths, heads), lengths, heads) / known_time(lengths, heads)


@pytest.mark.parametrize("most_segments", [1, 3, 8, 16, 33, 100, 5000])
def test_sequences_are_cut_as_finely_as_the_number_of_segments_allows(most_segments):
    draw = random.Random(most_segments)
    for _ in range(50):
        count = draw.randrange(1, 40)
        lengths = [draw.choice([0, 1, 64, 65, draw.randrange(65536)]) for _ in range(count)]
        chunks = sequences(lengths)
        most = of_lengths.device_spacing(chunks, most_segments)
        pieces = num_segments(chunks, most)
        if count > most_segments:
            assert pieces == count
        else:
            assert most == of_lengths.spacing(chunks, most_segments)
            assert pieces <= most_segments
            assert most == 1 or num_segments(chunks, most - 1) > most_segments


def test_a_sequence_of_very_many_chunks_is_cut_nearly_as_finely():
    chunks = ((20_001, 1), (5, 3))
    for most_segments in (5, 16, 130):
        most, least = (
            f(chunks, most_segments) for f in (of_lengths.device_spacing, of_lengths.spacing)
        )
        assert least <= most <= least + 20_001 / 1024 + 2
        assert num_segments(chunks, most) <= most_segments


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", [*ROWS, broken(16, 1), broken(64, 1), [1], [0, 0], []], ids=str)
@pytest.mark.parametrize("bound", [WARM_LOG_BOUND, EXACT_LOG_BOUND])
def test_bands_are_a_table_that_segment_plan_can_read(lengths, heads, bound):
    found = forward(lengths, heads, warm_log_bound=bound)
    least = [band.least for band in found.bands]
    assert least == sorted({*least})
    assert least[0] == 0
    paths = [band.path for band in found.bands]
    assert len({*paths}) <= bands.MOST_PATHS
    assert {*paths} - {0} == {*range(1, len(found.whole) + 1)}
    assert found.has_segments == (0 in paths)
    for band in found.bands:
        assert band.path == 0 or (band.segments == 0 and kernel_of(found, band).solves)
    assert found.warm_log_bound in (bound, float("-inf"))


def test_batches_of_about_the_same_size_share_their_bands():
    one, alike, other = (
        bands.forward(batch, shape(16)) for batch in ((17, 272_000), (18, 272_900), (4, 272_000))
    )
    assert one is alike
    assert one != other


@pytest.mark.parametrize("heads", HEADS)
def test_short_sequences_have_one_path_and_need_no_table(heads):
    """Another launch would take more than the 8 % that unknown lengths may cost."""
    found = forward([1024] * 8, heads)
    assert len(found.bands) == 1
    assert not found.has_segments
    assert over_known([1024] * 8, heads) == 1


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", ROWS, ids=str)
def test_unknown_lengths_take_about_as_long_as_known_ones(lengths, heads):
    assert over_known(lengths, heads) <= 1.05


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("count", [8, 16, 64])
def test_random_lengths_take_about_as_long_as_known_ones(count, heads):
    """By the model, without what the paths that are not taken take."""
    lost = [over_known(broken(count, seed), heads) for seed in range(20)]
    assert statistics.mean(lost) <= 1.08
    assert max(lost) <= 1.6  # one sequence with more than half of all tokens


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_a_long_sequence_among_short_ones_is_cut_or_has_narrow_columns(heads):
    """As if all were equally long it would take 1.5 to 5 times as long."""
    lengths = [16384, *[2340] * 7]
    alike = plan.forward(sequence_chunks(8, sum(lengths)), shape(heads))
    known = plan.forward(sequence_chunks(0, 0, lengths), shape(heads))
    assert time_of(alike, lengths, heads) > 1.4 * time_of(known, lengths, heads)
    assert over_known(lengths, heads) < 1.1


# heads, N and the tokens of each of N equal sequences
SHARED = [(48, 4, 8192), (64, 3, 8192), (32, 5, 8192), (24, 6, 8192), (48, 4, 16384), (48, 8, 4096)]
# equal shares would gain, but share_table alone takes ragged packs more than SHARES_LOSE
SHORT = [(48, 4, 2048), (48, 4, 4096)]
FULL = [(48, 8, 1024), (48, 16, 2048), (64, 4, 8192), (32, 8, 8192), (64, 8, 4096)]  # waves
ONE_WAVE = [(32, 4, 8192), (24, 4, 8192), (48, 1, 32768), (64, 2, 16384), (8, 16, 2048)]


def without_shares(heads: int, num_sequences: int, tokens: int) -> Plan:
    rounded = bands.rounded_size(num_sequences, tokens)
    return bands._forward(*rounded, shape(heads), WARM_LOG_BOUND, False)


@pytest.mark.parametrize(("heads", "count", "tokens"), SHARED)
def test_equal_lengths_that_the_device_alone_knows_have_equal_shares(heads, count, tokens):
    lengths = [tokens] * count
    found = forward(lengths, heads)
    assert found.most_cut is not None
    share = -(-heads * count * (tokens // CHUNK) // SMS)
    assert tokens // CHUNK <= found.most_cut <= 1.5 * share
    assert over_known(lengths, heads) == 1
    gain = taken_time(found, lengths, heads)
    assert gain < plan.SHARES_GAIN * taken_time(
        without_shares(heads, count, sum(lengths)), lengths, heads
    )


@pytest.mark.parametrize(("heads", "count", "tokens"), [*SHORT, *FULL, *ONE_WAVE])
def test_other_batches_have_the_bands_that_they_had_without_shares(heads, count, tokens):
    found = forward([tokens] * count, heads)
    assert found == without_shares(heads, count, count * tokens)
    assert found.most_cut is None


def test_rounding_gives_no_shares_to_items_that_fit_a_wave():
    """31 sequences count as 32, whose 128 items do not fit 126 SMs."""
    for count, shares in ((31, False), (32, True)):
        found = bands.forward((count, count * 8192), (4, 128, 128, 126))
        assert (found.most_cut is not None) == shares


@pytest.mark.parametrize(("heads", "count", "tokens"), SHARED)
def test_a_longer_sequence_among_them_loses_no_more_than_a_table(heads, count, tokens):
    """From equal lengths to one sequence with all tokens; by the model, with the other paths."""
    total = count * tokens
    new, old = forward([tokens] * count, heads), without_shares(heads, count, total)

    def with_idle(found: Plan, lengths: list[int]) -> float:
        taken = plan.band_of(found.bands, sequences(lengths)).path
        idle = 0.0
        for path in {band.path for band in found.bands} - {taken}:
            kernel = kernel_of(found, plan.Band(0, path))
            launches = bands.IDLE_WHOLE if path else bands.IDLE_SEGMENTS
            table = bands.IDLE_TABLE * (kernel == SHARING and found.most_cut is not None)
            idle += launches + table + bands.IDLE_CTA * (count * heads * 128 // kernel.tile_v / SMS)
        tables = bands.TABLES_TIME * (idle > 0 and taken > 0)
        return taken_time(found, lengths, heads) + idle + tables

    for longest in range(tokens, total + 1, max(CHUNK, total // 40 // CHUNK * CHUNK)):
        lengths = [longest, *[(total - longest) // (count - 1)] * (count - 1)]
        assert with_idle(new, lengths) <= 1.02 * with_idle(old, lengths), longest


def backward_time(lengths: list[int], width: int, most: int | None, heads: int) -> float:
    chunks = sequences(lengths)
    rest = times.chunk_grads(of_lengths.total(chunks), shape(heads))
    if most is None:
        return rest + times.chains_of_width(chunks, width, shape(heads))
    both = chunks, cut_lengths(chunks, most), shape(heads), WARM_LOG_BOUND
    return rest + times.maps(*both, False, True) + times.gradient_pieces(*both, width)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", [*ROWS, *(broken(n, 3) for n in (8, 16, 64))], ids=str)
def test_a_backward_of_unknown_lengths(lengths, heads):
    """It has one path, which may be 128 columns where 64 were faster, or the other way round."""
    found = bands.backward((len(lengths), sum(lengths)), shape(heads))
    batch = sequence_chunks(0, 0, lengths)
    known = plan.chains(batch, shape(heads))
    taken = backward_time(lengths, found.kernel.tile_v, found.cut(sequences(lengths)), heads)
    least = backward_time(lengths, known.kernel.tile_v, known.segment_chunks, heads)
    assert taken <= 1.2 * least


def test_only_lengths_that_the_host_does_not_know_are_planned_in_bands(monkeypatch):
    monkeypatch.setattr(device, "sm_count", lambda _: SMS)
    lengths = [4096] * 8
    meta = partial(torch.empty, device="meta")
    q, v, g = meta(1, 32768, 2, 128), meta(1, 32768, 8, 128), meta(1, 32768, 8)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    dense = Call(q, q, v, g, g, 1.0)
    packed = dense._replace(cu_seqlens=ends.to("meta"))
    known = packed._replace(cu_seqlens_cpu=ends)
    assert launch.planned(packed, Options()) == (forward(lengths, 8), False)
    alike = plan.forward(sequence_chunks(0, 0, lengths), shape(8))
    assert launch.planned(known, Options()) == (alike, True)
    assert not launch.planned(dense, Options())[0].bands
    for call in (packed, known, dense):
        chosen, _ = launch.planned(call, Options(auto_cp=False))
        assert chosen == Plan(plan.BATCH_INVARIANT)
