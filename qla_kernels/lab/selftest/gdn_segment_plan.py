"""Tables of segment_plan: where sequences are cut, and which path is taken by the longest one."""

from collections import Counter
from typing import Any

import torch

from qla_kernels.gdn.launch import segments
from qla_kernels.gdn.launch.tensors import room_for_chunks
from qla_kernels.gdn.lengths import Lengths, device_spacing
from qla_kernels.gdn.plan import band_of
from qla_kernels.gdn.sharded.layouts import Stretch
from qla_kernels.gdn.sharded.links import open_ends
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.runtime.varlen import chunk_table
from qla_kernels.tile.constants import CHUNK


def _segment_plan(
    variant: Any, given: tuple[list[int], int, tuple[Stretch, ...]], device: str
) -> None:
    """Checks where sequences are cut, and the table of chunks that segment_plan writes, too."""
    lengths, most, stretches = given
    bounds_of_tokens = torch.tensor([0, *lengths]).cumsum(0).to(dtype_of(variant))
    num_tokens = sum(lengths) + 5
    g, cu_seqlens = to((torch.randn(1, num_tokens, 3), bounds_of_tokens), device)
    table = room_for_chunks(num_tokens, cu_seqlens)
    ends = open_ends(stretches) if stretches else segments.NO_ENDS
    got = segments.cut(g, cu_seqlens, most, ends, table)
    want = chunk_table(num_tokens, bounds_of_tokens)
    for name, a, b in zip(want._fields, table, want, strict=True):
        assert torch.equal(a.cpu(), b), name
    check_segments(got, lengths, most, stretches)


def check_segments(
    got: segments.Segments, lengths: list[int], most: int, stretches: tuple[Stretch, ...] = ()
) -> None:
    """Compares tables with those of sequences from token 0 on, cut by segments of `most` chunks."""
    came = [x.first for x in stretches if x.before]
    left = [x.end - 1 for x in stretches if x.after]
    bounds: list[int] = []
    starts_of: list[int] = []
    ends_of: list[int] = []
    first = [0]
    for n, length in enumerate(lengths):
        chunks = -(-length // CHUNK)
        pieces = max(1, -(-chunks // most))
        begin = sum(lengths[:n])
        bounds += [begin] * (n in came)
        bounds += [begin + i * chunks // pieces * CHUNK for i in range(pieces)]
        bounds += [begin + length] * (n in left)
        pieces += (n in came) + (n in left)
        starts_of += [n, *[-1] * (pieces - 1)]
        ends_of += [*[-1] * (pieces - 1), n]
        first.append(first[-1] + pieces)
    rest = got.capacity + 1 - len(bounds)
    assert rest >= 1, "capacity"
    assert got.bounds.tolist() == bounds + [sum(lengths)] * rest, "bounds"
    assert got.starts_of.tolist() == starts_of + [-1] * rest, "starts_of"
    assert got.ends_of.tolist() == ends_of + [-1] * rest, "ends_of"
    assert got.first_segment.tolist() == first, "first_segment"


def _segment_plan_of_bands(
    variant: Any, given: tuple[list[int], tuple[tuple[int, int, int], ...]], device: str
) -> None:
    """Checks which band is taken, how finely it cuts, and that other paths have no tokens."""
    lengths, rows = given
    bounds_of_tokens = torch.tensor([0, *lengths]).cumsum(0).to(dtype_of(variant))
    N, num_tokens = len(lengths), sum(lengths) + 5
    g, cu_seqlens = to((torch.randn(1, num_tokens, 3), bounds_of_tokens), device)
    table = room_for_chunks(num_tokens, cu_seqlens)
    shape = max(path for _, path, _ in rows), N + 1
    whole = segments.Whole(*(torch.empty(shape, dtype=torch.int32, device=device) for _ in "be"))
    got = segments.cut(g, cu_seqlens, None, table=table, bands=rows, whole=whole)
    chunks = sequence_chunks_of(lengths)
    _, path, most = band_of(rows, chunks)
    empty = [num_tokens] * (N + 1), [-1] * (N + 1)
    for i in range(shape[0]):
        want = (bounds_of_tokens.tolist(), list(range(N + 1))) if path == i + 1 else empty
        assert (whole.bounds[i].tolist(), whole.ends_of[i].tolist()) == want, f"path {i + 1}"
    if path == 0:
        check_segments(got, lengths, device_spacing(chunks, most))
        for name, a, b in zip(
            table._fields, table, chunk_table(num_tokens, bounds_of_tokens), strict=True
        ):
            assert torch.equal(a.cpu(), b), name
        return
    rest = got.capacity + 1
    assert got.bounds.tolist() == [num_tokens] * rest, "bounds"
    assert got.starts_of.tolist() == got.ends_of.tolist() == [-1] * rest, "starts_of, ends_of"
    assert got.first_segment.tolist() == list(range(N + 1)), "first_segment"
    assert not any(x.any() for x in table), "chunks"


def sequence_chunks_of(lengths: list[int]) -> Lengths:
    """Returns (chunks, how many sequences have that many), without rounding."""
    return tuple(sorted(Counter(-(-length // CHUNK) for length in lengths).items()))


CASES = (
    Cases(
        ("gdn.segment_plan",),
        _segment_plan,
        [
            (lengths, most, ())
            for lengths in ([64], [0, 65, 0, 1, 1300, 0], [0, 0], [5000, 576], [1] * 1500)
            for most in (1, 3)
        ]
        + [
            (lengths, 2, stretches)
            for lengths, stretches in (
                ([700], (Stretch(0, 1, 0, 1),)),
                ([700], (Stretch(0, 1, 2, 1),)),
                ([300, 64, 1], (Stretch(0, 3, 1, 0),)),
                ([300, 300], (Stretch(0, 1, 1, 4), Stretch(1, 2, 4, 1))),
                ([300, 300], (Stretch(0, 1, 0, 1), Stretch(1, 2, 1, 0))),
                ([65, 235, 1, 190, 109], (Stretch(0, 2, 3, 2), Stretch(2, 5, 2, 1))),
                ([65, 235, 1, 190, 109], (Stretch(0, 3, 0, 0), Stretch(3, 5, 2, 0))),
                ([1] * 1500, (Stretch(0, 750, 1, 1), Stretch(750, 1500, 1, 1))),
            )
        ],
    ),
    Cases(
        ("gdn.segment_plan",),
        _segment_plan_of_bands,
        [
            (lengths, rows)
            for lengths in ([700], [0, 65, 0, 1, 1300, 0], [0, 0], [5000, 576, 64], [1] * 1500)
            for rows in (
                ((0, 0, 7),),
                ((0, 0, 0), (2, 0, 3), (20, 0, 12)),
                ((0, 1, 0), (12, 0, 5), (70, 2, 0)),
            )
        ],
    ),
)
