"""GdnPool on a GPU: 0 different elements beside one training call over whole sequences."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn import GdnPool
from qla_kernels.runtime.sm90 import readable
from tests.gdn_calls import Call, call

pytestmark = pytest.mark.hopper

GPU = "cuda"
NAMES = ("q", "k", "v", "g", "beta")
DTYPES = (torch.bfloat16, torch.float16)
HEADS = [(1, 1), (2, 8), (4, 8), (3, 9), (16, 32), (16, 64)]
SIZES = [(128, 128), (64, 64), (128, 64), (64, 128), (96, 192), (48, 256)]


def on_gpu(N: int, T: int, heads: Any = (2, 8), sizes: Any = (128, 128), **others: Any) -> Call:
    others = {"dtype": torch.bfloat16, "gates": torch.float32, **others}
    x = call(batch=N, tokens=T, heads=heads, sizes=sizes, **others)
    x["g"] *= 0.2  # so that states matter over many chunks
    del x["initial_state"]
    return {n: t.to(GPU) if torch.is_tensor(t) else t for n, t in x.items()}


def trained(x: Call) -> Tensor:
    """o of a training forward."""
    x = {n: t.detach().clone().requires_grad_() if n in NAMES else t for n, t in x.items()}
    return chunk_gated_delta_rule(**x, batch_invariant=True)[0].detach()


def pool_for(x: Call, slots: int) -> GdnPool:
    (_, _, H, K), (HV, V) = x["q"].shape, x["v"].shape[2:]
    return GdnPool(slots, H, HV, K, V, x["q"].dtype, GPU)


def other_bits(o: Tensor, want: Tensor) -> int:
    return int((o.view(torch.int16) != want.view(torch.int16)).sum())


def walk(x: Call, until: int, seed: int, options: Call) -> None:
    """Cuts each sequence into random calls, in batches of random composition, and compares."""
    rng = random.Random(seed)
    N, T = x["q"].shape[:2]
    want, p = trained(x | options), pool_for(x, N + 3)
    slots, at = rng.sample(range(N + 3), N), [0] * N
    while min(at) < until:
        kind = rng.choice(["prefill", "decode", "verify"])
        behind = [n for n in range(N) if at[n] < until]
        chosen = rng.sample(behind, rng.randint(1, len(behind)))
        if kind != "prefill":
            chosen = [n for n in chosen if at[n]]
            if not chosen:
                continue
        n_new = {"prefill": rng.choice([1, 5, 63, 64, 65, 130]), "decode": 1}.get(
            kind, rng.randint(2, 8)
        )
        n_new = min(n_new, T - max(at[n] for n in chosen))
        tokens = [torch.stack([x[m][n, at[n] : at[n] + n_new] for n in chosen]) for m in NAMES]
        padding = [torch.cat([t, torch.full_like(t[:1], torch.nan)]) for t in tokens]
        index = torch.tensor([*(slots[n] for n in chosen), -1], device=GPU)
        if kind == "prefill":
            goes_on = torch.tensor([*(at[n] > 0 for n in chosen), False], device=GPU)
            o = p.prefill(*padding, index, has_initial_state=goes_on, **options)
        else:
            o = p.decode(*padding, index, **options)
        assert not o[-1].any()
        for i, n in enumerate(chosen):
            rows = want[n, at[n] : at[n] + n_new]
            assert other_bits(o[i], rows) == 0, (kind, n, at[n], n_new)
        accepted = [rng.randint(0, n_new) if kind == "verify" else n_new for _ in chosen]
        if kind == "verify":
            back = [n_new - a for a in accepted]
            p.reject(index, torch.tensor([*back, 0], device=GPU))
        for n, a in zip(chosen, accepted, strict=True):
            at[n] += a


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_any_cut_into_calls_has_the_same_bits(heads, dtype):
    walk(on_gpu(5, 420, heads, dtype=dtype), 280, seed=heads[1], options={})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_other_head_sizes(sizes, dtype):
    walk(on_gpu(5, 420, sizes=sizes, dtype=dtype), 280, seed=1, options={})


def test_with_norms_gates_and_sigmoids():
    x = on_gpu(5, 420, activations=True)
    names = ("A_log", "dt_bias", "use_qk_l2norm_in_kernel", "use_gate_in_kernel")
    options = {n: x.pop(n) for n in (*names, "use_beta_sigmoid_in_kernel")}
    walk(x, 280, seed=2, options=options)


@pytest.mark.parametrize("size", [1.0, 2.0**20, 2.0**60])
def test_later_tokens_leave_a_row_alone(size):
    """Zeros of A and P stand against them; the first of a pair of gates does not see the second."""
    x = on_gpu(3, 64, heads=(4, 8))
    whole, p = trained(x), pool_for(x, 3)
    for n in range(1, 65):
        cut = {m: t[:, :n] if m in NAMES else t for m, t in x.items()}
        assert other_bits(trained(cut), whole[:, :n]) == 0, f"cut off after {n}"
    index = torch.arange(3, device=GPU)
    p.prefill(*(x[m][:, :20] for m in NAMES), index)
    drafts = {m: x[m][:, 20:28].clone() for m in NAMES}
    drafts["v"][:, 3:] *= size
    o = p.decode(*(drafts[m] for m in NAMES), index)
    assert other_bits(o[:, :3], whole[:, 20:23]) == 0


def test_a_call_alone_has_the_bits_of_a_batch_in_both_directions():
    x = on_gpu(4, 333, heads=(4, 8))
    do = torch.randn_like(x["v"])

    def gradients(rows: slice) -> list[Tensor]:
        leaves = {m: x[m][rows].detach().clone().requires_grad_() for m in NAMES}
        o, _ = chunk_gated_delta_rule(**leaves, batch_invariant=True)
        return [o, *torch.autograd.grad(o, list(leaves.values()), do[rows])]

    together = gradients(slice(0, 4))
    for n in range(4):
        alone = gradients(slice(n, n + 1))
        for name, a, b in zip(("o", *(f"d{m}" for m in NAMES)), alone, together, strict=True):
            assert torch.equal(a[0], b[n]), f"{name} of sequence {n}"


def test_a_graph_follows_lengths_slots_and_rejections():
    N, T, step = 6, 300, 4
    x = on_gpu(N, T, heads=(4, 8))
    want, p = trained(x), pool_for(x, 9)
    slots = torch.randperm(9, device=GPU)[:N]
    at = torch.randint(1, 130, (N,))
    for n in range(N):
        tokens = (x[m][n : n + 1, : at[n]] for m in NAMES)
        p.prefill(*tokens, slots[n : n + 1])
    given = {m: x[m][:, :step].clone() for m in NAMES}
    index, back = slots.clone(), torch.zeros(N, dtype=torch.int32, device=GPU)
    state = [t.clone() for t in p.tensors]
    p.reject(index, back)
    p.decode(*(given[m] for m in NAMES), index)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        p.reject(index, back)
        o = p.decode(*(given[m] for m in NAMES), index)
    for t, before in zip(p.tensors, state, strict=True):
        t.copy_(before)
    rejected = torch.zeros(N, dtype=torch.int64)
    for _ in range(24):
        order = torch.randperm(N)
        index.copy_(slots[order.to(GPU)])
        back.copy_(rejected[order])
        at -= rejected
        for m in NAMES:
            rows = [x[m][n, at[n] : at[n] + step] for n in order]
            given[m].copy_(torch.stack(rows))
        graph.replay()
        for i, n in enumerate(order):
            assert other_bits(o[i], want[n, at[n] : at[n] + step]) == 0
        at += step
        rejected = torch.randint(0, step + 1, (N,))


@pytest.mark.parametrize("sequences", [8, 33, 256])
def test_steps_without_a_pause_have_the_same_bits(sequences):
    """Several items a CTA, launch behind launch: loads of S run far ahead of its two readers."""
    x = on_gpu(sequences, 41, heads=(16, 32))
    p, slots = pool_for(x, sequences), torch.arange(sequences, device=GPU)
    p.prefill(*(x[m][:, :40] for m in NAMES), slots)
    token, one = [x[m][:, 40:] for m in NAMES], torch.ones_like(slots)
    want = p.decode(*token, slots).clone()
    steps = []
    for _ in range(100):
        p.reject(slots, one)
        steps.append(p.decode(*token, slots))
    assert sum(other_bits(o, want) for o in steps) == 0
    assert other_bits(want, trained(x)[:, 40:]) == 0


@pytest.mark.parametrize("kind", ["Qwen3.5", "Qwen3Next"])
def test_layers_of_a_model(kind, monkeypatch, untuned):
    """A rollout's prefill and decoding give what the training forward gave, layer by layer."""
    from qla_kernels.integrations import mixers
    from qla_kernels.integrations import transformers as integration
    from tests.tiny_models import VOCABULARY, tiny

    model = tiny(kind, width=256, head_sizes=(128, 128)).to(GPU, torch.bfloat16)
    heard: list[tuple[tuple[Tensor, ...], Call, Tensor]] = []

    def listening(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        tokens = *map(readable, (q, k, v)), options.pop("g"), options.pop("beta")
        asked = {n: options[n] for n in ("use_qk_l2norm_in_kernel",) if n in options}
        o, final = chunk_gated_delta_rule(*tokens, **options, batch_invariant=True)
        heard.append((tuple(t.detach() for t in tokens), asked, o.detach()))
        return o, final

    monkeypatch.setitem(integration.HELD, integration.HOLDS, listening)
    monkeypatch.setitem(integration.SHARED, integration.SHARES, listening)
    monkeypatch.setitem(integration.TAKES, listening, chunk_gated_delta_rule)
    assert integration.swap(model) >= 1
    for layer in model.modules():  # its layers' own forward, which calls the rule as a function
        mixers.give_back(layer)
    ids = torch.randint(VOCABULARY, (2, 150), device=GPU)
    model(ids, use_cache=False).logits.sum().backward()
    integration.restore(model)
    assert heard
    for tokens, options, want in heard:
        (_, _, H, K), (HV, V) = tokens[0].shape, tokens[2].shape[2:]
        p, slots = GdnPool(2, H, HV, K, V, device=GPU), torch.arange(2, device=GPU)
        parts = [p.prefill(*(t[:, :57] for t in tokens), slots, **options)]
        for t in range(57, 150):
            parts.append(p.decode(*(x[:, t : t + 1] for x in tokens), slots, **options))
        assert other_bits(torch.cat(parts, 1), want) == 0


@pytest.mark.parametrize("kind", ["Qwen3.5", "Qwen3Next"])
def test_a_rollout_of_transformers(kind, monkeypatch, untuned):
    """What `generate` gave a layer, a training forward of each sequence alone gives, bit by bit.

    The same holds for a training forward of the whole padded batch.
    """
    from qla_kernels.integrations import rollouts
    from qla_kernels.integrations import transformers as integration
    from tests.tiny_models import VOCABULARY, tiny

    heard: dict[Any, list[tuple[Call, Tensor]]] = {}
    run = rollouts.LayerCall.__call__

    def listening(layer: Any, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        o, state = run(layer, q, k, v, **more)
        tokens = {"q": q, "k": k, "v": v, "g": more["g"], "beta": more["beta"]}
        heard.setdefault(layer, []).append(({n: x.detach() for n, x in tokens.items()}, o.detach()))
        return o, state

    def check() -> None:
        assert heard
        for calls in heard.values():
            x = {m: torch.cat([tokens[m] for tokens, _ in calls], 1) for m in NAMES}
            o = torch.cat([o for _, o in calls], 1)
            for n, start in enumerate(starts):
                alone = {m: t[n : n + 1, start:] for m, t in x.items()}
                want = trained(alone | {"use_qk_l2norm_in_kernel": True})
                assert other_bits(o[n : n + 1, start:], want) == 0, f"sequence {n}"
        heard.clear()

    monkeypatch.setattr(rollouts.LayerCall, "__call__", listening)
    model = tiny(kind, width=256, head_sizes=(128, 128)).to(GPU, torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # as made, all is forgotten at once
            torch.nn.init.constant_(parameter, -3.0)
    assert integration.swap(model, batch_invariant=True) >= 1
    starts, ids = [9, 0, 40], torch.randint(1, VOCABULARY, (3, 90), device=GPU)
    mask = (torch.arange(90) >= torch.tensor(starts)[:, None]).long().to(GPU)
    how = {"do_sample": True, "max_new_tokens": 80, "min_new_tokens": 80}
    sequences = model.generate(ids, attention_mask=mask, **how)
    assert len(next(iter(heard.values()))) == 80
    check()
    mask = torch.cat([mask, torch.ones_like(sequences[:, 90:])], 1)
    model(sequences, attention_mask=mask, use_cache=False).logits.sum().backward()
    check()
    integration.restore(model)
