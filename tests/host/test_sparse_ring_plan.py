"""Layouts against their definition, and the table that kernels walk against the mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qla_kernels import Unsupported
from qla_kernels.sparse_ring import (
    ContiguousLayout,
    StripedLayout,
    ZigZagLayout,
    balance_report,
)
from qla_kernels.sparse_ring.operands import rows
from qla_kernels.sparse_ring.plan import (
    diagonals,
    key_walk,
    pack,
    query_walk,
    returns,
    table,
    visits,
)
from qla_kernels.sparse_ring.shapes import BLOCK
from reference import sparse_ring

LAYOUTS = {
    "contiguous": ContiguousLayout,
    "zigzag": ZigZagLayout,
    "striped-64": lambda world: StripedLayout(world, 64),
    "striped-128": StripedLayout,
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world", range(1, 9))
def test_layouts_are_what_the_reference_deals(name, world):
    layout = LAYOUTS[name](world)
    T = 2 * layout.unit
    held = sparse_ring.positions(name, world, T)
    token = torch.arange(T)
    for rank in range(world):
        assert torch.equal(layout.positions(T, rank), held[rank])
        mine = layout.owner(token, T) == rank
        assert torch.equal(token[mine], held[rank].sort().values)
        assert torch.equal(layout.local(held[rank], T), torch.arange(T // world))
        x = torch.randn(3, T)
        assert torch.equal(layout.shard(x, 1, rank), x[:, held[rank]])
    assert torch.equal(layout.perm(T), held.flatten())
    for t in (0, 1, T // 2, T - 1):  # ints as well as tensors
        rank, row = layout.owner(t, T), layout.local(t, T)
        assert (type(rank), type(row)) == (int, int)
        assert layout.position(rank, row, T) == t


def test_padding_makes_whole_tiles_of_every_shard():
    for world in (1, 2, 3, 8):
        for layout in (StripedLayout(world), ContiguousLayout(world), ZigZagLayout(world)):
            for length in (1, 127, 128, 129, 1000):
                T = layout.pad_len(length)
                assert T % layout.unit == 0
                assert 0 <= T - length < layout.unit
                assert (T // world) % 128 == 0


def test_a_layout_refuses_what_it_cannot_deal():
    with pytest.raises(ValueError, match="stripe is 1; need 64 or 128"):
        StripedLayout(2, 1)
    with pytest.raises(ValueError, match="world is 0"):
        ZigZagLayout(0)
    with pytest.raises(ValueError, match="pad the sequence to 512 and pass seqlen=300"):
        StripedLayout(2).positions(300, 0)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rank", [2, 3, -1, 1.0, None])
def test_a_rank_of_another_ring(name, rank):
    """A rank of the job, past the ring's, once got the tokens of another one, halves swapped."""
    layout, x = LAYOUTS[name](2), torch.zeros(1, 1024)
    calls = (lambda: layout.positions(1024, rank), lambda: layout.shard(x, 1, rank))
    for call in calls:
        with pytest.raises(ValueError, match=rf"rank={rank}; need a rank from 0 to 1; number the"):
            call()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_on_any_default_device(name):
    """What is made on the host was once made on the default device."""
    layout, x = LAYOUTS[name](2), torch.randn(1, 1024)
    want = layout.perm(1024), layout.shard(x, 1, 1)
    with torch.device("meta"):
        assert all(map(torch.equal, (layout.perm(1024), layout.shard(x, 1, 1)), want))
        report = balance_report([([0], [0, 3])], 1024, layout=layout)
    assert str(report) == str(balance_report([([0], [0, 3])], 1024, layout=layout))


def test_strides_that_kernels_have_no_bits_for():
    few = torch.empty(1, 8, dtype=torch.bfloat16, device="meta")
    assert rows(few.as_strided((1, 128, 1, 8), (2**31, 8, 8, 1))).stride(0) == 8
    with pytest.raises(Unsupported, match=r"need strides of at most 2147483647; pass fewer"):
        rows(few.as_strided((2, 128, 1, 8), (2**31, 8, 8, 1)))


def test_bits_of_diagonals_come_back():
    active = torch.rand(2, 3, 77) < 0.5
    active[..., 31] = True  # the sign
    words = pack(active)
    assert words.dtype == torch.int32
    assert words.shape == (2, 3, 3)
    assert torch.equal(diagonals(words, 77), active)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    world=st.sampled_from([1, 2, 3, 4, 6, 8]),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_every_walk_finds_the_blocks_of_the_mask(name, world, density):
    """Queries meet a visiting chunk, and keys the queries at home: the same pairs, no other."""
    layout = LAYOUTS[name](world)
    T = 2 * layout.unit
    active = torch.rand(1, 2, T // BLOCK) < density
    active[..., 0] = True
    walked = table(pack(active), T, layout)
    block = torch.arange(0, T, BLOCK)
    for rank in range(world):
        for owner in range(world):
            rows, keys = (block[layout.owner(block, T) == r] // BLOCK for r in (rank, owner))
            rows, keys = (x[layout.local(x * BLOCK, T).argsort()] for x in (rows, keys))
            distance = rows[:, None] - keys
            want = active[..., distance.clamp(min=0)] & (distance >= 0)
            of_queries = [
                sum(
                    query_walk(walked, visit, int(i0), len(keys)).int()
                    for visit in visits(layout, T, rank, owner, slot=3)
                )
                for i0 in rows[::2]
            ]
            of_keys = [
                sum(
                    key_walk(walked, visit, int(j0), len(rows)).int()
                    for visit in returns(layout, T, rank, owner)
                )
                for j0 in keys[::2]
            ]
            assert torch.equal(torch.cat(of_queries, 2), want.int())
            assert torch.equal(torch.cat(of_keys, 2).mT, want.int())


def test_a_chunk_is_met_through_one_bucket_in_the_order_of_distance():
    layout, T = StripedLayout(4), 4096
    active = torch.rand(1, 1, T // BLOCK) < 0.3
    made = table(pack(active), T, layout)
    assert made.entries.dtype == made.bounds.dtype == torch.int32
    bounds = made.bounds[0, 0].tolist()
    for bucket in range(4):
        e = (made.entries[0, 0, bounds[bucket] : bounds[bucket + 1]] >> 2) - made.gap
        assert e.tolist() == sorted(set(e.tolist()))
        assert {-(-n // 2) % 4 for n in e.tolist()} <= {bucket}
    assert not made.entries[0, 0, bounds[-1] :].any()


def test_a_dimension_of_one_element_has_a_stride_that_a_kernel_can_hold():
    """Of a sequence of more than 2^31 elements, and of what `expand` or a slice makes."""
    for x in (
        torch.empty(1, 1 << 20, 32, 128, device="meta"),
        torch.empty(1, 256, 1, 128, device="meta").expand(1, 256, 1, 128)[:, ::2],
        torch.empty(256, 3, 128, device="meta").as_strided((1, 256, 1, 128), (0, 384, 5, 1)),
    ):
        seen = rows(x)
        assert seen.shape == x.shape
        assert all(0 < s < 2**31 for s in seen.stride())
        assert all(s % 128 == 0 for s in seen.stride()[:-1])
        kept = [n for n, size in enumerate(x.shape) if size > 1]
        assert [seen.stride(n) for n in kept] == [x.stride(n) for n in kept]
