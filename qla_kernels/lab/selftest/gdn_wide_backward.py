"""Launches of the kernels of a backward whose chains leave V' and Y, and what they must leave."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.launch import wide_chains
from qla_kernels.lab.selftest import gdn_backward, gdn_chains
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.gdn_calls import small
from qla_kernels.lab.selftest.gdn_chains import ChainCall, prepared
from qla_kernels.runtime.varlen import capacity, chunk_table

V_OF_INPUTS = (128, 64)  # one tile of 64 columns, and several
# By the variant's K: sizes of whole backwards, which take these kernels for some sizes alone
SIZES = {256: ((256, 128), (256, 64)), 128: ((96, 192), (128, 192))}


class WideChains(NamedTuple):
    """What both chains leave."""

    h: Tensor  # [NC, HV, V, K]
    vn: Tensor  # [NC, HV, V / 64, 64, 64]
    dS: Tensor  # as h
    y: Tensor  # as vn
    dh0: Tensor  # [N, HV, K, V]


def run(x: ChainCall, kept: tuple[Tensor, Tensor] | None = None) -> WideChains:
    """Launches both chains into memory full of NaN, which padding slots must keep."""
    first_chunk = chunk_table(x.k.shape[1], x.cu_seqlens).first_chunk
    N, HV, V, K = len(x.cu_seqlens) - 1, *x.v.shape[2:], x.k.shape[-1]
    h, dS = (x.k.new_empty(capacity(x.k.shape[1], N), HV, V, K) for _ in range(2))
    vn, y, dh0 = (
        wide_chains.room_for_values(h),
        wide_chains.room_for_values(dS),
        x.g.new_empty(N, HV, K, V),
    )
    g_cum, A, dv = *(kept or prepared(x)), torch.empty_like(x.v)
    wide_chains.wide_states(x.k, x.v, g_cum, x.beta, A, x.h0, x.cu_seqlens, first_chunk, h, vn)
    wide_chains.wide_dstate(
        x.q, x.k, x.do, g_cum, x.beta, A, x.dht, x.scale, x.cu_seqlens, first_chunk, dS, y,
        dv, dh0,
    )  # fmt: skip
    for slots in (h, vn, dS, y):
        assert slots[x.chunks() :].isnan().all(), "slots of no chunk were written"
    h, vn, dS, y = (slots[: x.chunks()] for slots in (h, vn, dS, y))
    return WideChains(h, vn, dS, y, dh0)


def check(x: ChainCall, got: WideChains) -> None:
    """Compares with fp64, per tensor and per head."""
    want, rounded = (gdn_chains.expected_with_values(x, dtype) for dtype in (None, x.k.dtype))
    for name in WideChains._fields:
        of = int(name in gdn_chains.ChunkValues._fields)
        a, b, c = getattr(got, name), getattr(want[of], name), getattr(rounded[of], name)
        gdn_chains.compare(name, a, b, c)


def _chains(variant: Any, i: int, device: str) -> None:
    """Checks a pack of lengths, every other one without states at its ends."""
    sizes = (variant.K, V_OF_INPUTS[i % 2])
    x = gdn_chains.case(gdn_chains.LENGTHS[i], dtype_of(variant), sizes=sizes, states=i % 2 == 0)
    on_device, kept = to((x, prepared(x)), device)
    check(x, to(run(on_device, kept), "cpu"))


def _wide_grads(variant: Any, i: int, device: str) -> None:
    """Checks a whole backward; every other one has no initial state."""
    lengths, heads = gdn_backward.LENGTHS[i]
    sizes = SIZES[variant.K][i % 2]
    x = small(lengths, dtype_of(variant), heads=heads, sizes=sizes)
    do, dht = gdn_backward.gradients(x)
    if i % 2:
        x["initial_state"] = None
    got = gdn_backward.backward(*to((x, do, dht, gdn_backward.saved(x)), device))
    gdn_backward.check(x, do, dht, to(got, "cpu"))


CASES = (
    Cases(("gdn.wide_states", "gdn.wide_dstate"), _chains, range(len(gdn_chains.LENGTHS))),
    Cases(("gdn.wide_grads",), _wide_grads, range(len(gdn_backward.LENGTHS))),
)
