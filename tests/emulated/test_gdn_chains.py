"""The backward's two chains, emulated: launch_chains on CPU tensors."""

from typing import NamedTuple

import pytest
import torch
from einops import rearrange
from torch import Tensor

from qla_kernels import jit
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.kernels import chunk_states, dstate_chain
from qla_kernels.gdn.launch import chains
from qla_kernels.varlen import chunk_table
from reference import gdn, gdn_backward, gdn_chunked
from reference.chunks import cut, sequence_spans
from tests.compare import assert_close, relative_l2
from tests.gdn_inputs import gates, keys

pytestmark = pytest.mark.usefixtures("seeds")

# Lengths 0, 1 and around 64; empty sequences first, in the middle, last; several chunks.
LENGTHS = ([64], [0, 65, 0, 1, 130, 0], [63, 128, 200], [1], [0, 0], [2, 321])
BF16, FP16 = torch.bfloat16, torch.float16

# Errors are counted in units of what rounding the operands of every product costs by itself.
RATIO = 1.05
RATIO_OF_A_HEAD = 1.2
FP32 = 1e-5  # what sums and decays in fp32 cost where no product's rounding shows
SMALLEST = torch.finfo(torch.float16).tiny  # strong decay leaves less: as an operand in fp16, 0


class Case(NamedTuple):
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
        return -(-self.cu_seqlens.diff() // 64).sum()


class Chains(NamedTuple):
    """What the two chains leave: states before and their gradients after each chunk."""

    h: Tensor  # [NC, HV, V, K]
    ht: Tensor  # [N, HV, K, V]
    dS: Tensor  # [NC, HV, V, K]
    dh0: Tensor  # [N, HV, K, V]


def case(
    lengths: list[int],
    dtype: torch.dtype = BF16,
    heads: tuple[int, int] = (1, 2),
    sizes: tuple[int, int] = (128, 128),
    gate: str = "model",
    key: str = "unit",
    states: bool = True,
    padding: int = 3,
) -> Case:
    (H, HV), (K, V), tokens = heads, sizes, sum(lengths)
    q, k = (keys(kind, tokens, H, K).to(dtype) for kind in ("unit", key))
    v, do = (torch.randn(tokens, HV, V).to(dtype) for _ in range(2))
    g, beta = gates(gate, tokens, HV), torch.rand(tokens, HV)
    rows = [torch.cat([x, x.new_full((padding, *x.shape[1:]), torch.nan)])[None]
            for x in (q, k, v, do, g, beta)]  # fmt: skip
    h0, dht = (torch.randn(len(lengths), HV, K, V) if states else None for _ in range(2))
    return Case(*rows, h0, dht, torch.tensor([0, *lengths]).cumsum(0), 0.7 * K**-0.5)


def prepared(x: Case) -> tuple[Tensor, Tensor]:
    """g_cum and A, as kkt_solve leaves them in memory full of NaN."""
    done = forward(x, x.k.dtype)
    g_cum, A = done.g_cum.float(), done.A.to(x.k.dtype)
    for tensor in (g_cum, A):
        tensor[:, x.cu_seqlens[-1] :] = torch.nan
    return g_cum, A


def forward(x: Case, operand_dtype: torch.dtype | None) -> gdn_chunked.Forward:
    q, k, v, beta = (y.nan_to_num().double() for y in (x.q, x.k, x.v, x.beta))
    g = x.g.double().nan_to_num(neginf=-torch.inf)
    h0 = None if x.h0 is None else x.h0.double()
    return gdn.chunked(
        q, k, v, g, beta, x.scale, h0, x.cu_seqlens, operand_dtype=operand_dtype
    )  # fmt: skip


def expected(x: Case, operand_dtype: torch.dtype | None = None) -> Chains:
    """In fp64; with an operand_dtype, with the kernels' roundings."""
    done = forward(x, operand_dtype)
    H, K = x.k.shape[2:]
    rounded = gdn_chunked.operand_rounding(operand_dtype)
    chunks = cut(sequence_spans(1, x.k.shape[1], x.cu_seqlens), 64, x.k.device)
    gamma = gdn_chunked.row_tiles(chunks.tiles_held(done.g_cum, torch.float64), H)
    beta = gdn_chunked.row_tiles(chunks.tiles(x.beta, torch.float64), H)[..., None]
    G, e, d, last = gdn_chunked.decay_tiles(gamma)
    q, k = (gdn_chunked.key_tiles(chunks, y, torch.float64) for y in (x.q, x.k))
    do, A = (gdn_chunked.value_tiles(chunks, y, H, torch.float64) for y in (x.do, done.A))
    tiles = gdn_chunked.Tiles(q, k, beta, A, G, e, d, last)
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
    return Chains(rounded(h), done.final_state, rounded(dS), dh0)


def run(x: Case, tile_v: int | None = None) -> Chains:
    """Both kernels, into memory full of NaN; padding slots must stay as they are."""
    first_chunk = chunk_table(x.k.shape[1], x.cu_seqlens).first_chunk
    N, HV, K, V = len(x.cu_seqlens) - 1, x.v.shape[2], x.k.shape[-1], x.v.shape[-1]
    ht, dh0 = (torch.empty(N, HV, K, V) for _ in range(2))
    g_cum, A = prepared(x)
    h = chains.chunk_states(
        x.k, x.v, g_cum, x.beta, A, x.h0, x.cu_seqlens, first_chunk, 1, ht, tile_v
    )
    dS = chains.dstate_chain(
        x.q, x.k, x.do, g_cum, x.beta, A, x.dht, x.scale, x.cu_seqlens, first_chunk, dh0, tile_v
    )
    for slots in (h, dS):
        assert slots[x.chunks() :].isnan().all()
    return Chains(h[: x.chunks()], ht, dS[: x.chunks()], dh0)


def check(x: Case, got: Chains) -> None:
    want, rounded = expected(x), expected(x, x.k.dtype)
    for name in Chains._fields:
        tensors = [getattr(y, name) for y in (got, want, rounded)]
        compare(name, *tensors, RATIO)
        for head in range(x.v.shape[2]):
            compare(f"{name} of head {head}", *(t[:, head] for t in tensors), RATIO_OF_A_HEAD)


def compare(name: str, got: Tensor, want: Tensor, rounded: Tensor, ratio: float) -> None:
    limit = ratio * relative_l2(rounded, want, SMALLEST) + FP32
    assert_close(name, got, want, limit, at_least=SMALLEST)


def same(a: Chains, b: Chains) -> None:
    for name in Chains._fields:
        assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("variant", chunk_states.VARIANTS, ids=jit.variant_id)
@pytest.mark.kernels("gdn.chunk_states", "gdn.dstate_chain")
def test_every_variant(variant, seeds):
    assert variant in dstate_chain.VARIANTS
    for seed, lengths in enumerate(LENGTHS):
        seeds["seed"] = seed
        V = 64 if variant.tile_v == 64 and seed % 2 else 128
        x = case(lengths, getattr(torch, variant.dtype), sizes=(variant.K, V), states=seed % 2 == 0)
        check(x, run(x, variant.tile_v))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("gate", ["none", "mild", "strong", "total"])
@pytest.mark.parametrize("key", ["unit", "low rank"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gates_and_keys_at_the_edge(gate, key, dtype):
    x = case([130, 65], dtype, gate=gate, key=key)
    check(x, run(x))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tile_v", [64, 128])
def test_interleavings(seed, tile_v, seeds):
    """Five value heads of three sequences: more CTAs than SMs."""
    seeds["seed"] = seed
    x = case([70, 1, 200], heads=(1, 5))
    check(x, run(x, tile_v))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("others", [61, 62])
def test_longest_first_or_too_many_for_that(others):
    """Of 64 sequences the longest come first, of 65 the first."""
    x = case([1, 65, *[0] * others, 70], heads=(1, 1), padding=0)
    check(x, run(x))


@pytest.mark.usefixtures("poison")
def test_groups_of_value_heads():
    x = case([33, 0, 100], heads=(2, 6))
    check(x, run(x))


@pytest.mark.usefixtures("poison")
def test_neighbours_of_a_sequence_do_not_matter():
    x = case([70, 100, 33])
    want = run(x)
    for rows in (x.q, x.k, x.v, x.do, x.g, x.beta):
        rows[:, 70:170] = torch.nan
    got = run(x)
    for part in (slice(0, 2), slice(4, None)):
        assert torch.equal(got.h[part], want.h[part])
        assert torch.equal(got.dS[part], want.dS[part])
    for part in (0, 2):
        assert torch.equal(got.ht[part], want.ht[part])
        assert torch.equal(got.dh0[part], want.dh0[part])


@pytest.mark.usefixtures("poison")
def test_strides_are_read_in_place():
    x = case([70, 65], heads=(2, 2))
    want = run(x)
    wide = torch.cat([x.q, x.k, x.v, x.do], 2)  # slices of one projection
    slices = dict(zip(("q", "k", "v", "do"), wide.split(2, 2), strict=True))
    head_major = {
        name: getattr(x, name).transpose(1, 2).contiguous().transpose(1, 2) for name in slices
    }
    v_first = {name: getattr(x, name).mT.contiguous().mT for name in ("h0", "dht")}
    for changed in (slices, head_major, v_first):
        same(run(x._replace(**changed)), want)


@pytest.mark.usefixtures("poison")
def test_states_are_written_with_their_strides():
    x = case([70, 0, 65])
    want = run(x)
    first_chunk = chunk_table(x.k.shape[1], x.cu_seqlens).first_chunk
    g_cum, A = prepared(x)
    ht, dh0 = (torch.empty(3, 2, 128, 128).mT for _ in range(2))
    chains.chunk_states(x.k, x.v, g_cum, x.beta, A, x.h0, x.cu_seqlens, first_chunk, ht=ht)
    chains.dstate_chain(
        x.q, x.k, x.do, g_cum, x.beta, A, x.dht, x.scale, x.cu_seqlens, first_chunk, dh0
    )
    assert torch.equal(ht, want.ht)
    assert torch.equal(dh0, want.dh0)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("every", [2, 3, 8])
def test_a_state_every_so_many_chunks(every, seeds):
    lengths = [1, 321, 0, 128, 130]
    x = case(lengths)
    want = run(x)
    first_chunk = chunk_table(x.k.shape[1], x.cu_seqlens).first_chunk
    kept = [i for a, b in first_chunk.unfold(0, 2, 1).tolist() for i in range(a, b, every)]
    g_cum, A = prepared(x)
    for seed in range(3):
        seeds["seed"] = seed
        h = chains.chunk_states(x.k, x.v, g_cum, x.beta, A, x.h0, x.cu_seqlens, first_chunk, every)
        assert torch.equal(h[: len(kept)], want.h[kept])
        assert h[len(kept) :].isnan().all()


@pytest.mark.usefixtures("poison")
def test_a_batch_is_its_packing():
    x = case([70, 70, 70], padding=0)
    dense = {name: getattr(x, name).unflatten(1, (3, 70)).squeeze(0)
             for name in ("q", "k", "v", "do", "beta")}  # fmt: skip
    first_chunk = chunk_table(210, x.cu_seqlens).first_chunk
    g_cum, A = (y.unflatten(1, (3, 70)).squeeze(0) for y in prepared(x))
    h = chains.chunk_states(
        dense["k"], dense["v"], g_cum, dense["beta"], A, x.h0, x.cu_seqlens, first_chunk
    )
    dS = chains.dstate_chain(
        dense["q"], dense["k"], dense["do"], g_cum, dense["beta"], A, x.dht, x.scale,
        x.cu_seqlens, first_chunk,
    )  # fmt: skip
    want = run(x)
    assert torch.equal(h, want.h)
    assert torch.equal(dS, want.dS)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("tile_v", [64, 128])
def test_rows_that_are_held_are_the_same_bits(tile_v):
    """A chunk of 64 tokens holds them in its dV, another one in its sequence's tail."""
    x = case([70, 0, 128, 1], heads=(1, 3))
    want = run(x).dS
    table, (g_cum, A) = chunk_table(x.k.shape[1], x.cu_seqlens), prepared(x)
    held = chains.ds_room_in_dv(torch.empty_like(x.v), 128, 4)
    rest = chains.dstate_chain(
        x.q, x.k, x.do, g_cum, x.beta, A, x.dht, x.scale, x.cu_seqlens, table.first_chunk,
        tile_v=tile_v, held=held,
    )  # fmt: skip
    assert torch.equal(rest[: len(want)], want[:, :, 64:])
    chunks = table.chunks[: len(want)].tolist()
    assert [int(held.owner[i]) for i, (_, rows) in enumerate(chunks) if rows < 64] == [0, 3]
    for i, (token, rows) in enumerate(chunks):
        in_dv = rearrange(held.dv[0, token : token + 64], "v hv k -> hv v k")
        assert torch.equal(in_dv if rows == 64 else held.tails[held.owner[i]], want[i, :, :64])
    assert held.dv[0, 64:70].isnan().all(), "a tail's rows belong to the next sequence, too"
    assert held.dv[0, 198:].isnan().all()
    assert chains.ds_room_in_dv(torch.empty(1, 64, 2, 64), 128, 1) is None


@pytest.mark.parametrize("lengths", [[], [0, 0]])
@pytest.mark.parametrize("states", [True, False])
def test_nothing_to_do(lengths, states, monkeypatch):
    monkeypatch.setattr(jit, "compile", None)  # no kernel runs
    x = case(lengths, states=states, padding=0)
    got = run(x)
    assert not got.h.numel()
    assert not got.dS.numel()
    assert torch.equal(got.ht, torch.zeros_like(got.ht) if x.h0 is None else x.h0)
    assert torch.equal(got.dh0, torch.zeros_like(got.dh0) if x.dht is None else x.dht)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_states_as_a_caller_gets_them(packed, v_first):
    """Those of the CPU operator: as many as there are chunks, in either layout."""
    x = case([70, 0, 65, 130] if packed else [70, 70, 70], padding=3 if packed else 0)
    want = run(x).h
    rows = (x.k, x.v, x.beta, *prepared(x))
    bounds = x.cu_seqlens if packed else None
    if not packed:
        rows = [y.unflatten(1, (3, 70)).squeeze(0) for y in rows]
    k, v, beta, *saved = rows
    h0 = x.h0.mT.contiguous().mT if v_first else x.h0
    head_major = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in (k, v)]
    for keys_and_values in ((k, v), head_major):
        given = Call(k, *keys_and_values, beta, beta, 1.0, None, bounds, bounds)
        h = chains.public_states(given, Options(state_v_first=v_first), beta, h0, saved)
        assert h.is_contiguous()
        assert h.shape[:3] == ((1, 7, 2) if packed else (3, 2, 2))
        assert torch.equal((h if v_first else h.mT).flatten(0, 1), want)
