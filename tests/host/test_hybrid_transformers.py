"""Packed calls of models with gated-delta-net layers, of an installed transformers, on the CPU.

Log-probabilities and gradients are those of every sequence alone.
"""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from qla_kernels import SharedLayout, Unsupported
from qla_kernels.integrations import mixers
from qla_kernels.integrations import transformers as swapping
from qla_kernels.integrations import transformers_dualkv as hook
from tests.tiny_hybrids import (
    DENSE,
    EXPERTS,
    KINDS,
    alone,
    as_checkpoints_load,
    assert_gradients,
    gradients,
    hybrid,
    packed,
    texts,
    together,
)

pytestmark = pytest.mark.libraries

# In fp64, of the largest. Layers' norms stay in fp32: equal for equal tokens, but the gradients of
# their weights are sums over tokens.
LOGPROBS, GRADIENTS = 1e-12, 2e-6
THEIRS = 1e-5  # transformers' own gated delta rule, which runs in fp32


@pytest.fixture(autouse=True)
def functions_as_they_were():
    """Models of a kind share their module's functions."""
    used: list[nn.Module] = []

    def use(model: nn.Module) -> nn.Module:
        used.append(model)
        return model

    yield use
    for model in used:
        swapping.restore(model)


@pytest.fixture
def use(functions_as_they_were):
    return functions_as_they_were


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["kept", "again", "reentrant"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_is_each_sequence_alone(kind, checkpointing, use):
    model, sequences = use(hybrid(kind).double()), texts()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others have no fp64
    theirs = alone(model, sequences).detach()
    swapping.swap(model)
    want = alone(model, sequences)
    weight = torch.randn(len(want), dtype=want.dtype)
    wanted = gradients(model, (want * weight).sum())
    hook.prepare(model)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    got = together(model, packed(sequences))
    assert (got - want).abs().max() < LOGPROBS * want.abs().max()
    assert (got - theirs).abs().max() < THEIRS * want.abs().max()
    loss = (got * weight).sum()
    if checkpointing:  # reentrant: torch.autograd.grad is not possible
        loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    else:
        found = gradients(model, loss)
    assert_gradients(found, wanted, GRADIENTS)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layout_that_recomputation_loses_would_be_noticed(reentrant, use, monkeypatch):
    """Reentrant checkpointing says nothing: then by the comparison above, as gradients differ."""
    model, batch = use(hybrid("Qwen3Next").double()), packed(texts())
    hook.prepare(model)
    wanted = gradients(model, together(model, batch).sum())
    calls: list[Any] = []

    def loses(run: Any, otherwise: Any) -> Any:
        def called(*args: Any, layout: Any, **kwargs: Any) -> Any:
            calls.append(layout)
            if len(calls) > 3:
                return otherwise(*args, **kwargs)
            return run(*args, layout=layout, **kwargs)

        return called

    function = loses(swapping.rule, swapping.chunk_gated_delta_rule)
    monkeypatch.setattr(swapping, "rule", function)
    layer = mixers.gated_delta_net
    monkeypatch.setattr(mixers, "gated_delta_net", loses(layer, layer))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    loss = together(model, batch).sum()
    if not reentrant:
        with pytest.raises(CheckpointError, match="A different number of tensors was saved"):
            loss.backward()
        return
    loss.backward()
    assert len(calls) == 6
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    with pytest.raises(AssertionError):
        assert_gradients(found, wanted, GRADIENTS)


def test_a_compiled_model(use):
    """In one graph, except for a branch of transformers' own until version 5."""
    model, batch = use(hybrid("Qwen3Next")), packed(texts())
    hook.prepare(model)
    want = together(model, batch)
    whole = not hasattr(model.model, "_update_linear_attn_mask")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=whole)
    got = together(compiled, batch)
    assert (got - want).abs().max() < 1e-5
    wanted = gradients(model, want.sum())
    assert_gradients(gradients(model, got.sum()), wanted, 1e-4)


