"""A forward in segments, launch by launch, and what it must produce: emulated and device tiers."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn import heuristics
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.launch import segments
from qla_kernels.gdn.launch.tensors import room_for_chunks
from reference import gdn
from tests.gdn_inputs import gates, keys

# columns of V of a CTA, and whether it solves for A
GIVEN, SOLVING = heuristics.ForwardChoice(128, False), heuristics.ForwardChoice(64, True)


class Batch(NamedTuple):
    q: Tensor  # [1, T, H, K]
    k: Tensor
    v: Tensor  # [1, T, HV, V]
    g: Tensor  # [1, T, HV] fp32
    beta: Tensor
    h0: Tensor | None  # [N, HV, K, V] fp32
    cu_seqlens: Tensor

    @property
    def bounds(self) -> list[int]:
        return self.cu_seqlens.tolist()


class Cut(NamedTuple):
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
) -> Batch:
    """Packed sequences, with rows of nobody behind them that are NaN."""
    (H, HV), (K, V), tokens = heads, sizes, sum(lengths)
    q, k = (keys(kind, tokens, H, K).to(dtype) for kind in ("unit", key))
    v = torch.randn(tokens, HV, V).to(dtype)
    rows = (q, k, v, gates(gate, tokens, HV), torch.rand(tokens, HV))
    padded = (torch.cat([x, x.new_full((padding, *x.shape[1:]), torch.nan)])[None] for x in rows)
    start = torch.randn(len(lengths), HV, K, V) if h0 else None
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return Batch(*(None if x is None else x.to(device) for x in (*padded, start, bounds)))


def run(
    x: Batch,
    most: int,
    limit: float,
    kernel: heuristics.ForwardChoice = GIVEN,
    grows: bool = False,
    between: Callable[[], None] = lambda: None,
) -> Cut:
    """Segments of at most so many chunks, launched as launch.gdn_fwd does; `between` launches."""
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
    return Cut(o, starts[:num], cut.bounds[:num], final)


def whole(x: Batch, kernel: heuristics.ForwardChoice = GIVEN) -> tuple[Tensor, Tensor]:
    """o and the final states of sequences that are not cut."""
    scale = x.q.shape[-1] ** -0.5
    g_cum, A = launch.kkt_solve(x.k, x.g, x.beta, x.cu_seqlens)
    N, HV, K, V = len(x.cu_seqlens) - 1, x.v.shape[2], x.k.shape[3], x.v.shape[3]
    o, final = torch.empty_like(x.v), x.g.new_empty(N, HV, K, V)
    launch.fused_fwd(
        x.q, x.k, x.v, x.g, x.beta, scale, x.h0, x.cu_seqlens, o, final, (g_cum, A), kernel
    )  # fmt: skip
    return o, final


def expected(x: Batch, operand_dtype: torch.dtype | None = None) -> gdn.Forward:
    """In fp64; with an operand_dtype, with the kernels' roundings."""
    q, k, v, beta = (y.nan_to_num().double().cpu() for y in (x.q, x.k, x.v, x.beta))
    g = x.g.double().cpu().nan_to_num(neginf=-torch.inf)
    h0 = None if x.h0 is None else x.h0.double().cpu()
    return gdn.chunked(
        q, k, v, g, beta, None, h0, x.cu_seqlens.cpu(), operand_dtype=operand_dtype
    )  # fmt: skip
