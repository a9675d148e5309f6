"""The backward's two chains, emulated: launch_chains on CPU tensors."""

import pytest
import torch
from einops import rearrange

from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.launch import chains
from qla_kernels.gdn.shapes import key_room
from qla_kernels.lab.selftest.gdn_chains import Chains, case, check, prepared, run
from qla_kernels.runtime import jit
from qla_kernels.runtime.varlen import chunk_table

pytestmark = pytest.mark.usefixtures("seeds")

BF16, FP16 = torch.bfloat16, torch.float16


def same(a: Chains, b: Chains) -> None:
    for name in Chains._fields:
        assert torch.equal(getattr(a, name), getattr(b, name)), name


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
@pytest.mark.parametrize("rows", [None, [2, 0, 0]])
@pytest.mark.parametrize("V", [64, 128, 192])
@pytest.mark.parametrize("K", [48, 128])
def test_states_are_copied(K, V, rows):
    """Bit for bit, between both layouts, by rows or in order."""
    x = case([70, 0, 65], sizes=(K, V))
    room, h = key_room(K), torch.empty(1, 2, V, K, dtype=x.k.dtype)
    g_cum, A = prepared(x)
    inputs = x.k, x.v, g_cum, x.beta, A
    given, k_first = torch.randn(3, 2, V, room).mT, torch.empty(3, 2, room, V)
    given[0, 0, 0, :3] = torch.tensor([-0.0, torch.inf, 1e-40])
    at = None if rows is None else torch.tensor([*rows, 7], dtype=torch.int32)
    chains.copy_states(inputs, h, given, k_first, at)
    want = given if rows is None else given[rows]
    assert torch.equal(k_first.view(torch.int32), want.contiguous().view(torch.int32))
    v_first = torch.empty(3, 2, V, room).mT
    chains.copy_states(inputs, h, k_first, v_first)
    assert torch.equal(v_first, want)
    assert h.isnan().all()


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
