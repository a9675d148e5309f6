"""Segments at K = 256: the cases of wide_windows, wide_map and wide_scan, and whole calls."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.launch import segments
from qla_kernels.gdn.launch.tensors import chunk_table
from qla_kernels.gdn.launch.wide_forward import solve_score
from qla_kernels.gdn.launch.wide_segments import wide_maps, wide_scan, wide_windows
from qla_kernels.gdn.ops import GdnForward
from qla_kernels.gdn.plan import WARM_LOG_BOUND, Plan
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.gdn_calls import Call, small
from qla_kernels.lab.selftest.gdn_forward import check
from qla_kernels.lab.selftest.gdn_segments import NEVER, SegmentedCall, batch, check_starts
from qla_kernels.lab.selftest.gdn_wide_forward import planned_forward


class WideStarts(NamedTuple):
    """What the launches before wide_fwd leave."""

    states: Tensor  # [P, HV, K, V] what enters the segments that there are
    windows: Tensor  # [P, HV] int32
    first_segment: Tensor  # [N + 1] int32


def wide_starts(x: SegmentedCall, most: int, limit: float) -> WideStarts:
    """Launches what comes before wide_fwd, for segments of at most `most` chunks.

    Memory that the launches fill begins as NaN, and windows begin as -1.
    """
    q, k, v, g, beta, h0, bounds = x
    HV, K = v.shape[2], k.shape[3]
    cut = segments.cut(g, bounds, most)
    table = chunk_table(q.shape[1], cut.bounds)
    saved = torch.empty_like(g), q.new_empty(1, q.shape[1], HV, 64)
    _, gates = solve_score(q, k, g, beta, K**-0.5, table, saved)
    windows = wide_windows(k, saved[0], beta, cut, limit)
    found = wide_maps(k, v, saved[1], gates, table.first_chunk, h0, cut, windows)
    starts = wide_scan(found, h0, cut.first_segment)
    num = int(cut.first_segment[-1])
    return WideStarts(starts[:num], windows[:num], cut.first_segment)


def cut_forward(
    x: Call, most: int, limit: float = WARM_LOG_BOUND, tile_v: int = 64, **changed: Any
) -> GdnForward:
    """Runs a forward whose sequences are cut into segments of at most `most` chunks."""
    return planned_forward(x, Plan(ForwardChoice(tile_v, False), most, limit), **changed)


def _starts(variant: Any, given: tuple[Any, ...], device: str) -> None:
    """Checks the states that enter segments of a pack."""
    (lengths, most, h0), limit = given
    x = batch(lengths, dtype_of(variant), sizes=(variant.K, variant.tile_v), h0=h0)
    got = wide_starts(to(x, device), most, limit)
    check_starts(x, got.states.cpu(), most)


def _cut_fwd(variant: Any, i: int, device: str) -> None:
    """Checks a call whose long sequence is cut; every other one has no initial state."""
    lengths, most = [([260, 0, 65], 2), ([1, 300], 1)][i]
    x = small(lengths, dtype_of(variant), sizes=(variant.K, variant.tile_v))
    if i % 2:
        x["initial_state"] = None
    done = to(cut_forward(to(x, device), most, NEVER, variant.tile_v), "cpu")
    check(x, done.o, done.final_state)


CASES = (
    Cases(
        ("gdn.wide_map", "gdn.wide_windows", "gdn.wide_scan"),
        _starts,
        [(([64, 300, 0], 1, True), WARM_LOG_BOUND), (([321], 2, False), NEVER)],
        [
            (([5000, 64, 3000], 12, True), WARM_LOG_BOUND),
            (([5000, 64, 3000], 12, False), NEVER),
        ],
        emulated=("bf16-k256-v128", "fp16-k256-v64"),
    ),
    Cases(
        ("gdn.wide_map", "gdn.wide_windows", "gdn.wide_scan", "gdn.wide_fwd"),
        _cut_fwd,
        range(2),
        emulated=("bf16-k256-v64",),
    ),
)
