"""The forward on a GPU, by the public functions: fresh inputs, poisoned outputs, fp64 truth."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qla_kernels import Unsupported, chunk_gated_delta_rule, chunk_gated_delta_rule_fwd
from qla_kernels.lab.selftest import gdn_chunks
from qla_kernels.lab.selftest.gdn_forward import check, check_saved
from qla_kernels.lab.selftest.gdn_inputs import ChunkInputs, gates, keys
from tests.compare import assert_close
from tests.gdn_calls import Call, on_gpu

pytestmark = pytest.mark.hopper

GPU = "cuda"
DTYPES = (torch.bfloat16, torch.float16)


def run(x: Call, **changed: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return chunk_gated_delta_rule(**{**x, **changed}, output_final_state=True)


def mild(x: Call) -> Call:
    """Gates as they are in a trained model: most of a state survives a chunk."""
    B, T, HV = x["g"].shape
    live = ~x["g"].isnan()
    return {**x, "g": torch.where(live, gates("mild", B * T, HV).view(B, T, HV).to(GPU), torch.nan)}


# (B, T, H, HV, D) of flash-linear-attention's tests, and of FlashQLA's
SHAPES = (
    (4, 1024, 4, 4, 128),
    (2, 75, 4, 4, 64),
    (2, 1000, 3, 3, 64),
    (2, 1500, 4, 4, 128),
    (4, 2048, 8, 8, 64),
    (2, 256, 2, 4, 64),
    (2, 512, 2, 8, 64),
    (2, 1024, 4, 8, 128),
    (1, 4096, 4, 16, 128),
    (1, 1000, 16, 64, 128),
    (3, 63, 1, 1, 128),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense(shape, dtype):
    B, T, H, HV, D = shape
    x = mild(on_gpu(batch=B, tokens=T, heads=(H, HV), size=D, dtype=dtype))
    check(x, *run(x))


LENGTHS = (
    [256, 244, 500],
    [0, 65, 0, 1, 130, 0],
    [15, 16, 17, 63, 64, 127, 128],
    [1],
    [410, 431, 294, 991, 386, 1584],
    [47, 81],
    [0, 0],
    [100] * 40,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed(lengths, dtype):
    x = mild(on_gpu(lengths, dtype))
    check(x, *run(x))
    check(x | {"initial_state": None}, *run(x, initial_state=None))
    wide = x | {"cu_seqlens": x["cu_seqlens"].int()}
    assert all(torch.equal(a, b) for a, b in zip(run(wide), run(x), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(128, 128), (128, 64), (64, 128), (64, 64)])
@pytest.mark.parametrize("heads", [(1, 1), (2, 8), (16, 48), (8, 40)])
def test_head_sizes_and_groups(sizes, heads, dtype):
    x = on_gpu([70, 300, 64], dtype, sizes=sizes, heads=heads)
    check(x, *run(x))


@pytest.mark.parametrize(("tile_v", "solves"), [(64, True), (128, True), (128, False)])
@pytest.mark.parametrize("tokens", [64, 1000, 20_000])
def test_every_plan(tile_v, solves, tokens, monkeypatch):
    from qla_kernels.gdn import plan
    from qla_kernels.gdn.times import ForwardChoice

    whole = plan.Plan(ForwardChoice(tile_v, solves))
    monkeypatch.setattr(plan, "forward", lambda *_: whole)
    x = mild(on_gpu([tokens, 65], heads=(2, 4)))
    check(x, *run(x))
    names = ("q", "k", "v", "g", "beta", "scale", "initial_state", "cu_seqlens")
    g_cum, A, *_ = chunk_gated_delta_rule_fwd(*(x.get(name) for name in names))
    check_saved(x, g_cum, A)


def test_without_cuts_a_sequence_is_the_same_bits_in_any_batch():
    x = mild(on_gpu([300] * 60, heads=(4, 8)))
    names = ("q", "k", "v", "g", "beta")

    def low_level(batch: slice, h0: Tensor, bounds: Tensor) -> tuple[Tensor, ...]:
        rows = (x[name][:, batch].contiguous() for name in names)
        return chunk_gated_delta_rule_fwd(*rows, None, h0, bounds, auto_cp=False)[:5]

    many = low_level(slice(0, 18_000), x["initial_state"], x["cu_seqlens"])
    one = low_level(slice(300, 600), x["initial_state"][1:2], x["cu_seqlens"][:2])
    for a, b in zip(many[:3], one[:3], strict=True):
        assert torch.equal(a[:, 300:600], b)
    assert torch.equal(many[4][1:2], one[4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", ["unit", "low rank"])
@pytest.mark.parametrize("gate", ["none", "mild", "model", "strong", "total", "-70", "positive"])
def test_gates_and_keys_at_the_edge(gate, key, dtype):
    x = on_gpu([700, 65], dtype)
    special = {
        "-70": lambda: torch.full((765, 4), -70.0),
        "positive": lambda: torch.rand(765, 4) / 50,
    }
    x["g"][0, :765] = special.get(gate, lambda: gates(gate, 765, 4))().to(GPU)
    x["k"][0, :765] = keys(key, 765, 2, 128).to(GPU, dtype)
    check(x, *run(x))


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_beta_at_the_edge(beta):
    x = mild(on_gpu([300]))
    x["beta"][0, :300] = beta
    check(x, *run(x))


def test_keys_that_are_not_normalised():
    for squared_norm in (12, 128):
        x = on_gpu([300])
        x["k"] *= squared_norm**0.5
        x["g"] = x["g"] - 2
        check(x, *run(x))


def test_scale_zero():
    x = on_gpu([100, 7], scale=0.0)
    o, final_state = run(x)
    assert not o.any()
    check(x, o, final_state)


@pytest.mark.parametrize("lengths", [None, [500, 0, 77]])
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_activations(lengths, allow_neg_eigval):
    x = on_gpu(lengths, activations=True, allow_neg_eigval=allow_neg_eigval, tokens=500)
    check(x, *run(x))
    x["dt_bias"] = None
    check(x, *run(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gates_and_states_of_any_dtype(dtype):
    x = mild(on_gpu([200, 33]))
    for name in ("g", "beta", "initial_state"):
        x[name] = x[name].to(dtype)
    check(x, *run(x))


def test_state_v_first_is_the_same_bits():
    x = mild(on_gpu([1000, 3, 64]))
    o, state = run(x)
    got_o, got = run(x, state_v_first=True, initial_state=x["initial_state"].mT.contiguous())
    assert torch.equal(got_o, o)
    assert torch.equal(got.mT, state)
    strided = x["initial_state"].mT.contiguous().mT
    assert all(
        torch.equal(a, b) for a, b in zip(run(x, initial_state=strided), (o, state), strict=True)
    )


def test_what_the_backward_needs():
    """g_cum and A of the low-level call; without is_train neither, and the same o."""
    x = mild(on_gpu([130, 65, 1]))
    args = [x[n] for n in ("q", "k", "v", "g", "beta")]
    others = {n: x[n] for n in ("initial_state", "cu_seqlens")}
    g_cum, A, o, h, state, cache = chunk_gated_delta_rule_fwd(*args, **others)
    assert h is None
    assert cache is None
    check(x, o, state)
    live = ChunkInputs(x["k"], x["g"], x["beta"], x["cu_seqlens"], 196)
    for t in (g_cum, A):
        t[:, 196:] = torch.nan  # the check wants to see what was left alone
    gdn_chunks.check(live, g_cum, A, 1.1)
    out = torch.empty_like(x["v"])
    slim = chunk_gated_delta_rule_fwd(*args, **others, is_train=False, out=out)
    assert slim[0] is None
    assert slim[1] is None
    assert slim[2] is out
    assert torch.equal(out, o)
    assert torch.equal(slim[4], state)


def test_what_cannot_run_is_refused():
    x = on_gpu([70])
    args = [x[n] for n in ("q", "k", "v", "g", "beta")]
    with pytest.raises(Unsupported, match="pass cu_seqlens_cpu"):
        chunk_gated_delta_rule_fwd(*args, cu_seqlens=x["cu_seqlens"], output_h=True)
    with pytest.raises(Unsupported, match=r"pass v\.contiguous"):
        chunk_gated_delta_rule(*args[:2], args[2].mT.contiguous().mT, *args[3:])


def test_neighbours_of_a_sequence_do_not_matter():
    x = mild(on_gpu([70, 100, 33]))
    want = run(x)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, 70:170] = torch.nan
    got = run(x)
    for part in (slice(0, 70), slice(170, None)):
        assert torch.equal(got[0][:, part], want[0][:, part])
    assert torch.equal(got[1][[0, 2]], want[1][[0, 2]])


def test_a_batch_is_its_packing_and_its_rows():
    x = mild(on_gpu(batch=5, tokens=333))
    o, state = run(x)
    packed = {n: t if n == "initial_state" else t.flatten(0, 1)[None] for n, t in x.items()}
    packed["cu_seqlens"] = torch.arange(6, device=GPU) * 333
    packed_o, packed_state = run(packed)
    assert torch.equal(packed_o.view_as(o), o)
    assert torch.equal(packed_state, state)
    for b in range(5):
        row_o, row_state = run({n: t[b : b + 1] for n, t in x.items()})
        assert torch.equal(row_o[0], o[b])
        assert torch.equal(row_state[0], state[b])


def test_strides_are_read_in_place():
    x = mild(on_gpu(batch=2, tokens=300, heads=(2, 4)))
    want = run(x)
    fused = torch.cat([x["q"], x["k"], x["v"]], 2)
    slices = dict(zip("qkv", fused.split((2, 2, 4), 2), strict=True))
    head_major = {n: x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    gates_last = {n: x[n].mT.contiguous().mT for n in ("g", "beta")}
    for changed in (slices, head_major, gates_last):
        assert all(torch.equal(a, b) for a, b in zip(run(x, **changed), want, strict=True))


@pytest.mark.parametrize("shape", [{"batch": 0}, {"tokens": 0}, {"lengths": [], "padding": 5}])
def test_nothing_to_do(shape):
    x = on_gpu(**shape)
    o, state = run(x)
    assert o.shape == x["v"].shape
    assert not o.any()
    assert torch.equal(state, x["initial_state"])


def test_seventy_thousand_sequences():
    """Of one token each: o = scale beta <q, k> v."""
    N, HV = 70_000, 2
    x = on_gpu(batch=1, tokens=N, heads=(1, HV))
    x |= {"cu_seqlens": torch.arange(N + 1, device=GPU), "initial_state": None}
    with torch.no_grad():
        o, _ = chunk_gated_delta_rule(**x)
    q, k, v, beta = (x[n].double() for n in ("q", "k", "v", "beta"))
    want = 128**-0.5 * (beta * (q * k).sum(-1))[..., None] * v
    assert_close("o", o, want, 5e-3)


def test_more_than_two_to_the_31_elements():
    """The last of three sequences: its numbers, and its bits if it is alone."""
    H, HV, filler, last = 16, 64, 140_000, 200
    tokens = 2 * filler + last  # x 64 x 128 = 2.3e9 elements of v
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    x = on_gpu([last], heads=(H, HV), padding=0)
    big = {
        n: torch.zeros(1, tokens, *x[n].shape[2:], dtype=x[n].dtype, device=GPU)
        for n in ("q", "k", "v", "g", "beta")
    }
    for n, t in big.items():
        t[:, -last:] = x[n]
    big["initial_state"] = x["initial_state"].expand(3, -1, -1, -1)
    big["cu_seqlens"] = torch.tensor([0, filler, 2 * filler, tokens], device=GPU)
    o, state = run(big)
    check(x, o[:, -last:], state[-1:])
    assert not o[:, : filler + 5].any(), "a filler's queries are 0"


def test_repeats_bitwise():
    """200 runs that keep every SM busy: a missing fence shows as a rare difference."""
    for heads, lengths in (((4, 16), [3000, 1000, 777, 1, 64]), ((16, 64), [500, 0, 65, 900, 300])):
        x = mild(on_gpu(lengths, heads=heads))
        first = run(x)
        for _ in range(100):
            assert all(torch.equal(a, b) for a, b in zip(run(x), first, strict=True))


def test_ctas_that_walk_from_item_to_item():
    """One CTA an SM where the host knows that lengths are alike, and one an item where not."""
    x = mild(on_gpu([300] * 8, heads=(16, 64)))
    want, on_host = run(x), x["cu_seqlens"].cpu()
    for _ in range(50):
        walked = run(x, cu_seqlens_cpu=on_host)
        assert all(torch.equal(a, b) for a, b in zip(walked, want, strict=True))


def test_does_not_synchronise():
    calls = [on_gpu([300, 100]), on_gpu(batch=2, tokens=200), on_gpu([90], activations=True)]
    calls[0] |= {"initial_state": calls[0]["initial_state"].bfloat16()}
    for x in calls:
        run(x)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in calls:
            run(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_follows_new_lengths():
    """One capture at capacity; other lengths are written into cu_seqlens before each replay."""
    x = mild(on_gpu([300, 100, 112], padding=0))
    run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = run(x)
    for lengths in ([300, 100, 112], [1, 0, 511], [64, 448, 0], [5, 5, 5], [0, 0, 0]):
        x["cu_seqlens"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        o.fill_(torch.nan)
        state.fill_(torch.nan)
        graph.replay()
        check(x, o, state)


def test_runs_on_the_current_stream():
    x = mild(on_gpu([2000, 65]))
    want = run(x)
    stream = torch.cuda.Stream()
    late = {n: torch.full_like(t, torch.nan) if n in "qkv" else t for n, t in x.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for n in "qkv":
            late[n].copy_(x[n])
        got = run(late)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("lengths", [None, [70, 0, 130]])
def test_compiles_to_one_graph(lengths):
    x = on_gpu(lengths, activations=True)
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True)
    with torch.no_grad():
        got = compiled(**x, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(got, run(x), strict=True))
