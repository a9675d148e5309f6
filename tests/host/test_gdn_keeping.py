"""When a forward keeps its segments for its backward by itself: decided from numbers alone."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qla_kernels import chunk_gated_delta_rule, chunk_gated_delta_rule_fwd
from qla_kernels.gdn import bands, choices, plan
from qla_kernels.gdn.call import Call, Incoming, Options, SavedForward
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.lengths import capacity, sequence_chunks
from qla_kernels.gdn.ops import GdnForward
from qla_kernels.gdn.plan import EXACT_LOG_BOUND, WARM_LOG_BOUND
from qla_kernels.runtime import device, jit
from tests.gdn_calls import call, leaves

SMS = 132
Row = tuple[tuple[int, int], list[int], int, int]
# us of a backward alone in CUDA graphs, with its own cuts and with those of its forward: medians of
# record gdn-20261122T090424Z-e0b2 (one H200), whose kernels and own cuts are older than today's.
RECORD: list[Row] = [
    ((2, 4), [32768], 382, 318),
    ((2, 4), [16384], 229, 189),
    ((2, 4), [8192], 156, 130),
    ((2, 4), [4096], 117, 93),
    ((2, 4), [2048], 72, 80),
    ((2, 4), [24576, 8192], 350, 300),
    ((2, 4), [16384, 16384], 342, 294),
    ((2, 4), [4096, 4096], 138, 123),
    ((4, 8), [32768], 547, 497),
    ((4, 8), [16384], 343, 295),
    ((4, 8), [8192], 228, 181),
    ((4, 8), [4096], 138, 125),
    ((4, 8), [2048], 75, 89),
    ((4, 8), [24576, 8192], 540, 489),
    ((4, 8), [16384, 16384], 539, 487),
    ((4, 8), [4096, 4096], 171, 182),
    ((4, 16), [32768], 939, 858),
    ((4, 16), [16384], 518, 468),
    ((4, 16), [8192], 308, 285),
    ((4, 16), [4096], 166, 179),
    ((4, 16), [2048], 92, 118),
    ((4, 16), [24576, 8192], 930, 860),
    ((4, 16), [16384, 16384], 853, 856),
    ((4, 16), [4096, 4096], 236, 235),
]
# The same of gdn-backward.md, section 18: whole sequences or the best of all cuts, and kept.
SWEEP: list[Row] = [
    ((16, 48), [32768], 2664, 2503),
    ((16, 32), [32768], 1804, 1723),
    ((8, 32), [32768], 1749, 1638),
    ((8, 24), [32768], 1341, 1266),
    ((4, 16), [32768], 937, 858),
    ((4, 8), [32768], 551, 500),
    ((16, 32), [8192], 462, 492),
    ((8, 24), [4096], 196, 234),
]
# Rows of the record that are faster with the forward's cuts, which would take more memory, though
TOO_LARGE = [((2, 4), [8192]), ((2, 4), [4096]), ((2, 4), [4096, 4096])]
TOO_LARGE += [((4, 8), [4096]), ((4, 16), [8192])]


def shape(HV: int, V: int = 128, bound: float = WARM_LOG_BOUND) -> tuple[Any, ...]:
    return (HV, 128, V, SMS), bound


def keeps_unknown(batch: tuple[int, int], H: int, *of_shape: Any) -> bool:
    """Where the device alone knows the lengths."""
    return choices.is_worth_keeping((), H, *of_shape, batch)


def cut(lengths: list[int], *of_shape: Any) -> int | None:
    """Returns the most chunks of a forward's segment."""
    return plan.forward(sequence_chunks(0, 0, lengths), *of_shape).segment_chunks


def faster(lengths: list[int], HV: int) -> bool:
    most = cut(lengths, *shape(HV))
    chunks = sequence_chunks(0, 0, lengths)
    return most is not None and choices.is_faster(chunks, most, *shape(HV))


def keeps(lengths: list[int], H: int, HV: int, **others: Any) -> bool:
    return choices.is_worth_keeping(sequence_chunks(0, 0, lengths), H, *shape(HV, **others))


