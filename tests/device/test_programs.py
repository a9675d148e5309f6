"""Replayed calls on a GPU have the bits of calls that run their launch code, for every family."""

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from qla_kernels import (
    causal_conv1d,
    causal_conv1d_update,
    chunk_gated_delta_rule,
    decode_gated_delta_net,
    fused_recurrent_gated_delta_rule,
    gated_rms_norm,
    packed_decode_gated_delta_rule,
    prefill_gated_delta_rule,
    shared_prefix_conv1d,
    shared_prefix_gated_delta_rule,
    verify_gated_delta_rule,
)
from qla_kernels.dualkv import SharedLayout, shared_prefix_attention
from qla_kernels.gdn import GdnPool, api, autograd
from qla_kernels.gdn.anchored import pool as anchored
from qla_kernels.gdn.decode import api as decode
from qla_kernels.gdn.tree import autograd as tree_autograd
from qla_kernels.runtime import programs
from qla_kernels.runtime.native import prebuilt
from qla_kernels.sparse_ring import FixedVerticalSlash, sparse_attention

pytestmark = [
    pytest.mark.hopper,
    pytest.mark.skipif(isinstance(prebuilt.in_use(), str), reason="needs prebuilt kernels"),
]

Tree = tuple[tuple[int, ...], tuple[int, ...]]  # lengths and parents of nodes

# A GPU that is not the current one: test_programs_of_another_gpu.py
GPU = torch.device("cuda", int(os.environ.get("QLA_TEST_GPU", "0")))
TIMES = 4 if GPU.index == 0 else 10  # as usual, recorded, and replays


