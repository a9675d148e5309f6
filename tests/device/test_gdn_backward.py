"""The backward on a GPU, by the public functions: fresh inputs, poisoned outputs, fp64 truth."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from qla_kernels import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
)
from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.lab.selftest.gdn_backward import check
from qla_kernels.lab.selftest.gdn_inputs import gates, keys
from reference import gdn
from tests.compare import assert_close, relative_l2
from tests.gdn_calls import DIFFERENTIABLE, Call, on_gpu

pytestmark = pytest.mark.hopper

GPU = "cuda"
DTYPES = (torch.bfloat16, torch.float16)
# whose gradients the fields of a Backward are
OF = ("q", "k", "v", "beta", "g", "initial_state", "A_log", "dt_bias")


def gated(x: Call, normalizer: float = 16, decaying: float = 1) -> Call:
    """Gates as flash-linear-attention draws them, for a share of the tokens; of 16 as trained."""
    g = logsigmoid(torch.randn_like(x["g"])) / normalizer
    g = g * (torch.rand_like(g) < decaying)
    return {**x, "g": torch.where(x["g"].isnan(), torch.nan, g)}


def incoming(x: Call) -> tuple[Tensor, Tensor]:
    """Gradients of o, NaN for tokens of no sequence, and of the final state."""
    do = torch.randn_like(x["v"]).masked_fill(x["v"].isnan(), torch.nan)
    N = len(x["cu_seqlens"]) - 1 if "cu_seqlens" in x else len(do)
    K, (HV, V) = x["q"].shape[-1], do.shape[2:]
    return do, torch.randn(N, HV, *((V, K) if x.get("state_v_first") else (K, V)), device=GPU)


def leaves(x: Call) -> Call:
    """The same tensors, with the strides they have."""
    return {
        name: t.detach().requires_grad_() if name in DIFFERENTIABLE and t is not None else t
        for name, t in x.items()
    }


def run(x: Call, do: Tensor | None, dht: Tensor | None = None, **changed: Any) -> GdnBackward:
    """By autograd, as if o, the final state or both were used."""
    x = leaves({**x, **changed})
    results = chunk_gated_delta_rule(**x, output_final_state=True)
    return grads(x, results, do, dht)


def grads(x: Call, results: tuple[Tensor, ...], *given: Tensor | None) -> GdnBackward:
    used = [(y, dy) for y, dy in zip(results, given, strict=True) if dy is not None]
    wanted = [name for name in OF if x.get(name) is not None]
    found = torch.autograd.grad(
        [y for y, _ in used], [x[name] for name in wanted], [dy for _, dy in used]
    )
    by_name = dict(zip(wanted, found, strict=True))
    return GdnBackward(*map(by_name.get, OF))


def same(got: GdnBackward, want: GdnBackward) -> None:
    for name in GdnBackward._fields:
        a, b = getattr(got, name), getattr(want, name)
        assert a is b is None or torch.equal(a, b), name


# (B, T, H, HV, D, normalizer of the gates, share of tokens that decay): the dense cases of
# flash-linear-attention's tests, and FlashQLA's
DENSE = (
    (4, 1024, 4, 4, 128, 1, 0),
    (2, 75, 4, 4, 64, 0.01, 1),
    (2, 1000, 3, 3, 64, 1, 0.5),
    (2, 1500, 4, 4, 128, 10, 1),
    (4, 2048, 8, 8, 64, 1, 1),
    (2, 256, 2, 4, 64, 1, 1),
    (2, 512, 2, 8, 64, 1, 1),
    (2, 1024, 4, 8, 128, 1, 1),
    (1, 4096, 2, 8, 128, 16, 1),
    (1, 4096, 4, 16, 128, 16, 1),
    (1, 1000, 16, 64, 128, 16, 1),
    (3, 63, 1, 1, 128, 16, 1),
)


@pytest.mark.parametrize("shape", DENSE, ids=str)
def test_dense(shape):
    B, T, H, HV, D, *gate = shape
    dtype = DTYPES[T % 2]
    x = gated(on_gpu(batch=B, tokens=T, heads=(H, HV), size=D, dtype=dtype), *gate)
    do, dht = incoming(x)
    check(x, do, dht, run(x, do, dht))


# lengths, key and value heads, size: the packed cases of both, and edges
PACKED = (
    ([256, 244, 500], (2, 2), 64),
    ([256, 244, 500], (2, 8), 64),
    ([256, 244, 500], (4, 16), 128),
    ([100, 200, 900, 800], (4, 4), 128),
    ([101, 202, 902, 1802, 1089], (2, 8), 128),
    ([410, 431, 294, 991, 386, 1584], (16, 32), 128),
    ([211, 774], (16, 64), 128),
    ([47, 81], (2, 4), 128),
    ([73, 42, 94], (1, 3), 128),
    ([512] * 20, (4, 8), 128),
    ([0, 65, 0, 1, 130, 0], (2, 4), 128),
    ([15, 16, 17, 63, 64, 127, 128], (2, 4), 128),
    ([1], (1, 1), 128),
    ([0, 0], (1, 2), 128),
    ([100] * 40, (1, 2), 64),
)


@pytest.mark.parametrize(("dtype", "states"), [(torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed(case, dtype, states):
    lengths, heads, size = case
    x = gated(on_gpu(lengths, dtype, size, heads=heads), decaying=0.75)
    do, dht = incoming(x)
    if not states:
        x["initial_state"] = dht = None
    check(x, do, dht, run(x, do, dht))


@pytest.mark.parametrize("lengths", [[32_768], [16_789, 9000, 4321]], ids=str)
def test_long(lengths):
    x = gated(on_gpu(lengths, heads=(2, 4)), decaying=0.75)
    do, dht = incoming(x)
    check(x, do, dht, run(x, do, dht))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(128, 128), (128, 64), (64, 128), (64, 64)], ids=str)
@pytest.mark.parametrize("heads", [(3, 3), (1, 2), (2, 8), (1, 8)], ids=str)
def test_head_sizes_and_groups(heads, sizes, dtype):
    x = on_gpu([70, 300, 64], dtype, sizes=sizes, heads=heads)
    do, dht = incoming(x)
    check(x, do, dht, run(x, do, dht))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", ["unit", "low rank"])
@pytest.mark.parametrize("gate", ["none", "mild", "model", "strong", "total", "-70", "positive"])
def test_gates_and_keys_at_the_edge(gate, key, dtype):
    x = on_gpu([700, 65], dtype)
    special = {
        "-70": lambda: torch.full((765, 4), -70.0),
        "positive": lambda: torch.rand(765, 4) / 200,  # faster growth leaves fp16's range
    }
    x["g"][0, :765] = special.get(gate, lambda: gates(gate, 765, 4))().to(GPU)
    x["k"][0, :765] = keys(key, 765, 2, 128).to(GPU, dtype)
    do, dht = incoming(x)
    check(x, do, dht, run(x, do, dht))


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_beta_at_the_edge(beta):
    x = gated(on_gpu([300]))
    x["beta"][0, :300] = beta
    do, dht = incoming(x)
    check(x, do, dht, run(x, do, dht))


# (B, T, H, HV, D) of flash-linear-attention's tests of the sigmoid and of the gate in the kernel
ACTIVATED = (
    (2, 75, 4, 4, 64),
    (2, 1000, 3, 3, 64),
    (3, 1024, 4, 4, 128),
    (4, 2048, 8, 8, 64),
    (2, 512, 1, 4, 64),
    (2, 1024, 4, 8, 128),
)


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
@pytest.mark.parametrize("shape", [*ACTIVATED, None], ids=str)
def test_activations(shape, allow_neg_eigval):
    """Raw q, k, g and beta, and the gate's parameters."""
    size = {"lengths": [256, 0, 244, 500]}
    if shape is not None:
        B, T, H, HV, D = shape
        size = {"batch": B, "tokens": T, "heads": (H, HV), "size": D}
    x = on_gpu(**size, activations=True, allow_neg_eigval=allow_neg_eigval)
    do, dht = incoming(x)
    check(x, do, dht, run(x, do, dht))


