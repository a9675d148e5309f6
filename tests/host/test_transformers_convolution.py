"""Swapped layers of transformers in calls without a layout: their convolution, packs, and FSDP2."""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu

from qla_kernels import Unsupported, chunk_gated_delta_rule
from qla_kernels.integrations import linear_layers, packed_calls
from qla_kernels.integrations import transformers as swapping
from tests.tiny_hybrids import DENSE, KINDS, VOCABULARY, hybrid

pytestmark = pytest.mark.libraries


@pytest.fixture
def use():
    """Models of a kind share their module's functions."""
    used: list[nn.Module] = []
    yield lambda model: (used.append(model), model)[1]
    for model in used:
        swapping.restore(model)


def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    T, width = x.shape[-1], weight.shape[1]
    return silu(conv1d(x, weight[:, None], bias, padding=width - 1, groups=len(weight))[..., :T])


LAYOUTS = {
    "of a projection": lambda x: x.mT.contiguous().mT,
    "of a cache": lambda x: x.contiguous(),
    "rows of a larger batch": lambda x: x.mT.contiguous().repeat_interleave(2, 0)[::2].mT,
    "tokens of longer rows": lambda x: torch.cat([x, x], 2).mT.contiguous()[:, : x.shape[2]].mT,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("biased", [False, True])
def test_rows(layout, biased):
    x, weight = torch.randn(2, 16, 9), torch.randn(16, 4)
    bias = torch.randn(16) if biased else None
    y = linear_layers.of_rows(LAYOUTS[layout](x), weight, bias, "silu")
    assert y.shape == x.shape
    assert y.stride(1) == 1  # as the gated delta rule reads it
    assert (y - by_torch(x, weight, bias)).abs().max() < 1e-5


@pytest.mark.parametrize("named", [False, True])
def test_calls_that_ours_refuses_are_theirs(named, monkeypatch):
    """OLMo's layers pass the weight by name."""
    monkeypatch.setattr(swapping, "of_rows", lambda *args, **kwargs: None)
    run = swapping._in_place_of(
        lambda x, weight, bias=None, activation=None: by_torch(x, weight), swapping.convolution
    )
    x, weight = torch.randn(2, 16, 9), torch.randn(16, 4)
    args, kwargs = ((x,), {"weight": weight}) if named else ((x, weight), {})
    assert torch.equal(run(*args, **kwargs, activation="silu"), by_torch(x, weight))


def test_a_pack_with_bounds():
    x, weight, bounds = torch.randn(1, 16, 9), torch.randn(16, 4), torch.tensor([0, 2, 7, 9])
    keywords = {"cu_seq_lens_q": bounds, "seq_idx": torch.zeros(1, 9), "cu_seq_lens_k": bounds}
    y = linear_layers.of_rows(x, weight, None, "silu", **keywords)
    parts = [by_torch(part, weight) for part in x.split([2, 5, 2], 2)]
    assert (y - torch.cat(parts, 2)).abs().max() < 1e-5


BOUNDS = torch.tensor([0, 4, 9])
LEFT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another activation": ({}, {"activation": "gelu"}),
    "a wide convolution": ({"width": 5}, {}),
    "sequences without bounds": ({}, {"seq_idx": torch.zeros(1, 9)}),
    "bounds of two rows": ({"rows": 2}, {"cu_seq_lens_q": BOUNDS}),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_to_the_layer(what):
    sizes, keywords = LEFT[what]
    x, weight = torch.randn(sizes.get("rows", 1), 16, 9), torch.randn(16, sizes.get("width", 4))
    given = {"activation": "silu", **keywords}
    assert linear_layers.of_rows(x, weight, None, **given) is None


@pytest.mark.parametrize("kind", DENSE)
def test_a_model_with_another_activation(kind, use):
    """Its MLP has it, too."""
    model, ids = use(hybrid(kind, hidden_act="gelu").eval()), torch.randint(VOCABULARY, (2, 20))
    want = model(ids, use_cache=False).logits
    swapping.swap(model)
    assert (model(ids, use_cache=False).logits - want).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_model_is_each_sequence_alone(kind, use):
    """Packed by transformers' collator: its own functions refuse that without causal-conv1d."""
    transformers = pytest.importorskip("transformers")
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    model = use(hybrid(kind).eval())
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    texts = [torch.randint(VOCABULARY, (n,)) for n in (5, 2, 13)]
    batch = packed(texts)
    if importlib.util.find_spec("causal_conv1d") is None and version >= (5, 23):
        with pytest.raises(ValueError, match="packed sequences apart"):
            model(**batch, use_cache=False)
    swapping.swap(model)
    if kind == "OlmoHybrid" and version < (5, 15):  # it has a convolution of its own
        with pytest.raises(Unsupported, match="a packed batch in a gated-delta-net layer"):
            model(**batch, use_cache=False)
        return
    want = torch.cat([model(text[None], use_cache=False).logits[0] for text in texts])
    got = model(**batch, use_cache=False).logits[0]
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def packed(texts: list[Tensor]) -> dict[str, Any]:
    """As transformers' collator does."""
    lengths = [len(text) for text in texts]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    number = torch.arange(len(texts), dtype=torch.int32)
    return {
        "input_ids": torch.cat(texts)[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "seq_idx": number.repeat_interleave(torch.tensor(lengths))[None],
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends,
        "max_length_q": max(lengths), "max_length_k": max(lengths),
    }  # fmt: skip


@pytest.mark.parametrize("kind", DENSE)
def test_a_pack_that_no_convolution_keeps_apart_is_refused(kind, use):
    """It ran sequences into each other: with another activation, or without bounds."""
    texts = [torch.randint(VOCABULARY, (n,)) for n in (5, 2, 13)]
    for model, left_out, got in (
        (hybrid(kind, hidden_act="gelu"), "seq_idx", "activation gelu"),
        (hybrid(kind), "cu_seq_lens_q", "no cu_seq_lens_q beside seq_idx"),
    ):
        swapping.swap(use(model.eval()))
        batch = {name: x for name, x in packed(texts).items() if name != left_out}
        with pytest.raises(Unsupported, match=f"{got}; need one row with its bounds"):
            model(**batch, use_cache=False)
        model(batch["input_ids"], use_cache=False)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kind", [*DENSE, "OlmoHybrid"])
def test_bounds_of_one_sequence_beside_a_cache_are_refused(kind, batch_invariant, use):
    """The convolution took the cache's columns for the sequence's: logits off by 0.5 and more."""
    model, ids = use(hybrid(kind).eval()), torch.randint(1, VOCABULARY, (1, 20))
    if hasattr(sys.modules[type(model).__module__], "OlmoHybridDynamicCache"):
        pytest.skip("OLMo hybrid of this release has a convolution of its own")
    swapping.swap(model, batch_invariant=batch_invariant)
    whole = model(ids, use_cache=False).logits
    refused = pytest.raises(Unsupported, match="cu_seq_lens_q beside a cache; need no cache")
    for grads in (False, True):
        for tokens in (1, 2, 3, 4, 20):
            bounds = torch.tensor([0, tokens], dtype=torch.int32)
            call = {"input_ids": ids[:, :tokens], "cu_seq_lens_q": bounds}
            with torch.set_grad_enabled(grads):
                alone = model(**call, use_cache=False).logits
                assert (alone - whole[:, :tokens]).abs().max() < 1e-4 * whole.abs().max()
                with pytest.raises(
                    Unsupported, match="cu_seq_lens_q beside a cache; need no cache"
                ):
                    model(**call, use_cache=True)
    with torch.no_grad():
        for tokens in (1, 2, 8):
            cache = model(ids[:, : 20 - tokens], use_cache=True).past_key_values
            bounds = torch.tensor([0, tokens], dtype=torch.int32)
            with refused:
                model(ids[:, 20 - tokens :], past_key_values=cache, cu_seq_lens_q=bounds)


def warnings_of(caplog: Any) -> list[str]:
    found = [text for text in caplog.messages if "position_ids that restart" in text]
    caplog.clear()
    return found


@pytest.mark.parametrize("kind", [*DENSE, "OlmoHybrid"])
def test_a_pack_by_positions_alone_is_said_once(kind, use, caplog, monkeypatch):
    """Softmax attention keeps such sequences apart, and linear layers ran them into each other."""
    model = use(hybrid(kind).eval())
    batch = packed([torch.randint(VOCABULARY, (n,)) for n in (5, 2, 13)])
    call = {name: batch[name] for name in ("input_ids", "position_ids")}
    swapping.swap(model)
    swapping.swap(model)
    model(**batch, use_cache=False)
    model(call["input_ids"], use_cache=False)
    assert not warnings_of(caplog)
    model(**call)
    (text,) = warnings_of(caplog)
    assert "its sequences run into each other; need their bounds; pass cu_seq_lens_q, as" in text
    model(**call, use_cache=False)
    model.base_model(call["input_ids"], None, call["position_ids"])
    assert not warnings_of(caplog)
    monkeypatch.setenv("QLA_CHECK", "1")
    for run in (model, model.base_model):
        with pytest.raises(Unsupported, match="position_ids that restart without cu_seq_lens_q"):
            run(**call, use_cache=False)
    with pytest.raises(Unsupported, match="position_ids that restart without cu_seq_lens_q"):
        model.base_model(call["input_ids"], None, call["position_ids"])
    swapping.restore(model)
    model(**call)


def test_positions_that_do_not_restart(use, monkeypatch):
    """Those of padded rows, of decoding and of images."""
    monkeypatch.setenv("QLA_CHECK", "1")
    model, ids = use(hybrid("Qwen3.5").eval()), torch.randint(1, VOCABULARY, (2, 9))
    swapping.swap(model)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = mask[1, 6:] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    model(ids, attention_mask=mask, position_ids=positions, use_cache=False)
    model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert not packed_calls.restarts(torch.arange(9).expand(4, 2, 9), None)
    assert not packed_calls.restarts(torch.zeros(3, 1, 9).index_fill(2, torch.tensor(0), 5), None)
    restart = torch.tensor([[0, 1, 2, 0, 1]])
    assert packed_calls.restarts(restart, None)
    assert packed_calls.restarts(restart.expand(4, 1, 5), torch.ones(1, 1, 5, 5))
    assert packed_calls.restarts(restart, torch.ones(1, 5))
    assert not packed_calls.restarts(restart, torch.tensor([[1, 1, 1, 0, 1]]))


@pytest.mark.parametrize("kind", DENSE)
def test_bounds_that_end_before_or_after_the_row_are_refused(kind, use):
    """Tokens after the last bound got zeros from the gated delta rule."""
    model = use(hybrid(kind).eval())
    swapping.swap(model)
    batch = packed([torch.randint(VOCABULARY, (n,)) for n in (5, 2, 13)])
    model(**batch, use_cache=False)
    given = {k: x for k, x in batch.items() if k != "input_ids"}
    vectors = model.get_input_embeddings()(batch["input_ids"])
    model(inputs_embeds=vectors, **given, use_cache=False)
    for end in (18, 21):
        given["cu_seq_lens_q"] = torch.tensor([0, 5, 7, end], dtype=torch.int32)
        text = f"ends at token {end} in a row of 20 tokens; need bounds that .*; append 20"
        for call in ({"input_ids": batch["input_ids"]}, {"inputs_embeds": vectors}):
            with pytest.raises(ValueError, match=text):
                model(**call, **given, use_cache=False)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "position_ids"])
