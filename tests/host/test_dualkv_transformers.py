"""The hook for transformers: what a layer passes, what is refused, models of an installed one."""

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples import dualkv_grpo
from qla_kernels import SharedLayout, Unsupported, pack_shared_prompts
from qla_kernels.integrations import positions, transformers_sparse_ring
from qla_kernels.integrations import transformers_dualkv as integration
from qla_kernels.sparse_ring import Dense
from reference import dualkv
from tests.compare import assert_close
from tests.dualkv_inputs import qkv
from tests.tiny_models import ENCODERS, KINDS, VOCABULARY, encoder, tiny

pytestmark = pytest.mark.libraries

CAUSAL = SimpleNamespace(is_causal=True)  # as an attention layer says it
LAYOUT = SharedLayout.from_lengths([(5, [3, 4])])
POSITIONS = torch.tensor([*range(5), *range(5, 8), *range(5, 9)])


def as_a_layer_passes(**changed: Any) -> dict[str, Any]:
    """Head-major tensors with a batch dimension, and keywords that are for others."""
    query, key, value = (x.transpose(0, 1)[None] for x in qkv(12))
    return {
        "module": CAUSAL, "query": query, "key": key, "value": value, "attention_mask": None,
        "scaling": 0.3, "dropout": 0.0, "sliding_window": None, "shared_prefix": LAYOUT,
        "position_ids": POSITIONS[None], "use_cache": False, **changed,
    }  # fmt: skip


def test_a_layer_gets_what_it_would_get_from_others():
    call = as_a_layer_passes()
    o, weights = integration.attend(**call)
    q, k, v = (call[name][0].transpose(0, 1) for name in ("query", "key", "value"))
    assert_close("o", o[0], dualkv.attention(q, k, v, LAYOUT.tout, 0.3).o, 1e-12)
    assert (o.shape, weights) == ((1, 12, 4, 8), None)


def test_under_autocast_all_have_its_dtype():
    """As torch's own attention does; a layer whose weights are fp32 passes fp32 q and k there."""
    call = as_a_layer_passes()
    call["query"], call["key"] = call["query"].float(), call["key"].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = integration.attend(**{**call, "value": call["value"].bfloat16()})
    assert o.dtype == torch.bfloat16


MALFORMED = {
    "shared_prefix": (None, "a call without shared_prefix; need the layout of the packed batch"),
    "query": (torch.zeros(2, 4, 12, 8), "a batch of 2 rows; need one packed row; pack them"),
    "attention_mask": (torch.ones(1, 1, 12, 12), "an attention_mask; need None; leave it out"),
    "key": (torch.zeros(1, 2, 15, 8), "a cache of keys; need none; pass use_cache=False"),
}
REFUSED = {
    "dropout": (0.1, "dropout=0.1; need plain attention"),
    "sliding_window": (4096, "sliding_window=4096; need plain attention"),
    "softcap": (50.0, "softcap=50.0; need plain attention"),
    "s_aux": (torch.zeros(4), "attention sinks; need plain attention"),
    "position_bias": (torch.zeros(1, 4, 12, 12), "position_bias; need plain attention"),
    "is_causal": (False, "SimpleNamespace with is_causal=False; need causal attention; run such"),
    "module": (SimpleNamespace(is_causal=False), "SimpleNamespace with is_causal=False; need caus"),
}


@pytest.mark.parametrize("name", [*MALFORMED, *REFUSED])
def test_calls_that_are_refused(name):
    value, text = (MALFORMED | REFUSED)[name]
    with pytest.raises(ValueError, match=f"^shared_prefix attention: {text}") as error:
        integration.attend(**as_a_layer_passes(**{name: value}))
    assert (error.type is Unsupported) == (name in REFUSED)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 512}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 512}, "sliding_window=512; need None"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of sliding_attention"),
        (
            {"layer_types": ["linear_attention", "conv"]},
            "layers of conv, linear_attention, as gated delta nets, that carry a state from token",
        ),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True; need none"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True; need none"),
        ({"is_causal": False}, "is_causal=False; need causal attention"),
        ({"layers_block_type": ["attention", "mamba"]}, "layers of mamba; need"),
        ({"layers_block_type": ["attention"]}, None),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0; need none"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1; need none"),
    ],
)
def test_models_are_refused_before_the_first_step(config, text):
    text_config = SimpleNamespace(**config)
    outer = SimpleNamespace(get_text_config=lambda: text_config)
    for given in (text_config, outer, SimpleNamespace(config=outer)):
        if text is None:
            integration.check(given)
            continue
        with pytest.raises(Unsupported, match=text):
            integration.check(given)


