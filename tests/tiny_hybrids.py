"""Tiny random models of an installed transformers with three gated-delta-net layers and attention.

Weights are larger than the library's own at this size: with those a tiny model hardly uses its
states, and a wrong hook passes.
"""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qla_kernels import SharedBatch, pack_prefix_tree

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "max_position_embeddings": 512,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
OLMO = {  # K and V of its checkpoint, which has as many value heads as key heads
    "linear_num_value_heads": 2, "linear_key_head_dim": 96, "linear_value_head_dim": 192,
}  # fmt: skip
KINDS = {  # module, its config and model, sizes
    "Qwen3Next-MoE": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", EXPERTS),
    "Qwen3Next": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", {"num_experts": 0}),
    "Qwen3.5": ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "OlmoHybrid": ("olmo_hybrid", "OlmoHybridConfig", "OlmoHybridForCausalLM", OLMO),
    "Qwen3.5-MoE": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", EXPERTS),
}
DENSE = ("Qwen3Next", "Qwen3.5")
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
VISION |= {"out_hidden_size": 32, "num_position_embeddings": 16}


def parts(module: str) -> tuple[Any, Any]:
    """The modules with a kind's configs and models; skips where transformers has none."""
    transformers = pytest.importorskip("transformers")
    home = f"transformers.models.{module}"
    try:
        return tuple(
            importlib.import_module(f"{home}.{x}_{module}") for x in ("configuration", "modeling")
        )
    except ImportError:
        pytest.skip(f"transformers {transformers.__version__} has no {module}")


def hybrid(kind: str, **changed: Any) -> nn.Module:
    module, config, model, sizes = KINDS[kind]
    configs, models = parts(module)
    torch.manual_seed(3)
    return grown(getattr(models, model)(getattr(configs, config)(**SIZES | sizes | changed)))


def of_two_layers(kind: str) -> nn.Module:
    """A gated delta net and softmax attention: tracing takes half as long as of four layers."""
    return hybrid(kind, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])


def as_checkpoints_load() -> nn.Module:
    """Qwen3.5 with a tower for images, which calls without images do not use."""
    configs, models = parts("qwen3_5")
    torch.manual_seed(5)
    config = configs.Qwen3_5Config(text_config=dict(SIZES), vision_config=VISION)
    return grown(models.Qwen3_5ForConditionalGeneration(config))


def grown(model: nn.Module) -> nn.Module:
    """Gives every parameter a value that matters."""
    for name, p in model.named_parameters():
        if "A_log" in name:
            p.data.uniform_(-3.0, 0.0)
        elif p.ndim == 1:
            p.data += 0.1 * torch.randn_like(p)
        else:
            p.data.normal_(std=0.5 * p.shape[-1] ** -0.5)
    return model.train()


def texts() -> list[Tensor]:
    """Sequences of a forest with nodes of one and two tokens, shorter than a convolution."""
    torch.manual_seed(4)

    def draw(n: int) -> Tensor:
        return torch.randint(VOCABULARY, (n,))

    a, b, c = draw(70), draw(1), draw(2)
    trunk = torch.cat([a, b])
    deep = torch.cat([trunk, c])
    return [
        torch.cat([a, draw(13)]), torch.cat([trunk, draw(1)]), torch.cat([deep, draw(66)]),
        torch.cat([deep, draw(2)]), torch.cat([deep, draw(1)]), draw(9), draw(1), a,
        torch.cat([a, draw(3)]),
    ]  # fmt: skip


def packed(sequences: list[Tensor]) -> SharedBatch:
    return pack_prefix_tree(sequences, loss_mask=[torch.arange(len(x)) > 0 for x in sequences])


def alone(model: nn.Module, sequences: list[Tensor]) -> Tensor:
    """Log-probabilities of all tokens but first ones, each sequence in a call of its own."""
    found = []
    for x in sequences:
        logits = model(x[None], use_cache=False).logits[0, :-1]
        found.append(logits.log_softmax(-1).gather(1, x[1:, None])[:, 0])
    return torch.cat(found)


def together(model: nn.Module, batch: SharedBatch, **more: Any) -> Tensor:
    """The same from one packed call, in the same order."""
    logits = model(**batch.model_inputs(), **more).logits[0]
    return batch.gather_logprobs(logits)[torch.argsort(batch.row * 10_000 + batch.column)]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: x for name, x in zip(names, found, strict=True) if x is not None}


def assert_gradients(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Each within `tolerance` of its parameter's largest."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert (got[name] - x).abs().max() <= tolerance * x.abs().max().clamp(min=1e-4), name