@pytest.mark.parametrize(("heads", "lengths", "alone", "kept"), RECORD + SWEEP)
def test_the_faster_backward_is_foreseen(heads, lengths, alone, kept):
    """In all rows in which they are more than 3 % apart; within that, there is nothing to win."""
    found = faster(lengths, heads[1])
    if abs(kept / alone - 1) > 0.03:
        assert found == (kept < alone)
    else:
        assert not found


@pytest.mark.parametrize(("heads", "lengths", "alone", "kept"), RECORD + SWEEP)
def test_segments_are_kept_where_that_was_faster_and_takes_little_memory(
    heads, lengths, alone, kept
):
    expected = kept < 0.97 * alone and (heads, lengths) not in TOO_LARGE
    assert keeps(lengths, *heads) == expected


def share(lengths: list[int], H: int, HV: int) -> float:
    """Returns the bytes of kept segments over what is saved anyway."""
    slots = capacity(sum(lengths), len(lengths), cut(lengths, *shape(HV)))
    saved = sum(lengths) * choices.saved_bytes(H, shape(HV)[0])
    return choices.kept_bytes(slots, shape(HV)[0]) / saved


def test_what_is_left_out_for_its_memory():
    assert all(share(lengths, *heads) > 0.27 for heads, lengths in TOO_LARGE)
    kept = [(lengths, *heads) for heads, lengths, *_ in RECORD if keeps(lengths, *heads)]
    assert len(kept) == 12
    assert max(itertools.starmap(share, kept)) < 0.23


