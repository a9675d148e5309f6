"""Cases of the kernels that prepare chunks: their table, their gates, and A."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn.launch import chunks, tensors
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.compare import assert_close
from qla_kernels.lab.selftest.gdn_inputs import ChunkInputs, inputs
from qla_kernels.runtime.cpu import reference
from qla_kernels.runtime.varlen import chunk_table
from qla_kernels.tile.constants import GATE_FLOOR, LN2

# Lengths 0, 1 and around multiples of 16 and 64; empty sequences first, middle, last.
LENGTHS = ([64], [0, 65, 0, 1, 130, 0], [15, 16, 17, 63, 128], [1])

# (keys, gates, what the error of A may be, in units of rounding the exact A). The solve rounds the
# operands of its products to 10 mantissa bits, 3 more than bf16 has and as many as fp16: next to
# a bf16 rounding that is nothing, unless dependent keys without decay make products cancel; next
# to an fp16 rounding it is several times as much. They are fp16 operands, so entries below the
# smallest normal number lose bits: half a step of 2^-24 each is granted, next to a diagonal of 1.
KEYS_AND_GATES = (
    ("unit", "model", {torch.bfloat16: 1.1, torch.float16: 2.5}),
    ("unit", "none", {torch.bfloat16: 1.1, torch.float16: 2.5}),
    ("unit", "strong", {torch.bfloat16: 1.1, torch.float16: 2.5}),
    ("unit", "total", {torch.bfloat16: 1.1, torch.float16: 2.5}),
    ("long", "strong", {torch.bfloat16: 1.1, torch.float16: 2.5}),
    ("low rank", "none", {torch.bfloat16: 1.2, torch.float16: 5.0}),
)


def poisoned(x: ChunkInputs) -> tuple[Tensor, Tensor]:
    """Returns g_cum and A, full of NaN."""
    B, T, HV = x.g.shape
    return torch.full_like(x.g, torch.nan), x.k.new_full((B, T, HV, 64), torch.nan)


def check(x: ChunkInputs, g_cum: Tensor, A: Tensor, ratio: float) -> None:
    """Compares with fp64, for the same 16-bit keys; rows of no sequence are not written."""
    assert g_cum[:, x.tokens :].isnan().all(), "gates of padding tokens were written"
    assert A[:, x.tokens :].isnan().all(), "A of padding tokens was written"
    k, g, beta = (t[:, : x.tokens].double() for t in (x.k, x.g, x.beta))
    v = torch.zeros_like(g)[..., None]
    want = reference().gdn.chunked(k, k, v, g, beta, cu_seqlens=x.cu_seqlens)
    assert_close("g_cum", g_cum[:, : x.tokens], want.g_cum, rel=1e-6)
    got, exact = A[:, : x.tokens].double(), want.A
    place = _row_in_chunk(x)
    assert (
        got[place[None, :, None, None].expand_as(got) < torch.arange(64, device=A.device)] == 0
    ).all(), "A is not lower triangular"
    diagonal = got.gather(-1, place[None, :, None, None].expand(1, -1, got.shape[2], 1))
    assert (diagonal == 1).all(), "the diagonal of A is not 1"
    unit = torch.nn.functional.one_hot(place, 64)[None, :, None]
    rounding = (exact.to(A.dtype).double() - exact).norm()
    error = (got - exact).norm()
    floor = 2.0**-25 * (exact - unit).count_nonzero().sqrt()
    assert error <= ratio * rounding + floor, (
        f"A: {error / rounding:.2f} roundings, allowed {ratio}"
    )


def _row_in_chunk(x: ChunkInputs) -> Tensor:
    lengths = x.cu_seqlens.diff().tolist()
    return torch.cat([torch.arange(n) % 64 for n in lengths]).to(x.k.device)


def _kkt_solve(variant: Any, keys_and_gates: tuple[Any, ...], device: str) -> None:
    (key, gate, ratio), heads = keys_and_gates
    dtype = dtype_of(variant)
    for seed, lengths in enumerate(LENGTHS):
        x = inputs(lengths, heads, variant.K, dtype, gate, key, seed=seed)
        table = chunk_table(x.k.shape[1], x.cu_seqlens)
        given = to((x.k, x.g, x.beta, x.cu_seqlens, table, poisoned(x)), device)
        g_cum, A = chunks.kkt_solve(*given)
        check(x, g_cum.cpu(), A.cpu(), ratio[dtype])


def _gate(variant: Any, given: tuple[int, str], device: str) -> None:
    """Checks any number of heads, of strided inputs; rows past a chunk's end are level, beta 0.

    A beta of 16 bits is also written in fp32; tokens of no chunk are left alone.
    """
    heads, kind = given
    x = inputs([70, 0, 64, 1], (1, heads), 64, torch.bfloat16, kind)
    x = x._replace(beta=x.beta.to(dtype_of(variant)))
    g, beta = (torch.stack([t, t], -1).to(device).unbind(-1)[0] for t in (x.g, x.beta))
    table = chunk_table(x.g.shape[1], x.cu_seqlens)
    g_cum, wide = torch.full((2, *x.g.shape), torch.nan, device=device)
    is_wide = beta.dtype == torch.float32
    gates = chunks.gate(g, beta, to(table, device), g_cum, None if is_wide else wide).cpu()
    g_cum = g_cum.cpu()
    if not is_wide:
        assert torch.equal(wide[:, : x.tokens].cpu(), x.beta[:, : x.tokens].float()), "beta in fp32"
        assert wide[:, x.tokens :].isnan().all(), "beta of padding tokens was written"
    assert g_cum[:, x.tokens :].isnan().all(), "gates of padding tokens were written"
    for chunk, (tok0, rows) in enumerate(table.chunks[: int(table.num_chunks)].tolist()):
        raw = (x.g[0, tok0 : tok0 + rows].double() / LN2).clamp(min=GATE_FLOOR)
        gamma = torch.cat([raw.cumsum(0), raw.sum(0).expand(64 - rows, -1)])
        end = gamma[15::16].repeat_interleave(16, 0)
        weight = torch.zeros(64, heads)
        weight[:rows] = x.beta[0, tok0 : tok0 + rows]
        assert_close("gamma", gates[chunk, :, 0], gamma.T, rel=1e-6)
        assert torch.equal(gates[chunk, :, 1], weight.T), "beta"
        assert_close("fall", gates[chunk, :, 2], (end - gamma).exp2().T, rel=1e-5)
        assert_close("g_cum", g_cum[0, tok0 : tok0 + rows], gamma[:rows] * LN2, rel=1e-6)


def _chunk_table(variant: Any, lengths: list[int], device: str) -> None:
    """Checks that one launch makes the table that tensor operations make."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(dtype_of(variant))
    num_tokens = sum(lengths) + 7
    want = chunk_table(num_tokens, bounds)
    got = tensors.chunk_table(num_tokens, bounds.to(device))
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert torch.equal(a.cpu(), b), name


CASES = (
    Cases(
        ("gdn.chunk_table",),
        _chunk_table,
        [[64], [0, 65, 0, 1, 130, 0], [0, 0], [5000], [1] * 1500, [*range(200)]],
    ),
    Cases(
        ("gdn.gate",),
        _gate,
        [(heads, kind) for heads in (1, 31, 32, 33, 70) for kind in ("model", "total")],
    ),
    Cases(
        ("gdn.kkt_solve",),
        _kkt_solve,
        [(each, (2, 4)) for each in KEYS_AND_GATES],
        [(each, heads) for each in KEYS_AND_GATES for heads in ((1, 3), (4, 4))],
    ),
)
