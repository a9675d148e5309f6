"""The example, and the hook for transformers, on the CPU; a stand-in where it is not installed."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qla_kernels import Unsupported
from qla_kernels.integrations import transformers_sparse_ring as hook
from qla_kernels.integrations.transformers_sparse_ring import SparseRingConfig, attention
from qla_kernels.sparse_ring import (
    Dense,
    FixedVerticalSlash,
    RingGroups,
    StripedLayout,
    VerticalSlash,
    sparse_attention,
)
from qla_kernels.sparse_ring.groups import ALONE, RankRing

pytestmark = pytest.mark.libraries

ROOT = Path(__file__).resolve().parents[2]


def test_two_processes_train_as_one_does(monkeypatch, capfd):
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("sparse_ring_train")
    monkeypatch.setattr(sys, "argv", ["-", "--steps=3", "--tokens=300", "--dtype=float64"])
    assert example.main() == 0
    said = capfd.readouterr().out
    losses = [[float(x) for x in line.split()] for line in said.splitlines()[1:-1]]
    assert [int(step) for step, _, _ in losses] == [0, 1, 2]
    assert losses[2][1] < losses[0][1]  # it learns
    assert said.endswith(": equal\n")


def call(T: int = 128) -> dict[str, torch.Tensor]:
    """As transformers calls: heads before tokens, views of projections."""
    q, k, v = (torch.randn(1, T, h, 8).transpose(1, 2) for h in (4, 2, 2))
    return {"query": q, "key": k, "value": v}


def as_ours(x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [t.transpose(1, 2) for t in x.values()]


LAYER = SimpleNamespace(layer_idx=1, is_causal=True)
SOLO = RingGroups(ALONE, ALONE, ALONE, None)
SECOND = RingGroups(RankRing(None, 1, 2), RankRing(None, 1, 2), ALONE, None)


def test_the_hook_is_the_public_function():
    x, pattern = call(), VerticalSlash(0.3, 0.5)
    settings = SparseRingConfig(pattern=pattern, seqlen=100)
    options = {"attention_mask": None, "scaling": 0.2, "position_ids": None}
    o, weights = attention(LAYER, **x, **options, sparse_ring=settings)
    assert weights is None
    assert torch.equal(o, sparse_attention(*as_ours(x), pattern=pattern, seqlen=100, scale=0.2))


def test_the_hook_around_a_ring():
    """Heads before tokens in memory, too: what is sent is made contiguous here."""
    x = {name: t.contiguous() for name, t in call().items()}
    settings = SparseRingConfig(SOLO, StripedLayout(1), Dense())
    o, _ = attention(LAYER, **x, attention_mask=None, sparse_ring=settings)
    assert torch.equal(o, sparse_attention(*as_ours(x), pattern=Dense()))


def test_positions_are_those_of_the_layout(monkeypatch):
    """Left out, transformers counts from 0 on every rank: the rotary angles were wrong."""

    def ours(*args, **kwargs):
        raise AssertionError("the call itself")

    monkeypatch.setattr(hook, "sparse_ring_attention", ours)
    x, layout = call(), StripedLayout(2)
    settings = SparseRingConfig(SECOND, layout, Dense(), seqlen=200)
    right = layout.positions(256, 1)[None]
    options = {"attention_mask": None, "sparse_ring": settings}
    for given in (right, right + 9 * (right >= 200), torch.zeros(3, 1, 7), None):
        with pytest.raises(AssertionError, match="the call itself"):
            attention(LAYER, **x, **options, position_ids=given)
    text = "token 0 of rank 1 has a wrong position; need 128, its place in the whole sequence; pass"
    with pytest.raises(ValueError, match=f"^sparse_ring: {text}"):
        attention(LAYER, **x, **options, position_ids=torch.arange(128)[None])


@pytest.mark.parametrize("half", [{"layout": StripedLayout(2)}, {"group": SOLO}])
def test_a_ring_of_which_half_is_missing(half):
    """It once meant this rank alone: each rank attended to its own shard."""
    settings = SparseRingConfig(pattern=Dense(), **half)
    with pytest.raises(ValueError, match=r"(group|layout) is of type NoneType; need"):
        attention(LAYER, **call(), attention_mask=None, sparse_ring=settings)


def test_under_autocast_all_have_its_dtype():
    """Norms give q and k in fp32, and v comes as a product gives it."""
    x = call()
    x["value"] = x["value"].bfloat16()
    settings = SparseRingConfig(pattern=Dense())
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = attention(LAYER, **x, attention_mask=None, sparse_ring=settings)
    rounded = [t.bfloat16() for t in as_ours(x)]
    assert torch.equal(o, sparse_attention(*rounded, pattern=Dense()))


def test_layers_have_patterns_of_their_own():
    x = call(256)
    narrow = FixedVerticalSlash([], [0])
    settings = SparseRingConfig(pattern={1: narrow}, dense_layers=(0,))
    for layer, pattern in ((0, Dense()), (1, narrow)):
        module = SimpleNamespace(layer_idx=layer, is_causal=True)
        o, _ = attention(module, **x, attention_mask=None, sparse_ring=settings)
        assert torch.equal(o, sparse_attention(*as_ours(x), pattern=pattern))
    with pytest.raises(Unsupported, match="no pattern for layer 2"):
        attention(
            SimpleNamespace(layer_idx=2, is_causal=True),
            **x,
            attention_mask=None,
            sparse_ring=settings,
        )


def test_patterns_of_layers_that_the_model_does_not_have_are_refused():
    """They were ignored: with numbers from 1 on, each layer had its neighbour's."""
    model, tokens = tiny(), torch.randint(64, (1, 128))
    hook.prepare(model)
    own = {0: Dense(), 1: Dense()}
    model(tokens, use_cache=False, sparse_ring=SparseRingConfig(pattern=own))
    text = "pattern has 2; need 0 to 1 for a model of 2 layers; count layers from 0"
    settings = SparseRingConfig(pattern={**own, 2: Dense()})
    with pytest.raises(ValueError, match=f"^sparse_ring: {text}"):
        model(tokens, use_cache=False, sparse_ring=settings)


