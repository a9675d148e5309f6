"""`packed_head`: log-probabilities where a transformers model returned logits."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qla_kernels import Unsupported, pack_shared_prompts
from qla_kernels.integrations import transformers_dualkv
from qla_kernels.integrations.packed_head import packed_head
from tests import head_ranks
from tests.compare import assert_close
from tests.ranks import forked

transformers = pytest.importorskip("transformers")

VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


def model_of(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    transformers_dualkv.prepare(model)
    return model


def some_batch() -> Any:
    draw = torch.Generator().manual_seed(0)
    ids = lambda n: torch.randint(VOCABULARY, (n,), generator=draw)  # noqa: E731
    return pack_shared_prompts([ids(5), ids(2)], [[ids(4), ids(1)], [ids(3)]])


def assert_are_those_of_logits(model: Any, bare: Any, batch: Any, leaves: list[Tensor]) -> None:
    logits = model(**batch.model_inputs()).logits[0]
    want = batch.gather_logprobs(logits, temperature=0.7, entropy=True)
    with packed_head(bare, batch, temperature=0.7) as values:
        got = values(model(**batch.model_inputs()))
    assert torch.equal(model(**batch.model_inputs()).logits[0], logits)  # again
    for name, a, b in zip(("log-probabilities", "entropies"), got, want, strict=True):
        assert_close(name, a.detach(), b.detach(), 1e-5)
    grads = [torch.autograd.grad(x[0].sum() + x[1].square().sum(), leaves) for x in (got, want)]
    for a, b in zip(*grads, strict=True):
        assert_close("a gradient", a, b, 1e-4)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Qwen3", {"head_dim": 8}),
        ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
        ("Granite", {"logits_scaling": 3.0, "attention_multiplier": 0.3}),  # divides logits
        ("Cohere", {"logit_scale": 0.25}),  # multiplies them, and ties its head
    ],
    ids=str,
)
def test_they_are_those_of_logits(kind, settings):
    model = model_of(kind, **settings)
    weights = [model.get_output_embeddings().weight, model.model.layers[0].mlp.up_proj.weight]
    assert_are_those_of_logits(model, model, some_batch(), weights)


def test_adapters_of_the_head_are_applied():
    """The head's weight alone would leave them out."""
    peft = pytest.importorskip("peft")
    model = model_of("Qwen3", head_dim=8)
    settings = {"r": 3, "target_modules": ["lm_head", "q_proj"], "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    bare, batch = adapted.get_base_model(), some_batch()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert len(trained) == 4
    assert_are_those_of_logits(adapted, bare, batch, trained)


def test_a_head_in_fp32_between_layers_in_16_bits():
    """As TRL's cast_lm_head_to_fp32, which exchanges the head's forward as well."""
    model, batch = model_of("Qwen3", head_dim=8), some_batch()
    head, own = model.lm_head, nn.Linear.forward
    model.bfloat16()
    head.float()
    head.forward = lambda x: own(head, x.float())
    given = head.forward
    want = batch.gather_logprobs(model(**batch.model_inputs()).logits[0])
    with torch.autocast("cpu", torch.bfloat16), packed_head(model, batch, in_fp32=True) as values:
        got, _ = values(model(**batch.model_inputs()))
    assert head.forward is given
    assert_close("log-probabilities", got.detach(), want.detach(), 2e-2)  # autocast of the layers
    assert got.dtype == torch.float32


def test_compiled_models_end_before_the_head():
    model, batch = model_of("Qwen3", head_dim=8), some_batch()
    compiled = torch.compile(model, backend="eager")
    for temperature in (1.0, 0.5):
        logits = model(**batch.model_inputs()).logits[0]
        with packed_head(model, batch, temperature=temperature) as values:
            got, _ = values(compiled(**batch.model_inputs()))
        want = batch.gather_logprobs(logits, temperature=temperature)
        assert_close("log-probabilities", got.detach(), want.detach(), 1e-5)


def test_copies_have_a_head_of_their_own():
    model, batch = model_of("Qwen3", head_dim=8), some_batch()
    with packed_head(model, batch) as values:
        before, _ = values(model(**batch.model_inputs()))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    with packed_head(other, batch) as values:
        found, _ = values(other(**batch.model_inputs()))
    assert_close("log-probabilities", found.exp().detach(), torch.full_like(found, 1 / 40), 1e-5)
    with packed_head(model, batch) as values:
        assert torch.equal(values(model(**batch.model_inputs()))[0], before)


def test_capped_logits_are_refused():
    config = SimpleNamespace(final_logit_softcapping=30.0)
    model = SimpleNamespace(config=config, get_output_embeddings=lambda: nn.Linear(2, 3))
    with (
        pytest.raises(Unsupported, match=r"final_logit_softcapping=30\.0; need none"),
        packed_head(model, some_batch()),
    ):
        pass


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    told, codes = forked("tests.head_ranks", tmp_path_factory.mktemp("ranks"), 2)
    assert codes == [0, 0], told[0].get("no end", told[1].get("no end"))
    return told


@pytest.mark.parametrize("way", head_ranks.WAYS)
def test_gradients_over_two_ranks_of_fsdp2(said, way):
    """The head's weight is gathered for its module, and again for the backward."""
    for rank in said:
        assert len(rank[way]) >= 4
        assert max(rank[way].values()) < 1e-6