def test_a_model_with_an_attention_of_its_own_is_refused():
    """As Bloom's: transformers runs it on packed tokens, as if they were one sequence."""
    model = SimpleNamespace(config=SimpleNamespace(), _supports_attention_backend=False)
    with pytest.raises(Unsupported, match="whose attention cannot be exchanged; need a model that"):
        integration.check(model)
    model._supports_attention_backend = True
    integration.check(model)


def test_without_transformers_the_hook_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Unsupported, match=r"transformers cannot be used .* need 4\.57 or later"):
        integration.register()


def test_the_keyword_goes_before_what_a_layer_says():
    """As in transformers; a layer that says nothing may be one of an encoder."""
    other = SimpleNamespace(is_causal=False)
    want = integration.attend(**as_a_layer_passes())[0]
    call = as_a_layer_passes(module=other, is_causal=True)
    assert integration.attend(**call)[0].shape == want.shape
    with pytest.raises(Unsupported, match="SimpleNamespace that does not say is_causal; need"):
        integration.attend(**as_a_layer_passes(module=SimpleNamespace()))


# Models of an installed transformers.


@pytest.mark.parametrize("hook", [integration, transformers_sparse_ring])
@pytest.mark.parametrize("kind", ENCODERS)
def test_models_that_look_ahead_are_refused(kind, hook):
    """They ran as if they were causal, and nothing said so."""
    model, others = encoder(kind)
    hook.register()
    model.set_attn_implementation(
        "shared_prefix" if hook is integration else transformers_sparse_ring.NAME
    )
    with pytest.raises(Unsupported):
        hook.check(model)
    given = {
        "shared_prefix": SharedLayout.from_lengths([(128, [])]),
        "sparse_ring": transformers_sparse_ring.SparseRingConfig(pattern=Dense()),
    }
    with pytest.raises(Unsupported, match="is_causal"):
        model(torch.arange(128)[None] % VOCABULARY, **others, **given)


