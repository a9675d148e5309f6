"""When sequences are cut, and how far apart: decided from ints alone."""

import heapq
import itertools
import math
import random

import pytest

from qla_kernels.gdn import plan, times
from qla_kernels.gdn.lengths import capacity, cut_lengths, num_items, rounded, sequence_chunks
from qla_kernels.gdn.plan import EXACT_LOG_BOUND, WARM_LOG_BOUND, Plan
from qla_kernels.gdn.times import ForwardChoice

SMS = 132
NARROW, WIDE = ForwardChoice(64, True), ForwardChoice(128, True)
EXACT = {"warm_log_bound": EXACT_LOG_BOUND}


def shape(heads: int, K: int = 128, V: int = 128) -> tuple[int, int, int, int]:
    return heads, K, V, SMS


def choose(lengths: list[int], heads: int, K: int = 128, V: int = 128, **options) -> Plan:
    return plan.forward(sequence_chunks(0, 0, lengths), shape(heads, K, V), **options)


def segments(lengths: list[int], most: int) -> int:
    return num_items(cut_lengths(sequence_chunks(0, 0, lengths), most))


def test_sequences_are_counted_by_their_chunks():
    assert sequence_chunks(0, 0, [0, 1, 64, 65, 130, 0]) == ((0, 2), (1, 2), (2, 1), (3, 1))
    assert sequence_chunks(3, 3 * 65) == ((2, 3),)
    assert sequence_chunks(2, 24576 + 8192) == ((256, 2),)  # unknown lengths: alike
    assert sequence_chunks(0, 0) == ()
    assert sequence_chunks(0, 0, []) == ()