def test_on_a_gpu_one_call_of_a_form_is_looked_at(name, monkeypatch):
    """Each look waits for the GPU. Meta tensors stand in for its own: reading them raises."""
    forward = packed_calls.PackedCalls(("input_ids",))
    there = torch.zeros(1, 9, dtype=torch.long, device="meta")
    call = {name: there[0] if name == "cu_seq_lens_q" else there}
    with pytest.raises((RuntimeError, NotImplementedError)):
        forward(None, (there,), call)
    for _ in range(2):
        forward(None, (there,), call)
    monkeypatch.setenv("QLA_CHECK", "1")
    with pytest.raises((RuntimeError, NotImplementedError)):
        forward(None, (there,), call)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_sizes_that_a_gpu_refuses_are_refused_by_swap(batch_invariant, use, monkeypatch):
    """They were refused in the first forward, after a model of hours of loading."""
    monkeypatch.setattr(swapping, "_capability", lambda _: (9, 0))
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    for changed, text in (
        ({"linear_value_head_dim": 24}, "V=24"),
        ({"linear_key_head_dim": 256} if batch_invariant else {"linear_key_head_dim": 24}, "K="),
    ):
        model = use(hybrid("Qwen3Next", **(sizes | changed)))
        with pytest.raises(Unsupported, match=f"^swap of a Qwen3NextGatedDeltaNet: .*{text}.*need"):
            swapping.swap(model, batch_invariant=batch_invariant)
        assert not any(swapping.status(model).ours.values())
    model = use(hybrid("Qwen3Next", **sizes))
    assert swapping.swap(model, batch_invariant=batch_invariant) == 3
    monkeypatch.setattr(swapping, "_capability", lambda _: (8, 0))
    with pytest.raises(Unsupported, match=r"^swap of a .* capability 8.0; need 9.0"):
        swapping.swap(model)