@pytest.fixture(autouse=True)
def _as_in_use(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the poison of other device tests, which is a fill after each allocation."""
    torch.use_deterministic_algorithms(False)
    yield
    programs.forget()


def gdn(
    tokens: int, H: int = 2, HV: int = 8, batch: int = 1, K: int = 128, V: int = 128
) -> tuple[Tensor, ...]:
    q, k = (
        torch.nn.functional.normalize(
            torch.randn(batch, tokens, H, K, device=GPU), dim=-1
        ).bfloat16()
        for _ in range(2)
    )
    v = torch.randn(batch, tokens, HV, V, device=GPU, dtype=torch.bfloat16)
    g = -0.1 * torch.rand(batch, tokens, HV, device=GPU)
    return q, k, v, g, torch.rand(batch, tokens, HV, device=GPU, dtype=torch.bfloat16)


def unreplayed(run: Callable[[], tuple[Tensor, ...]], monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setenv("QLA_PROGRAMS", "0")
        programs.forget()
        done = run()
    programs.forget()
    return done


def same_bits(run: Callable[[], tuple[Tensor, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = unreplayed(run, monkeypatch)
    for _ in range(TIMES):
        for got, want in zip(run(), expected, strict=True):
            assert torch.equal(got, want)


def all_replayed(*names: str) -> None:
    for name in names:
        assert any(name in table.name and table.replays() for table in programs._tables), name


CALLS = {
    "one launch": lambda: gdn(512, batch=32),
    "four launches": lambda: gdn(2048),
    "seven launches": lambda: gdn(8192, 16, 32),
    "kept segments": lambda: gdn(32768, 4, 8),
}


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = CALLS[name]()
    same_bits(lambda: chunk_gated_delta_rule(*x, output_final_state=True), monkeypatch)
    y = [a.clone() for a in x]  # other memory
    replayed = chunk_gated_delta_rule(*y, output_final_state=True)
    assert torch.equal(replayed[0], chunk_gated_delta_rule(*x, output_final_state=True)[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("ends", [[5, 2100, 2990], [9000, 9100, 20000, 20064, 30000, 32000, 32768]])
@torch.no_grad()
def test_packed_forward(
    dtype: torch.dtype, known: bool, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the second batch the device decides on one of two streams, unless lengths are known."""
    x = gdn(ends[-1] + 10)
    bounds = torch.tensor([0, *ends], dtype=dtype)
    packed = {"cu_seqlens": bounds.to(GPU), "cu_seqlens_cpu": bounds if known else None}
    h0 = torch.randn(len(ends), 8, 128, 128, device=GPU)
    same_bits(
        lambda: chunk_gated_delta_rule(
            *x, initial_state=h0, output_final_state=True, use_qk_l2norm_in_kernel=True, **packed
        ),
        monkeypatch,
    )
    assert api.CALLS.replays() == TIMES - 2


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("cache", [None, False, True])
def test_training(name: str, cache: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = CALLS[name]()
    do = torch.randn_like(x[2])

    def step() -> tuple[Tensor, ...]:
        leaves = [a.clone().requires_grad_() for a in x]
        o, _ = chunk_gated_delta_rule(*leaves, enable_fwd_cp_cache=cache)
        o.backward(do)
        return o.detach(), *(leaf.grad for leaf in leaves)

    same_bits(step, monkeypatch)
    for table in (autograd.FORWARDS, autograd.BACKWARDS):
        assert table.replays(), f"{table.name} has no program"


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        (8192, 4, 8, 1, 128, 128),
        (8192, 4, 8, 2, 128, 128),
        (8192, 16, 16, 1, 128, 256),
        (2048, 16, 16, 4, 128, 256),
        (8192, 30, 30, 1, 96, 192),
    ],
    ids=str,
)
def test_gradients_of_start_states(
    sizes: tuple[int, ...], v_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of segments the device finds their rows; states are copied for value heads in parts."""
    x = gdn(*sizes)
    _, _, HV, batch, K, V = sizes
    h0 = torch.randn(batch, HV, *((V, K) if v_first else (K, V)), device=GPU)
    do, dht = torch.randn_like(x[2]), torch.randn_like(h0)

    def step() -> tuple[Tensor, ...]:
        *leaves, start = (a.clone().requires_grad_() for a in (*x, h0))
        o, ht = chunk_gated_delta_rule(
            *leaves, initial_state=start, output_final_state=True, state_v_first=v_first
        )
        torch.autograd.backward((o, ht), (do, dht))
        return o.detach(), ht.detach(), *(leaf.grad for leaf in (*leaves, start))

    same_bits(step, monkeypatch)
    assert autograd.FORWARDS.replays() == autograd.BACKWARDS.replays() == TIMES - 2
    with torch.no_grad():
        same_bits(
            lambda: chunk_gated_delta_rule(
                *x, initial_state=h0, output_final_state=True, state_v_first=v_first
            ),
            monkeypatch,
        )
    assert api.CALLS.replays() == TIMES - 2


def test_start_states_of_packed_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device alone knows which segment begins a sequence."""
    x = gdn(8200, 4, 8)
    bounds = torch.tensor([0, 0, 7000, 8190], device=GPU)
    h0 = torch.randn(3, 8, 128, 128, device=GPU)
    do, dht = torch.randn_like(x[2]), torch.randn_like(h0)

    def step() -> tuple[Tensor, ...]:
        *leaves, start = (a.clone().requires_grad_() for a in (*x, h0))
        o, ht = chunk_gated_delta_rule(
            *leaves, initial_state=start, output_final_state=True, cu_seqlens=bounds
        )
        torch.autograd.backward((o, ht), (do, dht))
        return o.detach(), ht.detach(), *(leaf.grad for leaf in (*leaves, start))

    same_bits(step, monkeypatch)
    assert autograd.BACKWARDS.replays() == TIMES - 2
    assert torch.equal(step()[-1][0], dht[0])  # a sequence without tokens


LENGTHS = [
    2048,
    2047,
    2049,
    2111,
    1984,
    1,
    63,
    64,
    65,
    700,
    3000,
    3001,
    4096,
    4097,
    2500,
    8191,
    8192,
]


def any_length(
    step: Callable[[int], tuple[Tensor, ...]],
    tables: tuple[programs.Programs, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Results of step(T), for many T in turn, are those of launch code; most are replays."""
    expected = unreplayed(lambda: tuple(map(step, LENGTHS)), monkeypatch)  # type: ignore
    for T, want in zip(LENGTHS, expected, strict=True):
        assert all(map(torch.equal, step(T), want))  # makes forms
    before = [table.replays() for table in tables]
    fresh = [T + 3 for T in LENGTHS if T > 600]  # no call was of this length
    for T in fresh:
        got = step(T)
        with monkeypatch.context() as patch:
            for table in tables:
                patch.setattr(table, "find", lambda *_: None)
            assert all(map(torch.equal, got, step(T)))
    for table, n in zip(tables, before, strict=True):
        assert table.replays() - n > len(fresh) // 2, table.name
    monkeypatch.setenv("QLA_CHECK_PROGRAMS", "1")
    for T in LENGTHS:
        step(T)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [(2, 8), (16, 32)])
@torch.no_grad()
def test_forward_of_any_length(
    batch: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [x.flatten(0, 1) for x in gdn(batch * 8195, *heads)]

    def step(T: int) -> tuple[Tensor, ...]:
        x = [x[: batch * T].unflatten(0, (batch, T)) for x in whole]
        return chunk_gated_delta_rule(
            *x, output_final_state=True, use_qk_l2norm_in_kernel=batch == 3
        )

    any_length(step, (api.CALLS,), monkeypatch)


@torch.no_grad()
def test_packed_forward_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are on the device alone: launch code does not depend on them."""
    whole = gdn(8195)

    def step(T: int) -> tuple[Tensor, ...]:
        bounds = torch.tensor([0, T // 3, T // 3, T], device=GPU)
        return chunk_gated_delta_rule(
            *(x[:, :T] for x in whole), cu_seqlens=bounds, output_final_state=True
        )

    any_length(step, (api.CALLS,), monkeypatch)


@pytest.mark.parametrize("batch", [1, 3])
def test_training_of_any_length(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [x.flatten(0, 1) for x in gdn(batch * 8195)]
    gradient = torch.randn_like(whole[2])

    def step(T: int) -> tuple[Tensor, ...]:
        *x, do = (x[: batch * T].unflatten(0, (batch, T)) for x in (*whole, gradient))
        leaves = [a.clone().requires_grad_() for a in x]
        o, _ = chunk_gated_delta_rule(*leaves)
        o.backward(do)
        return o.detach(), *(leaf.grad for leaf in leaves)

    any_length(step, (autograd.FORWARDS, autograd.BACKWARDS), monkeypatch)


@torch.no_grad()
def test_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, g, beta = gdn(1, batch=64)
    pool = torch.randn(100, 8, 128, 128, device=GPU)
    slots = torch.randperm(100, device=GPU)[:64]

    def step() -> tuple[Tensor, ...]:
        states = pool.clone()
        version = states._version
        o, _ = fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=states, state_indices=slots
        )
        assert states._version == version + 1
        return o, states

    same_bits(step, monkeypatch)
    assert decode.DECODING.replays()


@torch.no_grad()
def test_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and verification in a pool, and both parts of a layer's step, and the step."""
    N, H, HV, size = 6, 2, 8, 128
    x, drafts = gdn(600, H, HV), gdn(4, H, HV, batch=N)
    pool = torch.randn(40, HV, size, size, device=GPU)
    slots, of_drafts = torch.randperm(9, device=GPU)[:N], torch.randperm(40, device=GPU)[: 4 * N]
    bounds = torch.tensor([0, 100, 101, 300, 300, 599, 600], device=GPU)
    width = (2 * H + HV) * size
    rows = torch.randn(N, width, device=GPU, dtype=torch.bfloat16)
    weight, tails = torch.randn(width, 4, device=GPU), torch.randn(9, 3, width, device=GPU)
    tails = tails.bfloat16().transpose(1, 2)
    a, b, z = (
        torch.randn(N, *n, device=GPU, dtype=torch.bfloat16) for n in ((HV,), (HV,), (HV, size))
    )
    A_log, dt_bias = torch.zeros(HV, device=GPU), torch.ones(HV, device=GPU)
    norm = {"z": z, "norm_weight": torch.ones(size, device=GPU)}

    def run() -> tuple[Tensor, ...]:
        states, tail, other = pool.clone(), tails.clone(), tails.clone()
        o = prefill_gated_delta_rule(*x, states, slots, cu_seqlens=bounds)
        verified = verify_gated_delta_rule(*drafts, states, of_drafts.view(N, 4))
        mixed = causal_conv1d_update(rows, tail, weight, None, "silu", slots)
        heads = causal_conv1d_update(
            rows, tails.clone(), weight, None, "silu", slots, qk_l2norm=(2 * H, size)
        )
        of = a, b, A_log, dt_bias, states, slots
        step = packed_decode_gated_delta_rule(mixed, *of, **norm)
        whole = decode_gated_delta_net(rows, *of, other, weight, **norm)
        return o, verified, mixed, heads, step, whole, states, tail, other

    same_bits(run, monkeypatch)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@torch.no_grad()
def test_pool(raw: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots, lengths and rejections change from step to step; tails pass the ends of chunks."""
    N, steps = 6, 30
    x, rng = gdn(60 + 4 * steps, 4, 8, batch=N), torch.Generator().manual_seed(0)
    options = {}
    if raw:
        options = {"A_log": torch.zeros(8, device=GPU), "dt_bias": torch.ones(8, device=GPU)}
        flags = "use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel"
        options |= dict.fromkeys(flags, True)
    slots = torch.randperm(9, generator=rng)[:N].to(dtype)
    lengths = torch.randint(1, 60, (N,), generator=rng).tolist()
    orders = [torch.randperm(N, generator=rng) for _ in range(steps)]
    counts = torch.randint(0, 5, (steps, N), generator=rng).to(dtype)

    def run() -> tuple[Tensor, ...]:
        pool, at, results = GdnPool(9, 4, 8, 128, 128, device=GPU), list(lengths), []
        for n in range(N):
            prompt = (t[n : n + 1, : at[n]] for t in x)
            pool.prefill(*prompt, slots[n : n + 1].to(GPU), **options)
        for step, (order, count) in enumerate(zip(orders, counts, strict=True)):
            new = 4 if step % 3 else 1
            tokens = [torch.stack([t[n, at[n] : at[n] + new] for n in order]) for t in x]
            tokens = [torch.cat([t, torch.full_like(t[:1], torch.nan)]) for t in tokens]
            index = torch.cat([slots[order], torch.tensor([-1], dtype=dtype)]).to(GPU)
            version = pool.tensors.lengths._version
            results.append(pool.decode(*tokens, index, **options))
            assert pool.tensors.lengths._version == version + 1
            back = count.clamp(max=new)
            pool.reject(index, torch.cat([back, torch.tensor([7], dtype=dtype)]).to(GPU))
            for n, taken in zip(order.tolist(), back.tolist(), strict=True):
                at[n] += new - taken
            assert pool.lengths[slots.long().to(GPU)].tolist() == at
        return (*results, *(t[:-1] for t in pool.tensors))  # the last slot holds anything

    same_bits(run, monkeypatch)
    assert anchored.DECODES.replays() == TIMES * steps - 4  # steps of one token, and of four
    assert anchored.REJECTS.replays() == TIMES * steps - 2
    monkeypatch.setenv("QLA_CHECK_PROGRAMS", "1")
    run()


@pytest.mark.parametrize("deterministic", [False, True])
def test_shared_prompts(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = SharedLayout.from_lengths([(700, [300, 200]), (100, [50] * 7)], device=GPU)
    T = layout.num_tokens
    q = torch.randn(T, 16, 128, device=GPU, dtype=torch.bfloat16)
    k, v = (torch.randn(T, 2, 128, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    do = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        leaves = [a.clone().requires_grad_() for a in (q, k, v)]
        o = shared_prefix_attention(*leaves, layout, deterministic=deterministic)
        o.backward(do)
        grads = [leaf.grad for leaf in leaves]
        return o.detach(), *grads[0 if deterministic else 1 :]  # dq is added up by atomics

    same_bits(step, monkeypatch)


def test_sparse_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 1024, 4, 128, device=GPU, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1024, 2, 128, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    pattern = FixedVerticalSlash([0, 5, 100], [0, 2, 4])

    def step() -> tuple[Tensor, ...]:
        leaves = [a.clone().requires_grad_() for a in (q, k, v)]
        o = sparse_attention(*leaves, pattern=pattern)
        o.square().sum().backward()
        return o.detach(), *(leaf.grad for leaf in leaves)

    same_bits(step, monkeypatch)
    all_replayed("vertical_slash_fwd", "vertical_slash_bwd")


TREE = (700, *[90, 300, 0, 64] * 5), (-1, *[0] * 20)
DEEP = (300, 200, 64, 70, 130, 1, 500), (-1, 0, 1, 1, 0, 4, -1)


@pytest.mark.parametrize("tree", [TREE, DEEP], ids=["wide", "deep"])
@pytest.mark.parametrize("final", [False, True])
def test_trees(tree: Tree, final: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = SharedLayout.from_forest(*tree).to(GPU)
    x = gdn(layout.num_tokens)
    do = torch.randn_like(x[2])

    def step() -> tuple[Tensor, ...]:
        leaves = [a.clone().requires_grad_() for a in x]
        o, states = shared_prefix_gated_delta_rule(*leaves, layout, output_final_state=final)
        if states is None:
            o.backward(do)
        else:
            torch.autograd.backward([o, states], [do, states.detach()])
        return o.detach(), *(leaf.grad for leaf in leaves)

    same_bits(step, monkeypatch)
    assert tree_autograd.TREE_FORWARDS.replays()
    assert tree_autograd.TREE_BACKWARDS.replays()


@torch.no_grad()
def test_trees_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = SharedLayout.from_forest(*DEEP).to(GPU)
    x = gdn(layout.num_tokens)
    same_bits(
        lambda: shared_prefix_gated_delta_rule(
            *x, layout, output_final_state=True, use_qk_l2norm_in_kernel=True
        ),
        monkeypatch,
    )
    assert tree_autograd.TREE_FORWARDS.replays()


@pytest.mark.parametrize("packed", ["", "int32", "int64", "tree"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("heads", [None, (2, 128)])
def test_convolution(
    packed: str, bias: bool, heads: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = SharedLayout.from_forest(*DEEP).to(GPU)
    T, C = layout.num_tokens, 512
    x = torch.randn(T, C, device=GPU, dtype=torch.bfloat16)
    given = [x, torch.randn(C, 4, device=GPU), *[torch.randn(C, device=GPU)] * bias]
    dy = torch.randn_like(x)

    def step() -> tuple[Tensor, ...]:
        leaves = [a.clone().requires_grad_() for a in given]
        parameters = (*leaves[1:], None)[:2]
        if packed == "tree":
            y = shared_prefix_conv1d(leaves[0], *parameters, layout, "silu", qk_l2norm=heads)
        else:
            y = causal_conv1d(leaves[0], *parameters, "silu", bounds, qk_l2norm=heads)
        y.backward(dy)
        return y.detach(), *(leaf.grad for leaf in leaves)

    bounds = None
    if packed.startswith("int"):
        bounds = torch.tensor([0, 5, 700, T], device=GPU, dtype=getattr(torch, packed))
    same_bits(step, monkeypatch)
    all_replayed("conv_fwd", "conv_bwd")


@pytest.mark.parametrize("packed", ["", "int32", "int64"])
def test_gated_norm(packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = torch.randn(2, 700, 4, 128, device=GPU, dtype=torch.bfloat16)
    z = torch.randn(700, 600, device=GPU, dtype=torch.bfloat16)[:, 8:520].unflatten(1, (4, 128))
    given = x, z, torch.randn(128, device=GPU)
    bounds = None
    if packed:
        bounds = torch.tensor([0, 5, 690], device=GPU, dtype=getattr(torch, packed))

    def step() -> tuple[Tensor, ...]:
        leaves = [a.detach().requires_grad_() for a in given]
        y = gated_rms_norm(*leaves, 1e-5, "sigmoid", bounds)
        y.backward(dy)
        return y.detach(), *(leaf.grad for leaf in leaves)

    same_bits(step, monkeypatch)
    all_replayed("gated_norm_fwd", "gated_norm_bwd")


@torch.no_grad()
def test_graphs_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture on a stream whose programs are known; replays of the graph after other calls."""
    x = gdn(2048)
    (expected, _) = unreplayed(lambda: chunk_gated_delta_rule(*x), monkeypatch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(TIMES):
            assert torch.equal(chunk_gated_delta_rule(*x)[0], expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        o, _ = chunk_gated_delta_rule(*x)
    programs.forget()
    for _ in range(TIMES):
        chunk_gated_delta_rule(*gdn(2048))
    o.zero_()
    graph.replay()
    assert torch.equal(o, expected)


@torch.no_grad()
def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    x = gdn(2048)
    (expected, _) = unreplayed(lambda: chunk_gated_delta_rule(*x), monkeypatch)
    torch.cuda.synchronize()
    wrong: list[object] = []

    def run() -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                done = [chunk_gated_delta_rule(*x)[0] for _ in range(50)]
                torch.cuda.current_stream().synchronize()
            wrong.extend(o for o in done if not torch.equal(o, expected))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.no_grad()
def test_memory() -> None:
    """A replay's workspace goes back to torch's allocator."""
    x = gdn(8192, 16, 32)
    for _ in range(TIMES):
        chunk_gated_delta_rule(*x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        chunk_gated_delta_rule(*x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@torch.no_grad()
def test_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QLA_CHECK_PROGRAMS", "1")
    x = gdn(2048)
    for _ in range(TIMES):
        chunk_gated_delta_rule(*x)