@pytest.mark.parametrize("hook", [integration, transformers_sparse_ring])
@pytest.mark.parametrize("kind", ["Roberta", "Camembert", "XLMRoberta", "RobertaPreLayerNorm"])
def test_models_whose_positions_begin_after_padding_are_refused(kind, hook):
    """Packed positions begin at 0, with which they ran on other rows of their table."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, is_decoder=True, pad_token_id=1,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    own = model.config._attn_implementation
    text = r"Embeddings, which counts positions from padding_idx \+ 1 on; need positions that begin"
    with pytest.raises(Unsupported, match=text):
        hook.prepare(model)
    assert model.config._attn_implementation == own


def test_a_decoder_beside_an_encoder_of_images_is_not_refused():
    """What looks ahead there takes no part in a text."""

    class Layer(torch.nn.Module):
        config = SimpleNamespace()

        def __init__(self, is_causal: bool) -> None:
            super().__init__()
            self.is_causal = is_causal

    class Both(torch.nn.Module):
        config = SimpleNamespace()

        def __init__(self) -> None:
            super().__init__()
            self.images, self.language_model = Layer(False), Layer(True)

        def get_decoder(self) -> torch.nn.Module:
            return self.language_model

    integration.check(Both())
    with pytest.raises(Unsupported, match="Layer with is_causal=False; need causal attention"):
        integration.check(Both().images)


@pytest.mark.parametrize("kind", KINDS)
def test_gated_delta_nets_are_refused_by_name(kind):
    """Until they are taken over; a config cannot show that, and a ring has no such layers."""
    model = tiny(kind)
    with pytest.raises(Unsupported, match=r"0 of 1 layers .* call .*transformers\.swap\(model\)"):
        integration.check(model)
    for check in (integration.check, transformers_sparse_ring.check):
        with pytest.raises(Unsupported, match="layers of linear_attention, as gated delta nets"):
            check(model.config)


def test_a_layer_beside_others_that_would_ignore_the_layout_is_refused():
    """Only `check` once looked at them, which a caller may forget."""
    for kinds, text in (
        (["full_attention", "mamba"], "layers of mamba; need layers of full_attention alone"),
        (["linear_attention", "full_attention"], "as gated delta nets, .* call .*swap"),
    ):
        module = SimpleNamespace(is_causal=True, config=SimpleNamespace(layer_types=kinds))
        with pytest.raises(Unsupported, match=text):
            integration.attend(**as_a_layer_passes(module=module))


@pytest.mark.parametrize("given", [POSITIONS + 3, POSITIONS, None, torch.zeros(3, 1, 12)])
def test_positions_that_follow_the_layout(given):
    """From any number on, and those that cannot be compared."""
    call = as_a_layer_passes()
    o = integration.attend(**call)[0]
    assert torch.equal(o, integration.attend(**{**call, "position_ids": given})[0])


def test_positions_that_do_not_follow_the_layout():
    """Left out, they are 0 .. T-1, which rotated keys and queries by wrong angles in silence."""
    with pytest.raises(ValueError, match="token 8 has position 8; need 5, as the layout says"):
        integration.attend(**as_a_layer_passes(position_ids=torch.arange(12)[None]))


def test_positions_of_each_tree_may_begin_anywhere():
    layout = SharedLayout.from_lengths([(2, [1, 0]), (0, [2, 3]), (1, [])], pad_to=11)
    depths = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 0, 0, 1])
    assert torch.equal(positions.depths(layout), depths)
    offset = torch.tensor([4, 4, 4, 9, 9, 5, 5, 5, 0, 1, 1])
    positions.check_positions("op", layout, (depths + offset)[None])
    with pytest.raises(ValueError, match="token 2 has position 0; need 2, as the layout says"):
        positions.check_positions("op", layout, depths * (depths != 2))
    positions.check_positions("op", SharedLayout.from_lengths([]), torch.zeros(1, 0))


@pytest.fixture
def model():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = dualkv_grpo.TransformersQwen3().model
    made.set_attn_implementation("shared_prefix")
    return made


def packed():
    ids = torch.arange(30) % dualkv_grpo.VOCABULARY
    return pack_shared_prompts([ids[:9], ids[20:21]], [[ids[9:13], ids[13:20]], [ids[21:30]]])


def test_recomputation_finds_the_layout(model):
    """Activation checkpointing runs layers again long after the call that brought the layout."""
    batch, grads = packed(), []
    for kept in (False, True):
        model.train().zero_grad()
        if kept:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        logits = model(**batch.model_inputs()).logits[0]
        batch.gather_logprobs(logits).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_model_that_is_called_as_usual_is_stopped(model):
    batch = packed()
    call = batch.model_inputs()
    del call["shared_prefix"]
    with pytest.raises(ValueError, match="a call without shared_prefix"):
        model(**call)
    cache = model(**{**batch.model_inputs(), "use_cache": True}).past_key_values
    with pytest.raises(ValueError, match="a cache of keys"):
        model(batch.input_ids[None], past_key_values=cache, shared_prefix=batch.layout)


@pytest.mark.parametrize("length", [16, 31])
def test_a_part_of_a_packed_row_is_stopped(model, length):
    """Why Ulysses is refused: a rank has a slice, and veRL exchanges heads elsewhere."""
    batch = packed()
    call = {**batch.model_inputs(), "logits_to_keep": 1}
    for name in ("input_ids", "position_ids"):
        call[name] = call[name].repeat(1, 2)[:, :length]
    assert batch.num_tokens not in (16, 31)
    with pytest.raises(ValueError, match=f"{length}"):
        model(**call)


def test_packed_calls_with_a_mask_or_another_attention_are_refused(model):
    """Both would run: transformers drops such a mask, and another attention the layout."""
    own = model.config._attn_implementation
    integration.prepare(model)
    integration.prepare(model)
    assert len(model.model._forward_pre_hooks) == 1
    batch = packed()
    call, mask = batch.model_inputs(), torch.ones(1, batch.num_tokens)
    wanted = model(**call).logits
    for inner in (model, model.model):
        given = call if inner is model else {**call, "logits_to_keep": None}
        given = {name: x for name, x in given.items() if x is not None}
        with pytest.raises(ValueError, match="an attention_mask; need None; leave it out"):
            inner(**given, attention_mask=mask)
        ids = given.pop("input_ids")
        with pytest.raises(ValueError, match="an attention_mask; need None"):
            inner(ids, mask, **given)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"attention 'sdpa', which ignores .*'shared_prefix'\)"):
        model(**call)
    model(batch.input_ids[None, :9], attention_mask=mask[:, :9])  # not packed
    model.set_attn_implementation(own)
    assert torch.equal(model(**call).logits, wanted)


def test_a_copy_of_a_prepared_model_refuses_too(model, tmp_path):
    integration.prepare(model)
    torch.save(model, tmp_path / "model")
    for made in (copy.deepcopy(model), torch.load(tmp_path / "model", weights_only=False)):
        made.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="which ignores it; need 'shared_prefix'"):
            made(**packed().model_inputs())


def test_a_model_in_a_wrapper_is_refused(model):
    with pytest.raises(TypeError, match="DataParallel; need a model of transformers; pass the"):
        integration.prepare(torch.nn.DataParallel(model))