def test_known_lengths_count_to_four_binary_digits():
    """So that new lengths are seldom a new batch; what is long and what is short stays apart."""
    chunks = [15, 16, 17, 18, 100, 512, 513, 1000]
    nearest = [15, 16, 18, 18, 104, 512, 512, 1024]
    found = sequence_chunks(0, 0, [64 * n for n in chunks])
    assert sorted(n for n, count in found for _ in range(count)) == nearest
    for n in range(1, 2000):
        ((mean, _),) = sequence_chunks(0, 0, [64 * n])
        assert abs(mean - n) <= n / 16


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_segments_share_a_sequence_evenly(most):
    for chunks in range(14):
        pieces = [length for length, count in cut_lengths(((chunks, 1),), most)
                  for _ in range(count)]  # fmt: skip
        assert sum(pieces) == chunks
        assert max(pieces) <= most
        assert max(pieces) - min(pieces) <= 1
        assert len(pieces) == max(1, -(-chunks // most))


def test_no_batch_has_more_segments_than_its_capacity():
    for lengths in itertools.product([0, 1, 64, 65, 128, 129, 300], repeat=3):
        for most in (1, 2, 3):
            assert segments(list(lengths), most) <= capacity(sum(lengths), len(lengths), most)


@pytest.mark.parametrize("heads", [4, 8, 16, 24, 32])
@pytest.mark.parametrize("lengths", [[32768], [24576, 8192]])
def test_long_sequences_of_few_heads_are_cut_to_fill_the_gpu(lengths, heads):
    chosen = choose(lengths, heads)
    assert chosen.segment_chunks is not None
    tiles = heads * 128 // chosen.kernel.tile_v
    waves = segments(lengths, chosen.segment_chunks) * tiles / SMS
    assert 0.7 < waves <= 3
    every = choose(lengths, heads, warm_log_bound=-math.inf)
    if heads > 4 and every.kernel == chosen.kernel:  # each segment costs more then
        assert every.segment_chunks >= chosen.segment_chunks


WHOLE, SHARES, ITEMS = "whole sequences", "equal shares", "no equal shares"
# What is chosen: whole sequences in a kernel or in any, the most chunks of a segment, or shares
CHOSEN = (
    # measured fastest, or within 2 %: docs/lessons.md
    ([2048], 8, {}, 7),
    ([4096], 8, {}, 10),
    ([4096], 8, EXACT, 13),
    ([8192], 8, {}, 16),
    ([8192], 8, EXACT, 15),
    ([32768], 8, {}, 32),
    ([32768], 8, EXACT, 37),
    ([32768], 16, {}, 64),
    ([32768], 16, EXACT, 64),
    ([16384], 16, EXACT, 37),
    ([16384], 24, {}, 52),
    ([32768], 24, {}, 47),
    ([32768], 32, {}, 64),
    ([24576, 8192], 24, EXACT, 48),
    # short, or the GPU is full
    *(([n] * (n >= 0), 8, {}, WHOLE) for n in (-1, 0, 1, 64, 1024)),
    ([1024] * 8, 64, {}, WHOLE),
    ([24576, 8192], 48, {}, WHOLE),  # docs/lessons.md: cut, 730 to 755 us; whole, 644
    ([8192] * 4, 16, {}, NARROW),  # 128 CTAs, still one wave
    ([2048] * 4, 32, {}, WIDE),  # one wide wave, too short to be worth two more launches
    ([32768] * 4, 16, {}, NARROW),
    ([8192] * 4, 64, {}, WIDE),  # A for so many heads costs more than the cheaper chunk saves
    ([64], 1, {}, NARROW),
    # a last wave would be half empty
    ([8192] * 8, 24, {}, SHARES),
    ([8192, 8192, 8192, 6000], 48, {}, SHARES),
    ([2048] * 4, 48, {}, SHARES),
    ([16384] * 4, 48, {}, SHARES),
    ([8192] * 4, 48, {"K": 96}, SHARES),
    # equal shares gain nothing, or there are none
    ([64] * 64, 64, {}, ITEMS),
    ([64] * 17, 8, {}, ITEMS),  # 136 items, but there is little to gain
    ([8192] * 4, 24, {}, ITEMS),  # items fit a wave
    ([8192], 48, {}, ITEMS),
    ([32768, 0, 0, 0], 48, {}, ITEMS),  # one long sequence
    *(([8192] * 4, 48, x, ITEMS) for x in ({"V": 64}, {"V": 192}, {"K": 64})),  # other kernels
    *(([8192] * 4, 48, x, ITEMS) for x in ({"shares": False}, {"mapped": True})),
    ([600] * 300, 32, {}, ITEMS),  # 9600 items
    *(([0] * n, 8, {}, ITEMS) for n in (0, 1)),
)


@pytest.mark.parametrize(("lengths", "heads", "options", "expected"), CHOSEN)
def test_what_is_chosen(lengths, heads, options, expected):
    chosen = choose(lengths, heads, **options)
    assert chosen.shares == (expected == SHARES)
    if expected == SHARES:
        assert over_others(lengths, heads) < plan.SHARES_GAIN
    elif isinstance(expected, int):
        assert chosen.segment_chunks == expected
    elif expected != ITEMS:
        assert chosen.segment_chunks is None
        assert expected in (WHOLE, chosen.kernel)


WHOLE_BACKWARDS = (
    *((lengths, 8) for lengths in ([], [0], [1024])),
    ([8192] * 4, 32),
    *(([n], heads) for n in (4096, 8192, 16384, 32768) for heads in (32, 48, 64)),
)


@pytest.mark.parametrize(("lengths", "heads"), WHOLE_BACKWARDS)
def test_a_backward_that_is_short_or_fills_the_gpu_stays_whole(lengths, heads):
    assert plan.backward(sequence_chunks(0, 0, lengths), shape(heads)) is None


@pytest.mark.parametrize(("tokens", "bound"), [(2048, -math.inf), (8192, WARM_LOG_BOUND)])
def test_every_head_is_folded_where_looking_for_windows_takes_longer(tokens, bound):
    assert choose([tokens], 8).warm_log_bound == bound


@pytest.mark.parametrize("bound", [WARM_LOG_BOUND, EXACT_LOG_BOUND, -math.inf])
@pytest.mark.parametrize("heads", [8, 32])
def test_keys_are_summed_up_only_for_long_windows(heads, bound):
    """And by kkt_solve, which not every plan has; a backward never has them."""
    chosen = choose([32768], heads, warm_log_bound=bound)
    assert chosen.grows == (bound == EXACT_LOG_BOUND)
    assert not chosen._replace(kernel=NARROW).grows
    assert plan.gradient_bound(bound) == (bound if bound == WARM_LOG_BOUND else -math.inf)


def test_narrow_values_have_narrow_tiles():
    assert choose([32768], 8, V=64).kernel.tile_v == 64
    for sequences in (0, 1, 50, 70_000):
        chunks = sequence_chunks(sequences, 100 * sequences)
        assert plan.forward(chunks, shape(32, V=64)).kernel == NARROW
        assert plan.tile_v(sequences, 32, 64, SMS) == 64


def test_a_batch_that_stays_whole_takes_the_quickest_kernel():
    """By the model that times.py states: waves of CTAs, one on an SM."""

    def quickest(N, T, heads, V):
        def duration(kernel):
            waves = -(-N * heads * (V // kernel.tile_v) // SMS)
            chunks = -(-T // 64)
            before = times.SOLVE_START + times.SOLVE_STEP * N * heads * chunks / SMS
            launched = times.LAUNCH + (0 if kernel.solves else before)
            return launched + waves * (times.START + chunks * times.STEP[kernel])

        return min((k for k in times.STEP if V % k.tile_v == 0), key=duration)

    for N, T, heads, V in itertools.product(
        (1, 2, 8, 64), (64, 1024, 8192), (2, 32, 64), (64, 128)
    ):
        chosen = plan.forward(sequence_chunks(N, N * T), shape(heads, V=V), shares=False)
        if chosen.segment_chunks is None:
            assert chosen.kernel == quickest(N, T, heads, V)


# gdn-forward.md, 25: measured with equal shares over without. None: the plan took whole sequences,
# so that shares were not measured.
MEASURED = (
    ([8192] * 4, 48, 0.816),  # 192 items for 132 SMs
    ([8192] * 3, 64, 0.809),
    ([8192] * 5, 32, 0.667),
    ([8192] * 6, 24, 0.626),
    ([4096] * 8, 48, 0.906),
    ([1024] * 8, 48, None),
    ([2048] * 16, 48, None),
    ([8192] * 4, 64, None),
    ([8192] * 4, 32, None),
    ([8192, 6000, 4000, 9000, 2000], 48, None),
)


@pytest.mark.parametrize(("lengths", "heads", "measured"), MEASURED)
def test_equal_shares_are_chosen_where_they_were_measured_to_gain(lengths, heads, measured):
    """And where not, the model does not choose what was not measured."""
    chosen = choose(lengths, heads)
    assert chosen.shares == (measured is not None)
    if measured is not None:
        assert chosen == Plan(WIDE, None, shares=True)
        assert over_others(lengths, heads) == pytest.approx(measured, rel=0.07)


def over_others(lengths: list[int], heads: int) -> float:
    """Returns the model's time of equal shares over that of the best other plan."""
    row = sequence_chunks(0, 0, lengths), shape(heads)
    rest = choose(lengths, heads, shares=False)
    assert not rest.shares
    least = plan.forward_time(rest, *row)
    least = times.whole_time(least) if rest.segment_chunks is None else least
    return times.whole_time(times.shares(*row)) / least


# gdn-forward.md, 26: measured with equal shares over whole items.
RAGGED = (
    ([8192, 6000, 4000, 9000, 2000], 48, 0.801),
    ([8192, 8192, 8192, 6000], 48, 0.690),
    ([16000, 6768, 10000, 0], 48, 0.998),
    ([12655, 7352, 4569], 64, 1.020),
    ([16384, 8192, 8192, 4096, 4096], 32, 1.297),
)


@pytest.mark.parametrize(("lengths", "heads", "measured"), RAGGED)
def test_ragged_batches_have_equal_shares_where_their_order_is_bad(lengths, heads, measured):
    found = choose(lengths, heads, shares=False)
    chunks = tuple(rounded(-(-length // 64)) for length in lengths)
    row = sequence_chunks(0, 0, lengths), shape(heads)
    before = 0.0 if found.solves else times.solve(*row)
    ctas = heads * 128 // found.kernel.tile_v
    dealt = before + times.dealt(chunks, times.STEP[found.kernel], ctas, SMS)
    shared = times.shares(*row)
    assert times.whole_time(shared) / times.whole_time(dealt) == pytest.approx(measured, rel=0.08)
    chosen = plan.in_order(found, chunks, shape(heads))
    assert chosen == (Plan(WIDE, None, shares=True) if measured < 0.9 else found)


@pytest.mark.parametrize(
    ("chunks", "free", "longest"),
    [
        ((4, 4, 4), 3, 4),
        ((1, 2, 9), 3, 9),
        ((9, 2, 1), 2, 9),
        ((2, 1, 9), 2, 10),  # the last one starts late
        ((0, 0, 5), 1, 5),
        ((), 2, 0),
    ],
)
def test_items_are_dealt_to_the_first_free_sm(chunks, free, longest):
    for ctas in (1, 7):
        found = times.dealt(chunks, 1.0, ctas, free * ctas, start=0.0)
        assert found == pytest.approx(times.LAUNCH + longest)


def test_dealing_is_that_of_a_queue():
    rng = random.Random(0)
    for _ in range(200):
        chunks = [rng.randrange(300) for _ in range(rng.randrange(1, 9))]
        ctas, sms = rng.randrange(1, 70), rng.randrange(1, 140)
        free = [0.0] * sms
        for length in chunks:
            for _ in range(ctas):
                heapq.heapreplace(free, free[0] + 3.0 + 2.5 * length)
        found = times.dealt(chunks, 2.5, ctas, sms, start=3.0)
        assert found == pytest.approx(times.LAUNCH + max(free))


def test_order_changes_no_plan_that_cuts_or_fits_one_wave():
    for lengths, heads in (([32768, 640, 640], 4), ([9000, 2000], 32), ([640] * 9, 96)):
        found = choose(lengths, heads)
        chunks = tuple(-(-length // 64) for length in lengths)
        assert plan.in_order(found, chunks, shape(heads)) is found


def test_neighbours_far_apart_in_the_same_keys_take_longer():
    """Each group of heads then reads its keys more than once: 192 items, and 384 half as long."""
    far, near = (times.shares(((n, c),), shape(48)) for n, c in ((128, 4), (64, 8)))
    items = times.NEXT_ITEM * (384 - 192) / SMS
    assert near - items < 0.95 * far


def test_only_the_long_sequence_of_a_ragged_batch_is_cut():
    lengths = [32768, *[640] * 8]
    most = choose(lengths, 4).segment_chunks
    assert most is not None
    assert most >= 10  # chunks of the short ones
    assert segments(lengths, most) > len(lengths)


def test_cutting_has_to_pay(monkeypatch):
    """The same batch is cut or not as the price of finding the states goes up."""
    row = sequence_chunks(1, 8192), shape(8)
    plan.forward.cache_clear()
    assert plan.forward(*row).segment_chunks is not None
    plan.forward.cache_clear()
    monkeypatch.setattr(times, "CUT", {True: 200.0, False: 200.0})
    assert plan.forward(*row).segment_chunks is None
    plan.forward.cache_clear()


@pytest.mark.parametrize("lengths", [[1], [64], [1024] * 8, [32768], [300, 40000, 5]])
@pytest.mark.parametrize("heads", [8, 64])
def test_what_other_ranks_ask_for_is_mapped_in_any_case(lengths, heads):
    """In segments if that pays anyway; else, or where that is better, in one a sequence."""
    batch = sequence_chunks(0, 0, lengths)
    longest = max(n for n, _ in batch)
    alone = choose(lengths, heads).segment_chunks
    mapped = choose(lengths, heads, mapped=True).segment_chunks
    assert 1 <= mapped <= longest
    if alone is not None:
        assert mapped == alone
    back = plan.backward(batch, shape(heads), mapped=True)
    assert 1 <= back <= longest


@pytest.mark.parametrize("heads", [4, 8, 16])
def test_a_backward_is_cut_for_the_same_reasons(heads):
    """Each of its chains has half the GPU to fill."""
    long = sequence_chunks(0, 0, [32768])
    most = plan.backward(long, shape(heads))
    assert most is not None
    assert 0.7 < segments([32768], most) * heads / (SMS // 2) <= 3


@pytest.mark.parametrize(
    ("lengths", "heads", "width"),
    [
        ([32768], 64, 64),  # chains of 128 columns side by side would keep each other waiting
        ([4096], 48, 64),
        ([24576, 8192], 64, 128),  # one chain fills the GPU, and the other one follows
        ([8192] * 4, 32, 128),
        ([8192], 8, 64),
    ],
)
def test_the_width_of_both_chains_of_a_backward(lengths, heads, width):
    """As measured: gdn-backward.md, section 18."""
    assert times.both_chains(sequence_chunks(0, 0, lengths), shape(heads))[0] == width


@pytest.mark.parametrize(
    ("length", "heads", "segment_chunks", "faster"),
    [(32768, 32, 64, True), (8192, 32, 32, False), (4096, 24, 16, False), (8192, 8, 16, True)],
)
def test_segments_of_the_forward_are_taken_where_whole_sequences_leave_sms_idle(
    length, heads, segment_chunks, faster
):
    sequences = sequence_chunks(0, 0, [length])
    assert plan.kept_is_faster(sequences, shape(heads), segment_chunks) is faster


def test_segments_of_empty_sequences_have_a_time():
    assert plan.kept_is_faster(sequence_chunks(0, 0, [0, 0]), shape(8), 1) in (True, False)


# ---- widths of tiles and numbers of CTAs that need no plan ----


@pytest.mark.parametrize(
    ("sequences", "heads", "width"),
    [
        (1, 16, 64),
        (2, 33, 64),  # the last size at which the narrow tiles fit in one wave
        (2, 34, 128),  # two narrow waves take longer than a wide one
        (4, 32, 128),
        (5, 32, 64),  # three narrow waves are faster than two wide ones
        (4, 64, 128),
        (1000, 64, 128),
    ],
)
def test_the_width_of_a_backward_chain(sequences, heads, width):
    assert plan.tile_v(sequences, heads, 128, SMS) == width


@pytest.mark.parametrize(
    ("items", "equal_lengths", "found"),
    [(512, True, SMS), (512, False, 512), (100, True, 100), (100, False, 100)],
)
def test_items_of_one_length_are_walked_by_one_cta_an_sm(items, equal_lengths, found):
    assert plan.ctas(items, equal_lengths, SMS) == found


def test_a_backward_that_fills_the_gpu_many_times_has_wide_tiles():
    """Only the rate counts there."""
    assert times.CHAIN_STEP[128] < 2 * times.CHAIN_STEP[64]
    assert all(plan.tile_v(n, 32, 128, SMS) == 128 for n in range(60, 200))
