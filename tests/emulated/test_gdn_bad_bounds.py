"""Wrong bounds and slots, emulated: every kernel ends, and reaches nothing outside its tensors.

The launches are those of a GPU. A seed puts each tensor at one edge of memory that faults or at the
other: a few bounds run with both, the others with one of them in turn. A kernel that waits for ever
is a deadlock to the emulator.
"""

import functools
from typing import Any

import pytest
import torch

from qla_kernels.gdn.kernels.chain import shares as columns
from qla_kernels.gdn.launch import segments, shares, tensors
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.varlen import capacity
from tests.emulated.conftest import emulated
from tests.gdn_bad_bounds_check import (
    BOUNDS,
    HV,
    NO_BOUNDS,
    OF_SLOTS,
    PARTS,
    SLOTS,
    TOKENS,
    N,
    Setting,
)

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture
def setting(monkeypatch) -> Setting:
    return Setting(lambda x: x, monkeypatch)


EDGES = ("at the end", "at the start")  # by seed


@pytest.fixture(params=[0, 1], ids=EDGES)
def launched(request, monkeypatch) -> set[str]:
    """The kernels that have been launched, each with such a seed."""
    names: set[str] = set()

    def compile(module: Any, variant: Any) -> Any:
        names.add(module.__name__.rpartition(".")[2])
        return functools.partial(emulated(module, variant), seed=request.param)

    monkeypatch.setattr(jit, "compile", compile)
    monkeypatch.setattr(device, "sm_count", lambda _: 4)
    return names


def test_every_kernel_is_among_them():
    launched = NO_BOUNDS.union(*(names for _, names in (*PARTS.values(), *OF_SLOTS.values())))
    assert launched == {name for family, name in jit.kernel_names() if family == "gdn"}


FEW = ("negative", "falling", "over one another", "extremes")
LONGEST = ("shards", "segments", "backward")  # get few bounds here, and all of them on a GPU


def cases() -> list[Any]:
    """Parts, bounds and seeds."""
    found, seed = [], 0
    for part in PARTS:
        for name in FEW if any(x in part for x in LONGEST) else BOUNDS:
            seed = 1 - seed
            for each in (0, 1) if name in FEW else (seed,):
                found.append(pytest.param(part, name, each, id=f"{part}-{name}-{EDGES[each]}"))
    return found


@pytest.mark.parametrize(("part", "bounds", "launched"), cases(), indirect=["launched"])
def test_bounds(part, bounds, launched, setting):
    run, expected = PARTS[part]
    run(setting, torch.tensor(BOUNDS[bounds]))
    assert launched == expected


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("part", OF_SLOTS)
def test_slots(part, slots, launched, setting):
    run, expected = OF_SLOTS[part]
    run(setting, torch.tensor(SLOTS[slots]))
    assert launched == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_tables(bounds, dtype, launched):
    """Chunks lie inside, end to end in each sequence, and there are no more than there is room."""
    if dtype == torch.int32 and bounds == "beyond int32":
        return
    cu_seqlens = torch.tensor(BOUNDS[bounds], dtype=dtype)
    table = tensors.chunk_table(TOKENS, cu_seqlens)
    first, num = table.first_chunk.tolist(), int(table.num_chunks)
    assert first[0] == 0
    assert first == sorted(first)
    assert first[-1] == num <= capacity(TOKENS, N) == len(table.chunks)
    for tok0, length in table.chunks[:num].tolist():
        assert 1 <= length <= 64
        assert 0 <= tok0 <= TOKENS - length
    assert not table.chunks[num:].any()
    assert_chunks(cu_seqlens.int().tolist(), first, table.chunks.tolist())


def assert_chunks(bounds: list[int], first: list[int], chunks: list[list[int]]) -> None:
    for n in range(N):
        begin = min(max(bounds[n], 0), TOKENS)
        end = min(max(bounds[n + 1], begin), TOKENS)
        own = chunks[first[n] : first[n + 1]]
        for i, (tok0, length) in enumerate(own):
            assert tok0 == begin + 64 * i
            assert length == min(64, end - tok0)
        assert len(own) == -(-(end - begin) // 64) or first[n + 1] == len(chunks)


@pytest.mark.parametrize("open_ends", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_segments(bounds, open_ends, launched):
    cu_seqlens = torch.tensor(BOUNDS[bounds])
    bits = open_ends[0] | open_ends[1] << 1
    ends = segments.OpenEnds(N, bits)
    cut = segments.cut(torch.zeros(1, TOKENS, HV), cu_seqlens, 1, ends)
    first = cut.first_segment.tolist()
    assert first[0] == 0
    assert first == sorted(first)
    assert max(first[:-1]) < cut.capacity  # rows of states
    assert first[-1] <= cut.capacity
    assert min(cut.bounds.tolist()) >= 0
    assert max(cut.bounds.tolist()) <= TOKENS
    for owners in (cut.starts_of.tolist(), cut.ends_of.tolist()):
        assert set(owners) <= {-1, *range(N)}
    assert cut.starts_of[0] == 0
    assert sorted(cut.heads.tolist()) == list(range(HV))


@pytest.mark.parametrize("most_cut", [None, 0, 1, 2])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_shares(bounds, most_cut, launched):
    """A CTA's rows are in the table, pieces inside the tensors, and who takes is given to."""
    given, like = torch.tensor(BOUNDS[bounds]).int(), torch.zeros(1)
    table = shares.share_out(like, given, (1, HV), 128, (128, 128), TOKENS, 4, most_cut)
    pieces, gives = table.pieces.tolist(), False
    for last, num in table.shares[:, : columns.NUM_PIECES + 1].tolist():
        assert 0 <= num <= last + 1 <= len(pieces) or num == 0
        for j, row in enumerate(pieces[last - num + 1 : last + 1] if num else []):
            n, hv, kh, i_tile, begin, length, takes, hands_on = row
            assert 0 <= n < N and 0 <= hv < HV and kh == i_tile == 0  # noqa: PT018
            assert 0 <= begin <= begin + length <= TOKENS
            assert bool(takes) == (gives if j == 0 else False)
            gives = bool(hands_on)
            assert not gives or j == num - 1
    assert not gives
    assert not table.shares[:, columns.GIVEN :].any()


def test_many_sequences_over_one_another(launched):
    """Their chunks together are more than a thread's 32 bits count."""
    num, tokens = 2048, 2**31 - 64
    cu_seqlens = torch.tensor([0, tokens] * num)[: num + 1].int()
    chunks, first = torch.empty(5, 2).int(), torch.empty(num + 1).int()
    count = torch.empty(1).int()
    kernel = jit.compile(tensors.chunk_table_kernel, tensors.chunk_table_kernel.Variant("int32"))
    kernel(cu_seqlens, chunks, count, first, tokens)
    assert count == 5
    assert first.tolist() == [0] + [5] * num
    assert chunks.tolist() == [[64 * c, 64] for c in range(5)]
