"""Launches of the backward's chains over segments, and what they must leave."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from qla_kernels.gdn import plan
from qla_kernels.gdn.launch import chains, segments
from qla_kernels.gdn.plan import WARM_LOG_BOUND
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.compare import assert_close, relative_l2
from qla_kernels.lab.selftest.gdn_chains import (
    SMALLEST,
    ChainCall,
    Chains,
    case,
    expected,
    prepared,
)
from qla_kernels.lab.selftest.gdn_segments import FP32, NEVER, RATIO, Saved
from qla_kernels.runtime.varlen import chunk_table


def end_gradients(
    x: ChainCall, cut: segments.Segments, limit: float, kept: Saved = None
) -> tuple[Tensor, Tensor]:
    """Returns the states that enter the segments, and the gradients of those that leave them."""
    g_cum, A = kept or prepared(x)
    found = segments.maps(x.k, x.v, g_cum, x.beta, A, x.h0, cut, limit)
    starts = segments.start_states(found, x.h0, cut)
    ends = segments.end_gradients(
        x.q, x.k, x.do, g_cum, x.beta, A, x.dht, x.scale, found, cut, limit
    )
    return starts, ends


def run(x: ChainCall, most: int, limit: float, kept: Saved = None) -> Chains:
    """Launches both chains over segments: chunks are those of the sequences, in the same order."""
    cut = segments.cut(x.g, x.cu_seqlens, most)
    starts, ends = end_gradients(x, cut, limit, kept)
    g_cum, A = kept or prepared(x)
    first_chunk = chunk_table(x.k.shape[1], cut.bounds).first_chunk
    ht, dh0 = torch.empty_like(starts), torch.empty_like(ends)
    h = chains.chunk_states(x.k, x.v, g_cum, x.beta, A, starts, cut.bounds, first_chunk, 1, ht)
    dS = chains.dstate_chain(
        x.q, x.k, x.do, g_cum, x.beta, A, ends, x.scale, cut.bounds, first_chunk, dh0
    )
    first = cut.first_segment.long()
    return Chains(h[: x.chunks()], ht[first[1:] - 1], dS[: x.chunks()], dh0[first[:-1]])


def check(x: ChainCall, got: Chains) -> None:
    """Compares with fp64, per head."""
    want, rounded = expected(x), expected(x, x.k.dtype)
    for name in Chains._fields:
        for head in range(x.v.shape[2]):
            a, b, c = (getattr(y, name)[:, head] for y in (got, want, rounded))
            limit = RATIO * relative_l2(c, b, SMALLEST) + FP32
            assert_close(f"{name} of head {head}", a, b, limit, at_least=SMALLEST)


def _segment_map_bwd(variant: Any, given: tuple[Any, ...], device: str) -> None:
    """Checks what whole sequences leave, folded by one of segment_scan's two variants."""
    (lengths, most, V, states, columns), limit = given
    x = case(lengths, dtype_of(variant), sizes=(variant.K, V), states=states)
    on_device, kept = to((x, prepared(x)), device)
    with mock.patch.object(plan, "scan_columns", return_value=columns):
        got = run(on_device, most, limit, kept)
    check(x, to(got, "cpu"))


CASES = (
    Cases(
        ("gdn.segment_map_bwd", "gdn.segment_scan"),
        _segment_map_bwd,
        [
            (given, limit)
            for limit in (WARM_LOG_BOUND, NEVER)
            for given in (([321], 2, 128, True, 16), ([64, 0, 200], 1, 64, False, 32))
        ],
    ),
)