def drawn(seed: int) -> Iterator[tuple[list[int], int, int, dict[str, Any]]]:
    """Yields lengths, heads and what else a call may have."""
    draw = random.Random(seed)
    for _ in range(60):
        H, count = draw.choice((1, 2, 4, 8, 16)), draw.choice((1, 1, draw.randint(2, 8)))
        lengths = [draw.randint(1, 60_000 // count) for _ in range(count)]
        bound = draw.choice((WARM_LOG_BOUND, EXACT_LOG_BOUND))
        yield lengths, H, H * draw.randint(1, 4), {"V": draw.choice((64, 128, 256)), "bound": bound}


@pytest.mark.parametrize("seed", range(3))
def test_a_backward_takes_what_was_kept_for_it(seed):
    """It asks again whether whole sequences are faster, of the cuts that it reads from tables."""
    kept = 0
    for lengths, H, HV, others in drawn(seed):
        of_shape, N, T = shape(HV, **others), len(lengths), sum(lengths)
        chunks, bound = sequence_chunks(0, 0, lengths), plan.gradient_bound(others["bound"])
        slots = []
        if choices.is_worth_keeping(chunks, H, *of_shape):
            slots.append((chunks, capacity(T, N, cut(lengths, *of_shape))))
        if keeps_unknown((N, T), H, *of_shape):
            room = bands.forward((N, T), *of_shape).capacity(N, T)
            slots.append((sequence_chunks(N, T), room))
        for sequences, room in slots:
            batch = choices.BatchLengths(sequences, (N, T), known=True)
            back = choices.backward(batch, of_shape[0], bound, kept_capacity=room)
            assert back.segment_chunks is not None
        kept += len(slots)
    assert kept > 20


@pytest.mark.parametrize(
    ("lengths", "H", "HV", "expected"),
    [
        ([32768], 4, 8, True),
        ([2048], 4, 8, False),
        ([24576, 8192], 4, 8, True),
        ([24576, 8192], 4, 16, False),  # whatever their lengths: 16384 twice lost
        ([1024] * 8, 16, 32, False),
        ([0, 0], 4, 8, False),
    ],
)
def test_lengths_that_the_device_alone_knows(lengths, H, HV, expected):
    assert keeps_unknown((len(lengths), sum(lengths)), H, *shape(HV)) is expected


def test_paths_of_whole_sequences_have_no_segments_to_keep():
    for lengths, H, HV, others in drawn(7):
        batch = len(lengths), sum(lengths)
        if bands.forward(batch, *shape(HV, **others)).whole:
            assert not keeps_unknown(batch, H, *shape(HV, **others))


# ---- calls: launch code on meta tensors, with kernels that do nothing ----


@pytest.fixture
def launches(monkeypatch):
    """What was launched: kernel, variant, shapes of tensors and numbers."""
    found: list[tuple[Any, ...]] = []

    def compiled(module, variant):
        def run(*given):
            told = (tuple(x.shape) if isinstance(x, Tensor) else x for x in given)
            found.append((module.__name__, variant, *told))

        return run

    monkeypatch.setattr(jit, "compile", compiled)
    monkeypatch.setattr(device, "sm_count", lambda _: SMS)
    return found


def made(lengths: list[int], H: int, HV: int, known: bool = True, K: int = 128) -> Call:
    T, N = sum(lengths), len(lengths)

    def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(1, T, *size, dtype=dtype, device="meta")

    g, beta = meta(HV, dtype=torch.float32), meta(HV)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    host = bounds if known else None
    on_gpu = torch.empty(N + 1, dtype=torch.int32, device="meta")
    q, k, v = meta(H, K), meta(H, K), meta(HV, 128)
    return Call(q, k, v, g, beta, 1.0, None, on_gpu, host)


def forward(x: Call, keep: bool | None = None, **options: Any) -> GdnForward:
    return launch.gdn_fwd(x, Options(is_train=True, enable_fwd_cp_cache=keep)._replace(**options))


@pytest.mark.parametrize("known", [True, False])
def test_a_call_by_default_is_the_call_with_a_flag(launches, known):
    """So the bits of its backward are those of a call that says True, or False."""

    def step(x: Call, keep: bool | None) -> tuple[list[tuple[Any, ...]], int]:
        launches.clear()
        done = forward(x, keep)
        saved = SavedForward(done.g_cum, done.A, done.cp_cache)
        launch.gdn_bwd(x, saved, Incoming(x.v), Options())
        return list(launches), len(done.cp_cache)

    for lengths, expected in (([32768], True), ([24576, 8192], True), ([2048], False)):
        x = made(lengths, 4, 8, known)
        (default, size), same = step(x, None), step(x, expected)
        assert default == same[0]
        assert size == (8 if expected else 0)
        assert default != step(x, not expected)[0] or not expected


def test_kept_bytes_are_those_of_the_tensors(launches):
    x = made([32768], 4, 8)
    done = forward(x)
    slots = done.cp_cache[0].shape[0] - 1
    states = sum(t.nbytes for t in done.cp_cache if t.dim() > 2)
    assert states == choices.kept_bytes(slots, shape(8)[0])
    saved = sum(t.nbytes for t in (x.q, x.k, x.v, x.beta, done.g_cum, done.A))
    assert saved == 32768 * choices.saved_bytes(4, shape(8)[0])
    tables = sum(t.nbytes for t in done.cp_cache) - states
    assert tables < 0.001 * states


def test_calls_that_keep_nothing(launches):
    kept = made([32768], 4, 8)
    assert len(forward(kept).cp_cache) == 8
    rows = [x.expand(2, *x.shape[1:]) for x in (kept.q, kept.k, kept.v, kept.g, kept.beta)]
    each_alone = Call(*rows, 1.0)  # a launch for each row, as their tokens do not flatten
    for x, options in (
        (kept, {"is_train": False}),
        (kept, {"auto_cp": False}),
        (kept, {"enable_fwd_cp_cache": False}),
        (each_alone, {}),
        (made([32768], 4, 8, K=256), {}),
    ):
        assert forward(x, **options).cp_cache == []


def test_the_public_function_leaves_the_choice_open(monkeypatch):
    heard = []

    def listen(self, run, records, of_flat):
        heard.append(records[1].enable_fwd_cp_cache)
        return run(*records)

    monkeypatch.setattr("qla_kernels.runtime.programs.Programs.run", listen)
    x = leaves(call())
    for flag in (None, True, False, 1):
        chunk_gated_delta_rule(**x, enable_fwd_cp_cache=flag)
    chunk_gated_delta_rule(**x)
    assert heard == [None, True, False, True, None]
    plain = {n: t.detach() for n, t in x.items() if n in ("q", "k", "v", "g", "beta")}
    for flag in (None, False):
        assert chunk_gated_delta_rule_fwd(**plain, enable_fwd_cp_cache=flag)[-1] is None
