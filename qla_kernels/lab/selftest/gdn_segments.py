"""Sequences in segments, launch by launch, and what they must leave."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from qla_kernels.gdn import plan
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.launch import segments
from qla_kernels.gdn.launch.tensors import room_for_chunks
from qla_kernels.gdn.plan import WARM_LOG_BOUND
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.compare import assert_close, relative_l2
from qla_kernels.lab.selftest.gdn_inputs import gates, keys
from qla_kernels.runtime.cpu import reference
from qla_kernels.tile.constants import CHUNK

# Errors are counted in units of what rounding the operands of every product costs by itself.
RATIO = 1.2
FP32 = 1e-5  # what sums and decays in fp32 cost, and what a warm head leaves out
NEVER = -math.inf

# columns of V of a CTA, and whether it solves for A
GIVEN, SOLVING = ForwardChoice(128, False), ForwardChoice(64, True)


Saved = tuple[Tensor, Tensor] | None  # g_cum and A


class SegmentedCall(NamedTuple):
    """Packed sequences, as the launches take them."""

    q: Tensor  # [1, T, H, K]
    k: Tensor
    v: Tensor  # [1, T, HV, V]
    g: Tensor  # [1, T, HV] fp32
    beta: Tensor
    h0: Tensor | None  # [N, HV, K, V] fp32
    cu_seqlens: Tensor

    @property
    def bounds(self) -> list[int]:
        """Returns the ends of the sequences, after a 0."""
        found: list[int] = self.cu_seqlens.tolist()
        return found


class CutResults(NamedTuple):
    """What segments leave."""

    o: Tensor  # [1, T, HV, V]
    starts: Tensor  # [P, HV, K, V], of the segments that there are
    begins: Tensor  # [P] their first tokens
    final: Tensor  # [N, HV, K, V]


def batch(
    lengths: list[int],
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int] = (1, 2),
    sizes: tuple[int, int] = (128, 128),
    gate: str = "model",
    key: str = "unit",
    h0: bool = True,
    padding: int = 3,
    device: str = "cpu",
) -> SegmentedCall:
    """Returns packed sequences, then rows of no sequence that are NaN."""
    (H, HV), (K, V), tokens = heads, sizes, sum(lengths)
    q, k = (keys(kind, tokens, H, K).to(dtype) for kind in ("unit", key))
    v = torch.randn(tokens, HV, V).to(dtype)
    rows = (q, k, v, gates(gate, tokens, HV), torch.rand(tokens, HV))
    q, k, v, g, beta = (
        torch.cat([x, x.new_full((padding, *x.shape[1:]), torch.nan)])[None] for x in rows
    )
    start = torch.randn(len(lengths), HV, K, V) if h0 else None
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    found: SegmentedCall = to(SegmentedCall(q, k, v, g, beta, start, bounds), device)
    return found


def run(
    x: SegmentedCall,
    most: int,
    limit: float,
    kernel: ForwardChoice = GIVEN,
    grows: bool = False,
    between: Callable[[], None] = lambda: None,
) -> CutResults:
    """Launches segments of at most `most` chunks, as gdn_fwd does; calls `between` launches."""
    N, HV, K, V = len(x.cu_seqlens) - 1, x.v.shape[2], x.k.shape[3], x.v.shape[3]
    o, final = torch.empty_like(x.v), x.g.new_empty(N, HV, K, V)
    g, A, saved, growth = x.g, None, None, None
    table = None if kernel.solves else room_for_chunks(x.q.shape[1], x.cu_seqlens)
    cut = segments.cut(x.g, x.cu_seqlens, most, table=table)
    between()
    if not kernel.solves:
        growth = torch.empty_like(x.g) if grows else None
        g, A = saved = launch.kkt_solve(x.k, x.g, x.beta, x.cu_seqlens, table, growth=growth)
    between()
    found = segments.maps(
        x.k, x.v, g, x.beta, A, x.h0, cut, limit, growth, not kernel.solves
    )  # fmt: skip
    between()
    starts = segments.start_states(found, x.h0, cut)
    between()
    launch.fused_fwd(
        x.q, x.k, x.v, x.g, x.beta, K**-0.5, starts, cut.bounds, o, final, saved, kernel,
        cut.ends_of,
    )  # fmt: skip
    num = int(cut.first_segment[-1])
    return CutResults(o, starts[:num], cut.bounds[:num], final)


def whole(x: SegmentedCall, kernel: ForwardChoice = GIVEN) -> tuple[Tensor, Tensor]:
    """Returns o and the final states of sequences that are not cut."""
    scale = x.q.shape[-1] ** -0.5
    g_cum, A = launch.kkt_solve(x.k, x.g, x.beta, x.cu_seqlens)
    N, HV, K, V = len(x.cu_seqlens) - 1, x.v.shape[2], x.k.shape[3], x.v.shape[3]
    o, final = torch.empty_like(x.v), x.g.new_empty(N, HV, K, V)
    launch.fused_fwd(
        x.q, x.k, x.v, x.g, x.beta, scale, x.h0, x.cu_seqlens, o, final, (g_cum, A), kernel
    )  # fmt: skip
    return o, final


def expected(x: SegmentedCall, operand_dtype: torch.dtype | None = None) -> Any:
    """Returns the forward in fp64; with an operand_dtype, with the kernels' roundings."""
    q, k, v, beta = (y.nan_to_num().double().cpu() for y in (x.q, x.k, x.v, x.beta))
    g = x.g.double().cpu().nan_to_num(neginf=-torch.inf)
    h0 = None if x.h0 is None else x.h0.double().cpu()
    return reference().gdn.chunked(
        q, k, v, g, beta, None, h0, x.cu_seqlens.cpu(), operand_dtype=operand_dtype
    )  # fmt: skip