def test_data_parallel_is_refused(use):
    """Its threads share what layers keep of a call."""
    model = use(hybrid("Qwen3Next").eval())
    with pytest.raises(Unsupported, match="swap: a DataParallel; need one process for each GPU"):
        swapping.swap(nn.DataParallel(model))
    assert not swapping.status(model).ours
    swapping.swap(model, batch_invariant=True)
    for module in model.modules():
        module._is_replica = True  # as nn.parallel.replicate marks copies
    with pytest.raises(Unsupported, match="a swapped layer in a DataParallel; need one process"):
        model(torch.ones(1, 3, dtype=torch.long), use_cache=False)
    for module in model.modules():
        del module._is_replica


class OldLayer(nn.Module):
    """As in transformers 4.57: holds its functions, and is not told where sequences begin."""

    H, K = 2, 8

    def __init__(self, kernel: Callable[..., Tensor] | None, held: bool) -> None:
        super().__init__()
        width = 3 * self.H * self.K
        self.project = nn.Linear(16, width + 2 * self.H, bias=False)
        self.conv1d = nn.Conv1d(width, width, 4, groups=width, padding=3, bias=False)
        self.out = nn.Linear(self.H * self.K, 16, bias=False)
        if held:
            self.causal_conv1d_fn = kernel
        self.chunk_gated_delta_rule = self.recurrent_gated_delta_rule = chunk_gated_delta_rule

    def forward(self, x: Tensor) -> Tensor:
        mixed, a, b = self.project(x).split([self.conv1d.out_channels, self.H, self.H], -1)
        mixed, weight = mixed.mT, self.conv1d.weight.squeeze(1)
        if (kernel := getattr(self, "causal_conv1d_fn", None)) is not None:
            more = {"bias": None, "activation": "silu", "seq_idx": None}
            mixed = kernel(x=mixed, weight=weight, **more)
        else:
            mixed = by_torch(mixed, weight)
        q, k, v = (y.unflatten(-1, (self.H, self.K)) for y in mixed.mT.chunk(3, -1))
        o, _ = self.chunk_gated_delta_rule(
            q, k, v, g=-a.exp(), beta=b.sigmoid(), initial_state=None,
            output_final_state=False, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return self.out(o.flatten(-2))


class OldDecoderLayer(nn.Module):
    def __init__(self, kernel: Callable[..., Tensor] | None = None, held: bool = True) -> None:
        super().__init__()
        self.linear_attn = OldLayer(kernel, held)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return x + self.linear_attn(x)


def test_a_pack_in_a_layer_that_is_not_told_of_it():
    layer, x = OldDecoderLayer(), torch.randn(1, 20, 16)
    bounds = torch.tensor([0, 5, 7, 20], dtype=torch.int32)
    want = torch.cat([layer(part) for part in x.split([5, 2, 13], 1)], 1)
    assert swapping.swap(layer) == 1
    for more in ({}, {"seq_idx": torch.zeros(1, 20)}):
        assert (layer(x, cu_seq_lens_q=bounds, **more) - want).abs().max() < 1e-5
    assert (layer(x) - want).abs().max() > 1e-3  # nothing is left of the call before
    with pytest.raises(Unsupported, match="a packed batch"):
        layer(x, seq_idx=torch.zeros(1, 20))
    assert swapping.restore(layer) == 1
    assert not layer._forward_pre_hooks
    layer(x, seq_idx=torch.zeros(1, 20))  # theirs


def test_numbers_of_sequences_go_to_a_library_that_follows_them():
    given = []

    def library(x: Tensor, weight: Tensor, **others: Any) -> Tensor:
        given.append(others["seq_idx"])
        return by_torch(x, weight)

    layer, numbers = OldDecoderLayer(library), torch.zeros(1, 20)
    swapping.swap(layer)
    layer(torch.randn(1, 20, 16), seq_idx=numbers)
    assert given == [numbers]


def test_a_layer_with_another_convolution_refuses_packs():
    """It never hears of them, and ran sequences into each other."""
    layer, x = OldDecoderLayer(held=False), torch.randn(1, 20, 16)
    want = layer(x)
    swapping.swap(layer)
    assert (layer(x) - want).abs().max() < 1e-5
    for name, given in (("cu_seq_lens_q", BOUNDS), ("seq_idx", torch.zeros(1, 20))):
        with pytest.raises(Unsupported, match="a packed batch"):
            layer(x, **{name: given})
    assert swapping.restore(layer) == 1
    layer(x, seq_idx=torch.zeros(1, 20))


@pytest.mark.parametrize("first", ["swap", "shard"])
@pytest.mark.parametrize("kind", DENSE)
def test_fsdp2_in_either_order(kind, first, use, tmp_path):
    """On one rank, with parameters in bf16 for the forward: results are those without it."""
    dist = torch.distributed
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    ids = torch.randint(VOCABULARY, (2, 20))

    def step(model: nn.Module) -> dict[str, Tensor]:
        logits = model(ids, use_cache=False).logits
        logits.float().square().mean().backward()
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {"logits": logits.detach()} | {
            n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in named.items()
        }

    plain = use(hybrid(kind))
    swapping.swap(plain)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16())
    want = step(plain.bfloat16())
    model = hybrid(kind)
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if first == "swap":
            assert swapping.swap(model) == 3
        mesh = dist.init_device_mesh("cpu", (1,))
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.model.layers:
            fsdp.fully_shard(layer, mesh=mesh, mp_policy=policy)
        fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
        if first == "shard":
            assert swapping.swap(model) == 3
        assert not swapping.status(model).others
        got = step(use(model))
    finally:
        dist.destroy_process_group()
    for name, x in want.items():
        error = (got[name].float() - x.float()).norm() / x.float().norm()
        assert error < 0.05, name