@pytest.mark.parametrize("wrong", [2, -1])
def test_dense_layers_that_the_model_does_not_have_are_refused(wrong):
    """They were ignored: a layer that was meant stayed sparse."""
    text = f"dense_layers has {wrong}; need 0 to 1 for a model of 2 layers; count layers from 0"
    model, tokens = tiny(), torch.randint(64, (1, 128))
    hook.prepare(model)
    settings = SparseRingConfig(pattern=Dense(), dense_layers=(1, wrong))
    with pytest.raises(ValueError, match=f"^sparse_ring: {text}"):
        model(tokens, use_cache=False, sparse_ring=settings)
    hook.check_layers((0, 1), model.config)
    hook.check_layers((wrong,), None)  # a layer that does not say


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sparse_ring": None}, "no settings; need them in every call of the model"),
        ({"attention_mask": torch.ones(1)}, "got an attention mask; need plain causal"),
        ({"cu_seq_lens_q": torch.ones(1)}, "got packed documents (cu_seq_lens_q); need plain"),
        ({"dropout": 0.1}, "got dropout"),
        ({"sliding_window": 64}, "got a sliding window"),
        ({"softcap": 30.0}, "got softcap"),
        (
            {"is_causal": False},
            "got SimpleNamespace with is_causal=False; need plain",
        ),
        ({"s_aux": torch.zeros(4)}, "got attention sinks"),
        ({"position_bias": torch.zeros(1)}, "got position_bias"),
        ({"cache": object()}, "got a cache of keys"),
        ({"key": torch.zeros(1, 2, 130, 8)}, "got a cache of keys"),
    ],
)
def test_what_the_hook_refuses(change, text):
    options = {**call(), "attention_mask": None, "sparse_ring": SparseRingConfig(), **change}
    with pytest.raises(Unsupported) as error:
        attention(LAYER, **options)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of linear_attention"),
        ({"sliding_window": 512}, "sliding_window=512; need None; run such a model without a ring"),
    ],
)
def test_models_are_refused_before_the_first_step(config, text):
    hook.check(SimpleNamespace(layer_types=["full_attention"]))
    with pytest.raises(Unsupported, match=f"^sparse_ring: {text}"):
        hook.check(SimpleNamespace(**config))


def test_registering_names_our_function(monkeypatch):
    known = {}
    library = SimpleNamespace(AttentionInterface=SimpleNamespace(register=known.__setitem__))
    monkeypatch.setitem(sys.modules, "transformers", library)
    hook.register()
    hook.register()
    assert known == {"sparse_ring": attention}


def tiny():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**sizes)).double()


def test_a_model_of_transformers_runs_on_the_hook():
    """Its own attention against ours, with every diagonal: logits and gradients."""
    found = []
    tokens = torch.randint(64, (1, 128))
    for implementation in ("sdpa", "sparse_ring"):
        model = tiny()
        if implementation == "sparse_ring":
            hook.prepare(model)
        extra = {"sparse_ring": SparseRingConfig(pattern=Dense())}
        logits = model(
            tokens, use_cache=False, **(extra if implementation == "sparse_ring" else {})
        ).logits
        logits.square().mean().backward()
        found.append([logits.detach(), *(p.grad for p in model.parameters())])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_calls_of_a_prepared_model_that_would_run_with_wrong_results_are_refused():
    """transformers drops a mask [B, T], and positions that restart and cu_seq_lens_q had no effect:
    the logits were those of one whole sequence.
    """
    model, tokens = tiny(), torch.randint(64, (1, 256))
    hook.prepare(model)
    hook.prepare(model)
    assert len(model.model._forward_pre_hooks) == 1
    settings = SparseRingConfig(pattern=Dense())

    def run(**more):
        return model(tokens, use_cache=False, **{"sparse_ring": settings, **more}).logits

    with pytest.raises(ValueError, match="an attention_mask; need None; leave it out, pad on"):
        run(attention_mask=torch.ones_like(tokens))
    packed = torch.arange(128).repeat(2)[None]
    with pytest.raises(ValueError, match="position_ids restart at token 128; need one sequence in"):
        run(position_ids=packed)
    with pytest.raises(Unsupported, match=r"packed documents \(cu_seq_lens_q\); .* each document$"):
        run(cu_seq_lens_q=torch.tensor([0, 128, 256]))
    padded = SparseRingConfig(pattern=Dense(), seqlen=128)
    first = model(tokens[:, :128], use_cache=False, sparse_ring=settings).logits
    torch.testing.assert_close(run(position_ids=packed, sparse_ring=padded)[:, :128], first)
    with pytest.raises(Unsupported, match="for generation call"):
        model.generate(tokens, max_new_tokens=1)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attention 'sdpa', which ignores it; need 'sparse_ring'"):
        run()
    assert model.generate(tokens, max_new_tokens=2).shape == (1, 258)
    run(attention_mask=torch.ones_like(tokens), sparse_ring=None)  # not a call of ours


def test_a_model_in_a_wrapper_is_refused():
    with pytest.raises(TypeError, match="DataParallel; need a model of transformers; pass the"):
        hook.prepare(torch.nn.DataParallel(tiny()))