def prepared(x: SegmentedCall) -> tuple[Tensor, Tensor]:
    """Returns g_cum and A without errors; rows of no sequence are NaN."""
    saved = expected(x)
    g_cum, A = saved.g_cum.float(), saved.A.to(x.k.dtype)
    for y in (g_cum, A):
        y[:, x.bounds[-1] :] = torch.nan
    return g_cum, A


def maps(
    x: SegmentedCall, cut: segments.Segments, limit: float, solves: bool, saved: Saved = None
) -> segments.Maps:
    """Launches segment_map on g, or on a g_cum and A without errors, NaN past the last token."""
    if solves:
        return segments.maps(x.k, x.v, x.g, x.beta, None, x.h0, cut, limit)
    g_cum, A = saved or prepared(x)
    return segments.maps(x.k, x.v, g_cum, x.beta, A, x.h0, cut, limit)


def starts(
    x: SegmentedCall, most: int, limit: float, solves: bool = False, saved: Saved = None
) -> Tensor:
    """Returns the states that enter the segments that there are, [P, HV, K, V]."""
    cut = segments.cut(x.g, x.cu_seqlens, most)
    found = maps(x, cut, limit, solves, saved)
    return segments.start_states(found, x.h0, cut)[: int(cut.first_segment[-1])]


def states_between(x: SegmentedCall, most: int, operand_dtype: torch.dtype | None = None) -> Tensor:
    """Returns what `starts` should be: some states before chunks, those before sequences."""
    done = expected(x, operand_dtype)
    before = iter(done.h[0])
    found = []
    for n, (a, b) in enumerate(zip(x.bounds, x.bounds[1:], strict=False)):
        start = torch.zeros_like(done.final_state[n]) if x.h0 is None else x.h0[n].double()
        states = [next(before) for _ in range(-(-(b - a) // CHUNK))] or [start]
        pieces = max(1, -(-len(states) // most))
        found += [start, *(states[i * len(states) // pieces] for i in range(1, pieces))]
    return torch.stack(found)


def check_starts(x: SegmentedCall, got: Tensor, most: int) -> None:
    """Compares the states that enter the segments with fp64."""
    want, rounded = states_between(x, most), states_between(x, most, x.k.dtype)
    for head in range(x.v.shape[2]):
        limit = RATIO * relative_l2(rounded[:, head], want[:, head]) + FP32
        assert_close(f"head {head}", got[:, head], want[:, head], limit)


def _segment_map(variant: Any, given: tuple[Any, ...], device: str) -> None:
    """Checks the states that enter segments, folded by one of segment_scan's two variants."""
    (lengths, most, V, h0, columns), limit = given
    x = batch(lengths, dtype_of(variant), sizes=(variant.K, V), h0=h0)
    on_device, saved = to((x, prepared(x)), device)
    with mock.patch.object(plan, "scan_columns", return_value=columns):
        got = starts(on_device, most, limit, variant.solves, saved)
    check_starts(x, got.cpu(), most)


CASES = (
    Cases(
        ("gdn.segment_map", "gdn.segment_scan"),
        _segment_map,
        [
            (given, limit)
            for limit in (WARM_LOG_BOUND, NEVER)
            for given in (
                ([321], 2, 128, True, 16),
                ([64, 300, 0, 500], 2, 64, False, 32),
                ([130, 0], 1, 64, True, 16),
            )
        ],
    ),
)