def test_a_gate_without_a_bias():
    x = on_gpu([256, 0, 244], activations=True)
    x["dt_bias"] = None
    do, dht = incoming(x)
    check(x, do, dht, run(x, do, dht))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_have_the_dtypes_of_their_inputs(dtype):
    x = on_gpu([200, 33], activations=True)
    for name in ("g", "beta", "initial_state", "A_log", "dt_bias"):
        x[name] = x[name].to(dtype)
    do, dht = incoming(x)
    got = run(x, do, dht)
    for name, gradient in zip(OF, got, strict=True):
        assert gradient.dtype == x[name].dtype, name
    check(x, do, dht, got)


def test_state_v_first_is_the_same_bits():
    x = gated(on_gpu([1000, 3, 64]))
    do, dht = incoming(x)
    want = run(x, do, dht)
    h0 = x["initial_state"].mT.contiguous()
    got = run(x, do, dht.mT.contiguous(), state_v_first=True, initial_state=h0)
    same(got._replace(dh0=got.dh0.mT), want)
    same(run(x, do, dht.mT.contiguous().mT), want)


def test_what_is_not_used():
    """The final state, or o, and gradients that nobody asks for."""
    x = gated(on_gpu([300, 1]))
    do, dht = incoming(x)
    want = run(x, do)
    check(x, do, None, want)
    same(run(x, do, torch.zeros_like(dht)), want)
    check(x, torch.zeros_like(do), dht, run(x, None, dht))
    v = x["v"].detach().requires_grad_()
    o, _ = chunk_gated_delta_rule(**{**x, "v": v})
    o.backward(do)
    assert torch.equal(v.grad, want.dv)


