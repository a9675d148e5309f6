"""fused_recurrent_gated_delta_rule on a GPU: poisoned outputs, fp64 truth, pools of states."""

from typing import Any

import pytest
import torch

from qla_kernels import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from qla_kernels.lab.selftest.gdn_recurrent import check, check_pool, decode, pooled
from tests.compare import assert_close
from tests.gdn_calls import Call

pytestmark = pytest.mark.hopper

GPU = "cuda"
DTYPES = (torch.bfloat16, torch.float16)
HALVES = slice(128), slice(128, 256)


def on_gpu(*args: Any, **others: Any) -> Call:
    x = decode(*args, **others)
    return {n: t.to(GPU) if torch.is_tensor(t) else t for n, t in x.items()}


def run(x: Call, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return fused_recurrent_gated_delta_rule(**{**x, **changed}, output_final_state=True)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(128, 128), (128, 64), (64, 128), (64, 64)])
@pytest.mark.parametrize("heads", [(1, 1), (2, 8), (16, 32), (8, 40)])
def test_values(heads, sizes, dtype, v_first):
    for lengths in ([1] * 9, [0, 4, 0, 1, 9, 70, 0]):
        x = on_gpu(lengths, dtype, sizes, heads=heads, state_v_first=v_first)
        check(x, *run(x))
    x = on_gpu(None, dtype, sizes, heads=heads, state_v_first=v_first, batch=33)
    check(x, *run(x))
    check(x | {"initial_state": None}, *run(x, initial_state=None))


@pytest.mark.parametrize("gates", [torch.float32, *DTYPES])
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_activations(allow_neg_eigval, gates):
    x = on_gpu([1, 3, 6], gates=gates, activations=True, allow_neg_eigval=allow_neg_eigval)
    check(x, *run(x))
    check(x | {"dt_bias": None}, *run(x, dt_bias=None))


def test_a_beta_for_each_column():
    x = on_gpu([1, 3])
    x["beta"] = torch.rand_like(x["v"])
    check(x, *run(x))


@pytest.mark.parametrize("gate", [-torch.inf, -70.0, 0.0, 0.02])
def test_gates_at_the_edge(gate):
    x = on_gpu([1, 5])
    x["g"][0, :6] = gate
    check(x, *run(x))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_a_pool_is_updated_in_place(state, v_first):
    lengths = [1, 2, 0, 4, 1] * 13
    x = on_gpu(lengths, heads=(4, 16), state_v_first=v_first)
    slots = torch.randperm(100)[: len(lengths)]
    slots[::7] = -1
    x = pooled(x, slots.tolist(), 100, state)
    for _ in range(3):
        before = x["initial_state"].clone()
        o, pool = run(x)
        assert pool is x["initial_state"]
        check_pool(x, before, o)


def test_prefill_then_decode_is_one_long_call():
    tokens, new = 133, 3
    x = on_gpu(batch=8, tokens=tokens + new, heads=(4, 8))
    want_o, want_state = run(x)
    names = ("q", "k", "v", "g", "beta")
    with torch.no_grad():
        first = {**x, **{n: x[n][:, :tokens] for n in names}}
        o, states = chunk_gated_delta_rule(**first, output_final_state=True)
    pool = torch.randn(20, *states.shape[1:], device=GPU)
    slots = torch.randperm(20, device=GPU)[:8]
    pool[slots] = states
    parts = [o]
    for t in range(tokens, tokens + new):
        token = {n: x[n][:, t : t + 1] for n in names}
        parts.append(run(token, initial_state=pool, state_indices=slots)[0])
    assert_close("o", torch.cat(parts, 1), want_o.double(), 6e-3)
    assert_close("states", pool[slots], want_state.double(), 6e-3)


def test_a_pool_of_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB")
    x = on_gpu([1, 2], heads=(2, 2))
    slots = [66_000, 3]  # x 2 x 128 x 128 = 2.2e9 elements
    pool = torch.zeros(slots[0] + 1, 2, 128, 128, device=GPU)
    pool[slots] = x["initial_state"]
    o, _ = run(x, initial_state=pool, state_indices=torch.tensor(slots, device=GPU))
    check(x, o, pool[slots])
    assert not pool[4:66_000].any()


@pytest.mark.parametrize("v_first", [False, True])
def test_a_large_batch_has_the_bits_of_its_halves(v_first):
    """It asks for fewer CTAs on an SM, and for more than 48 KB of shared memory."""
    x = on_gpu(None, heads=(4, 16), batch=256, tokens=1, state_v_first=v_first)
    halves = [{n: t[part] if torch.is_tensor(t) else t for n, t in x.items()} for part in HALVES]
    for _ in range(2):  # the limit of shared memory is raised once
        before = run(halves[0])
        whole = run(x)
        for found, *parts in zip(whole, before, run(halves[1]), strict=True):
            assert torch.equal(found, torch.cat(parts))


def test_seventy_thousand_sequences():
    x = on_gpu(None, sizes=(64, 64), batch=70_000, tokens=1, heads=(1, 2))
    o, state = run(x)
    for part in (slice(0, 50), slice(69_950, None)):
        check({n: t[part] for n, t in x.items()}, o[part], state[part])


def test_repeats_bitwise():
    x = on_gpu([1, 4, 2, 1, 3] * 40, heads=(8, 32))
    first = run(x)
    for _ in range(200):
        assert all(torch.equal(a, b) for a, b in zip(run(x), first, strict=True))


def test_does_not_synchronise_and_is_one_launch():
    activated = on_gpu(gates=torch.bfloat16, activations=True)
    activated["initial_state"] = activated["initial_state"].float()  # one in bf16 would be cast
    calls = [on_gpu([1, 3]), activated]
    calls.append(pooled(on_gpu([1, 1, 1]), [2, -1, 0], 5))
    for x in calls:
        run(x)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in calls:
            run(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x in calls:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(x)
            torch.cuda.synchronize()
        names = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
        fills = [n for n in names if "FillFunctor" in n]  # the tests poison fresh memory
        assert len(names) - len(fills) == 1, names


def test_a_graph_follows_new_lengths_and_slots():
    """One capture at capacity: a server pads with empty sequences of no slot."""
    x = pooled(on_gpu([1, 2, 3]), [0, 1, 2], 6)
    run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, pool = run(x)
    for lengths, slots in (([1, 2, 3], [5, 3, 1]), ([1, 1, 0], [2, 4, -1]), ([0, 0, 0], [-1] * 3)):
        x["cu_seqlens"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        x["state_indices"].copy_(torch.tensor(slots))
        before = pool.clone()
        o.fill_(torch.nan)
        graph.replay()
        check_pool(x, before, o)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiles_to_one_graph(in_place):
    x = on_gpu(activations=True)
    if in_place:
        x = pooled(x, [1, -1, 3], 4)
    y = {n: t.clone() if torch.is_tensor(t) else t for n, t in x.items()}
    compiled = torch.compile(fused_recurrent_gated_delta_rule, fullgraph=True)
    want = run(x)
    with torch.no_grad():
        got = compiled(**y, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(x["initial_state"], y["initial_state"])