def test_the_class_that_checkpoints_load_as(use):
    model, sequences = use(as_checkpoints_load()), texts()
    want, of_images = alone(model, sequences), model.config.vision_config._attn_implementation
    hook.prepare(model)
    assert model.config.vision_config._attn_implementation == of_images
    assert model.model.visual.config._attn_implementation == of_images
    got = together(model, packed(sequences))
    assert (got - want).abs().max() < THEIRS * want.abs().max()


@pytest.mark.parametrize("kind", DENSE)
def test_three_optimiser_steps(kind, use):
    losses = []
    for pack in (False, True):
        model, sequences = use(hybrid(kind)), texts()
        optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
        if pack:
            hook.prepare(model)
        losses.append([])
        for _ in range(3):
            got = together(model, packed(sequences)) if pack else alone(model, sequences)
            optimiser.zero_grad()
            (-got.mean()).backward()
            optimiser.step()
            losses[-1].append(float(got.detach().mean()))
        swapping.restore(model)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][0] < losses[0][2]


@pytest.mark.parametrize("kind", DENSE)
def test_layers_that_were_not_taken_over_are_refused(kind, use):
    """The selected attention alone once let them run over the ends of nodes without a word."""
    model = use(hybrid(kind))
    hook.register()
    model.set_attn_implementation("shared_prefix")
    batch = packed(texts())
    with pytest.raises(Unsupported, match=r"0 of 3 layers .* call .*transformers\.swap\(model\)"):
        hook.check(model)
    with pytest.raises(Unsupported, match=r"gated delta nets.* call .*transformers\.swap\(model\)"):
        model(**batch.model_inputs())
    swapping.swap(model)
    hook.check(model)
    model(**batch.model_inputs())
    swapping.restore(model)
    with pytest.raises(Unsupported, match=r"transformers\.swap\(model\) before"):
        model(**batch.model_inputs())


