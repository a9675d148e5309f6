"""Whether tokens of a Hugging Face model meet in full causal attention alone, and in ours if asked.

transformers itself only logs that a model has an attention of its own, and goes on with that.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

Complaint = tuple[str, str]  # what it has, and what is needed instead


def anything_else(model: Any) -> Complaint | None:
    """What a model, or its config, says of layers that recur, cap scores, or see other tokens."""
    config = getattr(model, "config", model)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    # by its second name in models of transformers 4
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    others = sorted({*(kinds or ())} - {"full_attention", "attention"})
    if others:
        got = f"layers of {', '.join(others)}"
        if "linear_attention" in others:
            got += ", as gated delta nets, that carry a state from token to token"
        return got, "layers of full_attention alone"
    if not getattr(model, "_supports_attention_backend", True):
        got = f"{type(model).__name__}, whose attention cannot be exchanged"
        return got, "a model that calls transformers' AttentionInterface"
    if kinds is None and getattr(text, "sliding_window", None) is not None:
        return f"sliding_window={text.sliding_window}", "None"
    names = ("attn_logit_softcapping", "attention_dropout", "use_bidirectional_attention")
    for name in (*names, "is_encoder_decoder"):
        if getattr(text, name, None):
            return f"{name}={getattr(text, name)}", "none"
    if not getattr(text, "is_causal", True):
        return "is_causal=False", "causal attention"
    for layer in _decoder_layers(model):
        if getattr(layer, "is_causal", True) is False:
            return f"{type(layer).__name__} with is_causal=False", "causal attention"
    return None


def looks_ahead(module: nn.Module, is_causal: bool | None) -> str | None:
    """What says that a layer's tokens see later ones, or those of another sequence; or None.

    As in transformers the keyword goes before the layer's own attribute: encoders and
    cross-attention set that to False. Some encoders have neither, and all layers that are causal
    have one, as transformers' own FlashAttention wants it.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        return f"{type(module).__name__} that does not say is_causal"
    return None if is_causal else f"{type(module).__name__} with is_causal=False"


def _decoder_layers(model: Any) -> Iterator[nn.Module]:
    """Those that text goes through: what encodes images looks ahead, and need not run."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return decoder.modules() if isinstance(decoder, nn.Module) else iter(())