def test_a_tensor_used_twice_gets_both_gradients():
    x = gated(on_gpu([300, 1]))
    do, _ = incoming(x)
    want = run(x, do)
    x = leaves(x)
    both = [chunk_gated_delta_rule(**x)[0] for _ in range(2)]
    dq, dk, dv = torch.autograd.grad(both, [x["q"], x["k"], x["v"]], [do, do])
    for got, once in zip((dq, dk, dv), want, strict=False):
        assert torch.equal(got, 2 * once)


def test_strides_are_read_in_place():
    x = gated(on_gpu(batch=2, tokens=300, heads=(2, 4)))
    do, dht = incoming(x)
    want = run(x, do, dht)
    fused = torch.cat([x["q"], x["k"], x["v"]], 2)
    slices = dict(zip("qkv", fused.split((2, 2, 4), 2), strict=True))
    head_major = {n: x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    gates_last = {n: x[n].mT.contiguous().mT for n in ("g", "beta")}
    for changed in (slices, head_major, gates_last):
        same(run(x, do, dht, **changed), want)


def test_a_gradient_comes_in_any_strides():
    x = gated(on_gpu(batch=2, tokens=300))
    do, dht = incoming(x)
    want = run(x, do, dht)
    wider = torch.cat([do, do], -1)[..., 1:129]  # begins 2 bytes past a multiple of 16
    wider.copy_(do)
    head_major = do.transpose(1, 2).contiguous().transpose(1, 2)
    for other in (wider, head_major, do.mT.contiguous().mT):
        same(run(x, other, dht), want)
    one = do.new_ones(())  # o.sum().backward(): every stride is 0
    same(run(x, one.expand(do.shape)), run(x, torch.ones_like(do)))


def test_neighbours_of_a_sequence_do_not_matter():
    x = gated(on_gpu([70, 100, 33]))
    do, dht = incoming(x)
    want = run(x, do, dht)
    for t in (*(x[name] for name in ("q", "k", "v", "g", "beta")), do):
        t[:, 70:170] = torch.nan
    got = run(x, do, dht)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        for part in (slice(0, 70), slice(170, None)):
            assert torch.equal(getattr(got, name)[:, part], getattr(want, name)[:, part]), name
    assert torch.equal(got.dh0[[0, 2]], want.dh0[[0, 2]])


def test_a_batch_is_its_packing_and_its_rows():
    x = gated(on_gpu(batch=5, tokens=333))
    do, dht = incoming(x)
    want = run(x, do, dht)

    def pack(t: Tensor) -> Tensor:
        return t.flatten(0, 1)[None]

    packed = {n: t if n == "initial_state" else pack(t) for n, t in x.items()}
    packed["cu_seqlens"] = torch.arange(6, device=GPU) * 333
    got = run(packed, pack(do), dht)
    per_token = {name: getattr(got, name).view_as(getattr(want, name)) for name in got._fields[:5]}
    same(got._replace(**per_token), want)
    for b in range(5):
        row = run({n: t[b : b + 1] for n, t in x.items()}, do[b : b + 1], dht[b : b + 1])
        same(row, GdnBackward(*(None if t is None else t[b : b + 1] for t in want)))


def test_the_low_level_pair_is_the_public_function():
    x = gated(on_gpu([300, 0, 77]))
    do, dht = incoming(x)
    q, k, v, g, beta, h0, bounds = (
        x[n] for n in ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
    )
    g_cum, A, *_ = chunk_gated_delta_rule_fwd(q, k, v, g, beta, None, h0, bounds)
    dq, dk, dv, dbeta, dg, dh0 = chunk_gated_delta_rule_bwd(
        q, k, v, g_cum, beta, A, do, dht, None, h0, bounds
    )
    same(GdnBackward(dq, dk, dv, dbeta, dg, dh0, None, None), run(x, do, dht))


@pytest.mark.parametrize("lengths", [None, [70, 0, 65, 130]])
def test_states_before_each_chunk(lengths):
    x = gated(on_gpu(lengths, tokens=200))
    bounds = x.get("cu_seqlens")
    lengths_known = None if bounds is None else bounds.cpu()
    arguments = [x[n] for n in ("q", "k", "v", "g", "beta")]

    def states(h0: Tensor, v_first: bool) -> Tensor:
        return chunk_gated_delta_rule_fwd(
            *arguments, None, h0, bounds, output_h=True, state_v_first=v_first,
            cu_seqlens_cpu=lengths_known,
        )[3]  # fmt: skip

    h = states(x["initial_state"], False)
    wide = [t.double().nan_to_num() for t in (*arguments, x["initial_state"])]
    want, rounded = (
        gdn.chunked(*wide[:5], None, wide[5], bounds, operand_dtype=dtype).h
        for dtype in (None, h.dtype)
    )
    limit = 1.5 * relative_l2(rounded.to(h.dtype), want)
    assert_close("h", h, want, limit)
    assert torch.equal(states(x["initial_state"].mT.contiguous(), True).mT, h)


@pytest.mark.parametrize("shape", [{"batch": 0}, {"tokens": 0}, {"lengths": [], "padding": 5}])
def test_nothing_to_do(shape):
    x = on_gpu(**shape, activations=True)
    do, dht = incoming(x)
    got = run(x, do, dht)
    assert not any(t.any() for t in got._replace(dh0=got.dq))
    assert torch.equal(got.dh0, dht)


def test_more_than_two_to_the_31_elements():
    """Of v, of the states and of their gradients: the last sequence, as if it were alone."""
    if torch.cuda.mem_get_info()[0] < 64 * 2**30:
        pytest.skip("needs 64 GiB")
    filler, last = 140_000, 200
    tokens = 2 * filler + last  # x 64 x 128 elements of v; 4380 chunks x 64 x 128 x 128 of states
    x = gated(on_gpu([last], heads=(16, 64), padding=0))
    do, dht = incoming(x)
    want = run(x, do, dht, batch_invariant=True)

    def behind_zeros(t: Tensor) -> Tensor:
        big = torch.zeros(1, tokens, *t.shape[2:], dtype=t.dtype, device=GPU)
        big[:, -last:] = t
        return big

    big = {n: behind_zeros(x[n]) for n in ("q", "k", "v", "g", "beta")}
    big["initial_state"] = x["initial_state"].expand(3, -1, -1, -1)
    big["cu_seqlens"] = torch.tensor([0, filler, 2 * filler, tokens], device=GPU)
    got = run(big, behind_zeros(do), dht.expand(3, -1, -1, -1), batch_invariant=True)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(getattr(got, name)[:, -last:], getattr(want, name)), name
    assert torch.equal(got.dh0[2:], want.dh0)
    # a filler passes its state on, in units of scale and back: two roundings in fp32
    torch.testing.assert_close(got.dh0[0], dht[0], rtol=2**-22, atol=0)


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [((4, 16), [3000, 1000, 777, 1, 64]), ((16, 64), [500, 0, 65, 900, 300])],
    ids=str,
)
def test_repeats_bitwise(heads, lengths):
    """200 runs that keep every SM busy: a missing fence shows as a rare difference."""
    x = gated(on_gpu(lengths, heads=heads))
    do, dht = incoming(x)
    x = leaves(x)
    results = chunk_gated_delta_rule(**x, output_final_state=True)
    wanted = [x[name] for name in OF[:6]]
    first = torch.autograd.grad(results, wanted, (do, dht), retain_graph=True)
    for _ in range(200):
        again = torch.autograd.grad(results, wanted, (do, dht), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("lengths", [None, [300, 100]])
def test_does_not_synchronise(lengths):
    x = on_gpu(lengths, activations=True)
    do, dht = incoming(x)
    run(x, do, dht)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(x, do, dht)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_of_a_training_step_follows_new_lengths():
    """One capture at capacity; other lengths are written into cu_seqlens before each replay."""
    x = on_gpu([300, 100, 112], padding=0, activations=True)
    do, dht = incoming(x)
    run(x, do, dht)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(x, do, dht)
    for lengths in ([300, 100, 112], [1, 0, 511], [64, 448, 0], [5, 5, 5]):
        x["cu_seqlens"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        for t in got:
            t.fill_(torch.nan)
        graph.replay()
        check(x, do, dht, got)


def test_on_another_stream_of_a_busy_gpu():
    x = gated(on_gpu([3000, 65], heads=(4, 8)))
    do, dht = incoming(x)
    want = run(x, do, dht)
    stream, load = torch.cuda.Stream(), torch.randn(4096, 4096, device=GPU)
    late = {n: torch.zeros_like(t) if n in ("q", "k", "v") else t for n, t in x.items()}
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            load = load @ load / 4096
        for name in "qkv":  # late: only this stream knows when
            late[name].copy_(x[name])
        got = run(late, do, dht)
    stream.synchronize()
    same(got, want)


@pytest.mark.parametrize("lengths", [None, [70, 0, 130]])
def test_compiles_to_one_graph(lengths):
    x = on_gpu(lengths, activations=True)
    do, dht = incoming(x)
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True)
    traced = leaves(x)
    results = compiled(**traced, output_final_state=True)
    same(grads(traced, results, do, dht), run(x, do, dht))


def keep_operator(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Policy:
    keep = op is torch.ops.qla_kernels.gdn_fwd.default
    return Policy.MUST_SAVE if keep else Policy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
def test_checkpointing(selective):
    x = on_gpu([300, 0, 77], activations=True)
    do, dht = incoming(x)
    kept = leaves(x)
    context = functools.partial(create_selective_checkpoint_contexts, keep_operator)
    results = checkpoint(
        functools.partial(chunk_gated_delta_rule, **kept, output_final_state=True),
        use_reentrant=False,
        **({"context_fn": context} if selective else {}),
    )
    same(grads(kept, results, do, dht), run(x, do, dht))


def test_autocast_changes_nothing():
    x = on_gpu([300, 0, 77], activations=True)
    do, dht = incoming(x)
    with torch.autocast(GPU, dtype=torch.float16):
        got = run(x, do, dht)
    same(got, run(x, do, dht))
