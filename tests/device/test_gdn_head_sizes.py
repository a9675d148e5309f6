"""Head sizes that no variant has, on a GPU: K of any multiple of 16, V of any multiple of 64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qla_kernels import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    prefill_gated_delta_rule,
)
from qla_kernels.gdn import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from qla_kernels.lab.selftest import gdn_forward, gdn_prefill, gdn_recurrent, gdn_verify
from qla_kernels.lab.selftest.gdn_backward import check as check_gradients
from tests.compare import assert_close, relative_l2
from tests.device.test_gdn_backward import incoming, run, same
from tests.gdn_calls import Call, on_gpu

pytestmark = pytest.mark.hopper

GPU = "cuda"
LENGTHS = [70, 0, 64, 333, 1]
# OLMo Hybrid; FLA's sizes; each remainder of K in both variants; most parts, of 128 and of 64
SIZES = [(96, 192), (64, 256), (128, 256), (32, 64), (48, 128), (16, 64), (80, 320), (112, 512)]


def forward(x: Call, **changed: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return chunk_gated_delta_rule(**{**x, **changed}, output_final_state=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_both_directions(sizes, state_v_first, dtype):
    x = on_gpu(LENGTHS, dtype, sizes=sizes, heads=(2, 4), state_v_first=state_v_first)
    gdn_forward.check(x, *forward(x))
    do, dht = incoming(x)
    got = run(x, do, dht)
    check_gradients(x, do, dht, got)
    same(run(x, do, dht), got)


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_a_layer_of_olmo_hybrid(allow_neg_eigval):
    flags = {"activations": True, "allow_neg_eigval": allow_neg_eigval}
    x = on_gpu(batch=2, tokens=1000, sizes=(96, 192), heads=(30, 30), **flags)
    gdn_forward.check(x, *forward(x))
    do, dht = incoming(x)
    check_gradients(x, do, dht, run(x, do, dht))


@pytest.mark.parametrize("sizes", [(96, 192), (48, 64), (128, 256)], ids=str)
def test_slices_whose_other_numbers_are_nan(sizes):
    """Columns between heads belong to others: TMA must fill in zeros, and not write there."""
    K, V = sizes
    x = on_gpu(LENGTHS, sizes=sizes, heads=(2, 4))
    want = forward(x)
    for name, size in (("q", K), ("k", K), ("v", V)):
        room = x[name].new_full((*x[name].shape[:3], size + 64), torch.nan)
        room[..., :size] = x[name]
        x[name] = room[..., :size]
    for a, b in zip(forward(x), want, strict=True):
        assert torch.equal(a, b)
    do, dht = incoming(x)
    check_gradients(x, do, dht, run(x, do, dht))


@pytest.mark.parametrize("sizes", [(96, 192), (48, 256)], ids=str)
@pytest.mark.parametrize("cache", [False, True])
def test_sequences_that_are_cut(sizes, cache):
    """Few heads and long sequences: maps, start states and their gradients over segments."""
    x = on_gpu([20000, 3000], sizes=sizes, heads=(1, 1))
    x["g"] *= 0.02
    bounds = {"cu_seqlens_cpu": x["cu_seqlens"].cpu()}
    do, dht = incoming(x)
    whole = run(x, do, dht, **bounds, batch_invariant=True)
    got = run(x, do, dht, **bounds, enable_fwd_cp_cache=cache)
    for name in ("dq", "dk", "dv", "dbeta", "dg", "dh0"):
        a, b = getattr(got, name), getattr(whole, name)
        assert relative_l2(a[:, :23000] if a.dim() > 4 else a, b) < 0.02, name
    for a, b in zip(forward(x, **bounds), forward(x, batch_invariant=True), strict=True):
        assert relative_l2(a, b) < 0.02


def test_states_before_each_chunk():
    x = on_gpu(batch=1, tokens=200, sizes=(96, 192))
    given = [x[name] for name in ("q", "k", "v", "g", "beta")]
    h0 = x["initial_state"]
    *_, h, _, _ = chunk_gated_delta_rule_fwd(*given, initial_state=h0, output_h=True)
    assert h.shape == (1, 4, 4, 96, 192)
    before = forward({name: t[:, :128] for name, t in x.items() if name != "initial_state"}
                     | {"initial_state": h0})[1]  # fmt: skip
    assert_close("h", h[:, 2], before, 2**-8)


def test_one_direction_at_a_time():
    x = on_gpu(batch=2, tokens=130, sizes=(80, 192))
    given = [x[name] for name in ("q", "k", "v", "g", "beta")]
    g_cum, A, *_ = chunk_gated_delta_rule_fwd(*given, initial_state=x["initial_state"])
    do, dht = incoming(x)
    q, k, v, _, beta = given
    dq, dk, dv, *_ = chunk_gated_delta_rule_bwd(
        q, k, v, g_cum, beta, A, do, initial_state=x["initial_state"], dht=dht
    )
    want = run(x, do, dht)
    for a, b in ((dq, want.dq), (dk, want.dk), (dv, want.dv)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("sizes", [(96, 192), (48, 64), (16, 320), (112, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_decoded_in_place(sizes, state_v_first, dtype):
    x = gdn_recurrent.decode([1, 2, 0, 1], sizes=sizes, heads=(2, 4), state_v_first=state_v_first)
    x = gdn_recurrent.pooled(x, [7, -1, 2, 0], 9, dtype)
    before = x["initial_state"].clone()
    given = {name: t.to(GPU) if torch.is_tensor(t) else t for name, t in x.items()}
    with torch.no_grad():
        o, pool = fused_recurrent_gated_delta_rule(**given, output_final_state=True)
    gdn_recurrent.check_pool({**x, "initial_state": pool.cpu()}, before, o.cpu())


@pytest.mark.parametrize("sizes", [(96, 192), (48, 64)], ids=str)
def test_drafts_are_verified(sizes):
    x = gdn_recurrent.decode([5, 2, 1, 3], sizes=sizes, heads=(2, 4))
    accepted = {"accepted": [2, 1, 1, 3]}
    gdn_verify.run(gdn_verify.drafted(x, gdn_verify.CHAINS, 14, **accepted), GPU)
    x = gdn_recurrent.decode([6, 5, 3], sizes=sizes, heads=(2, 4))
    rows = {"rows": [2, 0, -1], "steps": 6, "parents": gdn_verify.TREE}
    gdn_verify.run(gdn_verify.drafted(x, [7, 3, 0], 14, **rows), GPU)


@pytest.mark.parametrize("sizes", [(96, 192), (48, 64), (128, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_is_filled(sizes, dtype):
    for given in gdn_prefill.INPUTS[:3]:
        gdn_prefill.run(given, sizes, torch.bfloat16, GPU, dtype, torch.float32)


def test_a_graph_of_a_training_step_is_replayed():
    x = on_gpu(LENGTHS, sizes=(96, 192), heads=(2, 4))
    do, dht = incoming(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        want = run(x, do, dht)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(x, do, dht)
    for t in got:
        if t is not None:
            t.fill_(torch.nan)
    graph.replay()
    same(got, want)


def test_prefill_does_not_wait_for_the_gpu():
    x = gdn_prefill.in_pool(on_gpu([64, 3], sizes=(96, 192)), [1, 2], 5)
    x = {name: t.to(GPU) if torch.is_tensor(t) else t for name, t in x.items()}
    prefill_gated_delta_rule(**x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        prefill_gated_delta_rule(**x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