@pytest.mark.parametrize("kind", DENSE)
def test_without_a_layout_nothing_changes(kind, use):
    """But rounding: convolution and gated delta rule are ours in all calls."""
    model, sequences = use(hybrid(kind).eval()), texts()
    layer = next(m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet"))
    x = torch.randn(2, layer.conv_dim, 9)
    weight = layer.conv1d.weight.squeeze(1)
    decode = {"max_new_tokens": 4, "do_sample": False}

    def run() -> tuple[Any, ...]:
        home = layer if hasattr(layer, "chunk_gated_delta_rule") else swapping._home(layer)
        own = home.causal_conv1d_fn
        y = own(x, weight, None, activation="silu") if own is not None else None
        return y, model(sequences[0][None]).logits, model.generate(sequences[5][None], **decode)

    convolved, logits, tokens = run()
    hook.prepare(model)
    assert hook.prepare(model) is None  # again
    model.set_attn_implementation("eager")
    convolved_now, logits_now, tokens_now = run()
    if convolved is None:  # the layer does it by itself
        convolved = torch.nn.functional.silu(layer.conv1d(x)[:, :, :9])
    assert (convolved - convolved_now).abs().max() < 1e-6
    # each is within THEIRS of fp64: ours by 4e-6 of the largest, theirs by 7e-6
    assert (logits - logits_now).abs().max() < 2 * THEIRS * logits.abs().max()
    assert torch.equal(tokens, tokens_now)


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_a_prepared_model(kind, again, use):
    model, batch = use(hybrid(kind)), packed(texts())
    hook.prepare(model)
    want = together(model, batch)
    other = use(again(model))
    torch.save(other, io.BytesIO())
    assert torch.equal(together(other, batch), want)
    assert swapping.restore(other)
    if swapping.restore(model):  # its layers hold functions of their own
        with pytest.raises(Unsupported, match="swap"):
            together(model, batch)


@pytest.mark.parametrize("kind", DENSE)
def test_calls_that_are_refused(kind, use):
    model, batch = use(hybrid(kind)), packed(texts())
    hook.prepare(model)
    call = batch.model_inputs()
    with pytest.raises(ValueError, match="a cache of states; need none; pass use_cache=False"):
        model(**{**call, "use_cache": True})
    with pytest.raises(ValueError, match="a batch of 2 rows; need one packed row"):
        model(**{**call, "input_ids": call["input_ids"].expand(2, -1)})
    with pytest.raises(ValueError, match="an attention_mask; need None"):  # layers would use it
        model(**call, attention_mask=torch.ones(1, batch.num_tokens))
    small = SharedLayout.from_lengths([(5, [3, 4])])
    with pytest.raises(ValueError, match=f"{batch.num_tokens} tokens; need the 12 of the layout"):
        model(**{**call, "shared_prefix": small})
    together(model, batch)  # an error leaves nothing behind
    plain = {"input_ids": texts()[0][None], "use_cache": False}
    with pytest.raises(ValueError, match="a call without shared_prefix"):
        model(**plain)


@pytest.mark.parametrize("name", ["seq_idx", "cu_seq_lens_q"])
def test_bounds_of_another_packed_batch_are_refused(name, use):
    model, batch = use(hybrid("Qwen3Next")), packed(texts())
    hook.prepare(model)
    given = torch.zeros(1, batch.num_tokens, dtype=torch.int32)
    if name == "cu_seq_lens_q":
        given = torch.tensor([0, batch.num_tokens], dtype=torch.int32)
    if hasattr(model.model.layers[0].linear_attn, "causal_conv1d_fn"):
        pytest.importorskip("transformers", minversion="5.0")  # until then layers get neither
    with pytest.raises(ValueError, match=f"{name} beside shared_prefix; need one of the two"):
        model(**batch.model_inputs(), **{name: given})


@pytest.mark.parametrize("kind", DENSE)
def test_positions_that_do_not_follow_the_layout(kind, use):
    model, batch = use(hybrid(kind)), packed(texts())
    hook.prepare(model)
    call = batch.model_inputs()
    model(**{**call, "position_ids": call["position_ids"] + 7})
    del call["position_ids"]
    with pytest.raises(ValueError, match=r"position_ids|token \d+ has position .*model_inputs"):
        model(**call)


def test_a_layer_whose_forward_was_exchanged_is_refused(use):
    model = use(hybrid("Qwen3Next"))
    layer = model.model.layers[0].linear_attn
    layer.forward = layer.forward
    with pytest.raises(Unsupported, match="a Qwen3NextGatedDeltaNet whose forward was exchanged"):
        hook.prepare(model)


def test_under_autocast(use):
    """Weights are in fp32 and activations in bf16."""
    model, sequences = use(hybrid("Qwen3.5")), texts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = alone(model, sequences)
        hook.prepare(model)
        got = together(model, packed(sequences))
    assert (got - want).abs().mean() < 0.02


@pytest.mark.parametrize("kind", ["Qwen3Next-MoE", "Qwen3.5-MoE"])
def test_router_loss_counts_every_sequence(kind, use):
    """transformers' own loss of a packed batch counts shared tokens once, which is another one."""
    model, sequences = use(hybrid(kind)), texts()
    batch, top_k = packed(sequences), EXPERTS["num_experts_per_tok"]
    whole = [model(x[None], use_cache=False, output_router_logits=True) for x in sequences]
    by_layer = zip(*(out.router_logits for out in whole), strict=True)
    everything = [torch.cat([x.reshape(-1, x.shape[-1]) for x in one]) for one in by_layer]
    theirs = model.__class__.__module__
    count = __import__(theirs, fromlist=["x"]).load_balancing_loss_func
    want = count(tuple(everything), EXPERTS["num_experts"], top_k).detach()
    hook.prepare(model)
    out = model(**batch.model_inputs(), output_router_logits=True)
    got = hook.router_loss(out.router_logits, batch, top_k)
    assert float(got.detach()) == pytest.approx(float(want), abs=1e-5)
    assert abs(float(out.aux_loss.detach()) - float(want)) > 1e-4
    assert torch.autograd.grad(got, model.model.embed_tokens.weight)[0].abs().max() > 0
    with pytest.raises(ValueError, match="no router_logits; need one tensor a layer; pass output"):
        hook.router_loss((), batch, top_k)
    with pytest.raises(ValueError, match=f"logits of {len(everything[0])} tokens; need"):
        hook.router_loss(everything, batch, top_k)
