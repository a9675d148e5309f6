"""Launches of the backward's kernels at K = 256, and what they must leave."""

from typing import Any, NamedTuple

from torch import Tensor

from qla_kernels.gdn.launch import wide
from qla_kernels.selftest import gdn_chains
from qla_kernels.selftest.cases import Cases, dtype_of, to
from qla_kernels.selftest.gdn_chains import ChainCall, prepared
from qla_kernels.varlen import capacity, chunk_table

V_OF_INPUTS = (128, 64)  # one tile of 64 columns, and several


class Gradients(NamedTuple):
    """What wide_dstate leaves."""

    dS: Tensor  # [NC, HV, V, K]
    y: Tensor  # [NC, HV, V / 64, 64, 64]
    dh0: Tensor  # [N, HV, K, V]


def run(x: ChainCall, kept: tuple[Tensor, Tensor] | None = None) -> Gradients:
    """Launches wide_dstate into memory full of NaN, which padding slots must keep."""
    table = chunk_table(x.k.shape[1], x.cu_seqlens)
    N, HV, V, K = len(x.cu_seqlens) - 1, *x.v.shape[2:], x.k.shape[-1]
    dS = x.k.new_empty(capacity(x.k.shape[1], N), HV, V, K)
    y, dh0 = wide.room_for_values(dS), x.g.new_empty(N, HV, K, V)
    g_cum, A = kept or prepared(x)
    wide.wide_dstate(
        x.q, x.k, x.do, g_cum, x.beta, A, x.dht, x.scale, x.cu_seqlens, table.first_chunk, dS, y,
        dh0,
    )  # fmt: skip
    for slots in (dS, y):
        assert slots[x.chunks() :].isnan().all(), "slots of no chunk were written"
    return Gradients(dS[: x.chunks()], y[: x.chunks()], dh0)


def check(x: ChainCall, got: Gradients) -> None:
    """Compares with fp64, per tensor and per head."""
    want, rounded = (gdn_chains.expected_with_values(x, dtype) for dtype in (None, x.k.dtype))
    for name, of in (("dS", 0), ("y", 1), ("dh0", 0)):
        a, b, c = getattr(got, name), getattr(want[of], name), getattr(rounded[of], name)
        gdn_chains.compare(name, a, b, c)


def _wide_dstate(variant: Any, i: int, device: str) -> None:
    """Checks a pack of lengths, every other one without states at its ends."""
    sizes = (variant.K, V_OF_INPUTS[i % 2])
    x = gdn_chains.case(gdn_chains.LENGTHS[i], dtype_of(variant), sizes=sizes, states=i % 2 == 0)
    on_device, kept = to((x, prepared(x)), device)
    check(x, to(run(on_device, kept), "cpu"))


CASES = (Cases(("gdn.wide_dstate",), _wide_dstate, range(len(gdn_chains.LENGTHS))),)
