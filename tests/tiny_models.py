"""Models of an installed transformers, small and random: with a gated-delta-net layer, or none."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

KINDS = ("Qwen3Next", "Qwen3_5", "OlmoHybrid")
HEAD_SIZES = {"OlmoHybrid": (96, 192)}  # K and V, of others 16 and 8
VOCABULARY = 50
ENCODERS = ("Bert", "ModernBert", "Gemma", "Splinter", "Bart's decoder")  # and cross-attention


def tiny(kind: str, width: int = 32, head_sizes: tuple[int, int] | None = None) -> nn.Module:
    """One layer with the gated delta net, one with attention."""
    transformers = pytest.importorskip("transformers")
    K, V = head_sizes or HEAD_SIZES.get(kind, (16, 8))
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": 48,
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "max_position_embeddings": 256,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": K, "linear_value_head_dim": V,
        "linear_conv_kernel_dim": 4, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "Qwen3Next":
        experts = {"num_experts": 2, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
        experts |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
        return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**sizes, **experts))
    if kind == "OlmoHybrid":  # its betas are in [0, 2], and its key heads as many as value heads
        if not hasattr(transformers, "OlmoHybridForCausalLM"):
            pytest.skip("this transformers has no OLMo Hybrid")
        sizes |= {"linear_num_value_heads": 2}
        del sizes["head_dim"]
        return transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**sizes))
    if not hasattr(transformers, "Qwen3_5ForCausalLM"):
        pytest.skip("this transformers has no Qwen3.5")
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes))


def encoder(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model whose tokens see later ones, or those of another sequence; what it is called with."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 128}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "attention_dropout": 0.0}
    if kind == "Bart's decoder":
        sizes |= {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "dropout": 0.0}
        made = transformers.BartConfig(**sizes, decoder_ffn_dim=48)
        decoder = transformers.models.bart.modeling_bart.BartDecoder(made)
        return decoder, {"encoder_hidden_states": torch.randn(1, 128, 32)}
    if kind == "Gemma":
        heads = {"num_key_value_heads": 1, "head_dim": 16, "use_bidirectional_attention": True}
        return transformers.GemmaModel(transformers.GemmaConfig(**sizes, **heads)), {}
    sizes |= {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    if kind == "ModernBert":
        sizes |= {"cls_token_id": 0, "sep_token_id": 0}
    made = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}Model")(made), {}


def step(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss and every parameter's gradient."""
    model.zero_grad()
    out = model(ids)
    logits = out[0] if isinstance(out, tuple) else out.logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), loss.detach(), grads
