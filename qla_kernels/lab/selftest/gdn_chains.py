"""Launches of the backward's two chains, and what they must leave."""

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from qla_kernels.gdn.kernels import dstate_chain
from qla_kernels.gdn.launch import chains
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.compare import assert_close, relative_l2
from qla_kernels.lab.selftest.gdn_inputs import gates, keys
from qla_kernels.runtime.cpu import reference
from qla_kernels.runtime.varlen import chunk_table

# Lengths 0, 1 and around 64; empty sequences first, in the middle, last; several chunks.
LENGTHS = ([64], [0, 65, 0, 1, 130, 0], [63, 128, 200], [1], [0, 0], [2, 321])

# Errors are counted in units of what rounding the operands of every product costs by itself.
RATIO = 1.05
RATIO_OF_A_HEAD = 1.2
FP32 = 1e-5  # what sums and decays in fp32 cost where no product's rounding shows
SMALLEST = torch.finfo(torch.float16).tiny  # strong decay leaves less: as an operand in fp16, 0


class ChainCall(NamedTuple):
    """What both chains are given, but for g_cum and A."""

    q: Tensor  # [1, T, H, K]
    k: Tensor
    v: Tensor  # [1, T, HV, V]
    do: Tensor
    g: Tensor  # [1, T, HV] fp32
    beta: Tensor
    h0: Tensor | None  # [N, HV, K, V] fp32
    dht: Tensor | None
    cu_seqlens: Tensor
    scale: float

    def chunks(self) -> int:
        """Returns the number of chunks."""
        return int(-(-self.cu_seqlens.diff() // 64).sum())


class Chains(NamedTuple):
    """What both chains leave: states before and their gradients after each chunk."""

    h: Tensor  # [NC, HV, V, K]
    ht: Tensor  # [N, HV, K, V]
    dS: Tensor  # [NC, HV, V, K]
    dh0: Tensor  # [N, HV, K, V]


def case(
    lengths: list[int],
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int] = (1, 2),
    sizes: tuple[int, int] = (128, 128),
    gate: str = "model",
    key: str = "unit",
    states: bool = True,
    padding: int = 3,
) -> ChainCall:
    """Returns packed sequences for heads = (H, HV), then `padding` tokens of NaN."""
    (H, HV), (K, V), tokens = heads, sizes, sum(lengths)
    q, k = (keys(kind, tokens, H, K).to(dtype) for kind in ("unit", key))
    v, do = (torch.randn(tokens, HV, V).to(dtype) for _ in range(2))
    g, beta = gates(gate, tokens, HV), torch.rand(tokens, HV)
    q, k, v, do, g, beta = (
        torch.cat([x, x.new_full((padding, *x.shape[1:]), torch.nan)])[None]
        for x in (q, k, v, do, g, beta)
    )
    h0, dht = (torch.randn(len(lengths), HV, K, V) if states else None for _ in range(2))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return ChainCall(q, k, v, do, g, beta, h0, dht, bounds, 0.7 * K**-0.5)


def prepared(x: ChainCall) -> tuple[Tensor, Tensor]:
    """Returns g_cum and A, as kkt_solve leaves them in memory full of NaN."""
    done = forward(x, x.k.dtype)
    g_cum, A = done.g_cum.float(), done.A.to(x.k.dtype)
    for tensor in (g_cum, A):
        tensor[:, x.cu_seqlens[-1] :] = torch.nan
    return g_cum, A


def forward(x: ChainCall, operand_dtype: torch.dtype | None) -> Any:
    """Returns the forward in fp64; with an operand_dtype, with the kernels' roundings."""
    q, k, v, beta = (y.nan_to_num().double() for y in (x.q, x.k, x.v, x.beta))
    g = x.g.double().nan_to_num(neginf=-torch.inf)
    h0 = None if x.h0 is None else x.h0.double()
    return reference().gdn.chunked(
        q, k, v, g, beta, x.scale, h0, x.cu_seqlens, operand_dtype=operand_dtype
    )  # fmt: skip


class ChunkValues(NamedTuple):
    """What the chains at K = 256 leave besides states, for each chunk and 64 columns of V."""

    vn: Tensor  # [NC, HV, V / 64, 64, 64] V'
    y: Tensor  # likewise, Y


def expected(x: ChainCall, operand_dtype: torch.dtype | None = None) -> Chains:
    """Returns results in fp64; with an operand_dtype, with the kernels' roundings."""
    return expected_with_values(x, operand_dtype)[0]


def expected_with_values(
    x: ChainCall, operand_dtype: torch.dtype | None = None
) -> tuple[Chains, ChunkValues]:
    """Returns what `expected` does, and V' and Y."""
    gdn_chunked, gdn_backward = reference().gdn_chunked, reference().gdn_backward
    done = forward(x, operand_dtype)
    H, K = x.k.shape[2:]
    rounded = gdn_chunked.operand_rounding(operand_dtype)
    spans = reference().chunks.sequence_spans(1, x.k.shape[1], x.cu_seqlens)
    chunks = reference().chunks.cut(spans, 64, x.k.device)
    gamma = gdn_chunked.row_tiles(chunks.tiles_held(done.g_cum, torch.float64), H)
    beta = gdn_chunked.row_tiles(chunks.tiles(x.beta, torch.float64), H)[..., None]
    G, e, d, last = gdn_chunked.decay_tiles(gamma)
    q, k = (gdn_chunked.key_tiles(chunks, y, torch.float64) for y in (x.q, x.k))
    v, do, A = (gdn_chunked.value_tiles(chunks, y, H, torch.float64) for y in (x.v, x.do, done.A))
    tiles = gdn_chunked.Tiles(q, k, beta, A, G, e, d, last)
    start = gdn_chunked.start_states(x.h0, v, chunks, K)
    vn = gdn_chunked.chain(chunks, tiles, v, start, rounded).v_new
    unit = x.scale if operand_dtype == torch.bfloat16 else 1.0  # of all that the chain rounds
    do_scaled = x.scale / unit * e * do
    through_P = rounded(gdn_chunked.attention_in_chunk(tiles, x.scale / unit)).mT @ do
    end = gdn_chunked.start_states(x.dht, do, chunks, K) / unit
    back = gdn_backward.reverse_chain(chunks, tiles, do_scaled, through_P, end, rounded)
    first = (chunks.step < dstate_chain.EXACT).view(-1, 1, 1, 1, 1)
    left = torch.where(first, do_scaled - rounded(do_scaled), 0.0)  # by rounding, and added then
    added = gdn_backward.reverse_chain(chunks, tiles, left, 0 * through_P, 0 * end, lambda y: y)
    dh, start = back.dh + added.dh, back.start + added.start
    dS = rearrange(unit * chunks.in_sequence_order(dh), "n h r k v -> n (h r) v k")
    h = rearrange(done.h[0], "n hv k v -> n hv v k")
    dh0 = unit * gdn_chunked.end_states(start, chunks)
    values = (
        rearrange(chunks.in_sequence_order(y), "n h r i (t v) -> n (h r) t i v", v=64)
        for y in (vn, unit * (back.Y + added.Y))
    )
    states = Chains(rounded(h), done.final_state, rounded(dS), dh0)
    return states, ChunkValues(*(rounded(y) for y in values))


def run(
    x: ChainCall, tile_v: int | None = None, kept: tuple[Tensor, Tensor] | None = None
) -> Chains:
    """Launches both kernels into memory full of NaN, which padding slots must keep."""
    first_chunk = chunk_table(x.k.shape[1], x.cu_seqlens).first_chunk
    N, HV, K, V = len(x.cu_seqlens) - 1, x.v.shape[2], x.k.shape[-1], x.v.shape[-1]
    ht, dh0 = (x.g.new_empty(N, HV, K, V) for _ in range(2))
    g_cum, A = kept or prepared(x)
    h = chains.chunk_states(
        x.k, x.v, g_cum, x.beta, A, x.h0, x.cu_seqlens, first_chunk, 1, ht, tile_v
    )
    dS = chains.dstate_chain(
        x.q, x.k, x.do, g_cum, x.beta, A, x.dht, x.scale, x.cu_seqlens, first_chunk, dh0, tile_v
    )
    for slots in (h, dS):
        assert slots[x.chunks() :].isnan().all(), "slots of no chunk were written"
    return Chains(h[: x.chunks()], ht, dS[: x.chunks()], dh0)


def check(x: ChainCall, got: Chains) -> None:
    """Compares with fp64, per tensor and per head."""
    want, rounded = expected(x), expected(x, x.k.dtype)
    for name in Chains._fields:
        compare(name, *(getattr(y, name) for y in (got, want, rounded)))


def compare(name: str, got: Tensor, want: Tensor, rounded: Tensor) -> None:
    """Compares [.., HV, ..] with fp64, as a whole and per head; `rounded` gives the limits."""
    _compare(name, got, want, rounded, RATIO)
    for head in range(got.shape[1]):
        a, b, c = (t[:, head] for t in (got, want, rounded))
        _compare(f"{name} of head {head}", a, b, c, RATIO_OF_A_HEAD)


def _compare(name: str, got: Tensor, want: Tensor, rounded: Tensor, ratio: float) -> None:
    limit = ratio * relative_l2(rounded, want, SMALLEST) + FP32
    assert_close(name, got, want, limit, at_least=SMALLEST)


def _chains(variant: Any, i: int, device: str) -> None:
    """Checks LENGTHS[i], every other one without states at its ends."""
    V = 64 if variant.tile_v == 64 and i % 2 else 128
    x = case(LENGTHS[i], dtype_of(variant), sizes=(variant.K, V), states=i % 2 == 0)
    on_device, kept = to((x, prepared(x)), device)
    check(x, to(run(on_device, variant.tile_v, kept), "cpu"))


CASES = (Cases(("gdn.chunk_states", "gdn.dstate_chain"), _chains, range(len(LENGTHS))),)
