"""Checks that the layers of a Hugging Face model mix tokens by full causal attention only.

transformers itself only logs that a model has its own attention, and continues with that.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

Complaint = tuple[str, str]  # a property of the model, and the property that is needed instead


def anything_else(model: Any) -> Complaint | None:
    """Returns a property of a model, or its config, that rules out our attention, or else None.

    Such properties are layers that recur, windows, capped scores, dropout, attention that looks
    ahead, and an attention that cannot be exchanged. Returns (property, needed property).
    """
    config = getattr(model, "config", model)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    # models of transformers 4 use the second name
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
    """Returns why a layer's tokens may see later ones, or another sequence's; None if it is causal.

    As in transformers, the keyword is_causal takes precedence over the layer's attribute: encoders
    and cross-attention set that to False. Some encoders have neither; every causal layer has the
    attribute, because transformers' own FlashAttention requires it.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        return f"{type(module).__name__} that does not say is_causal"
    return None if is_causal else f"{type(module).__name__} with is_causal=False"


def _decoder_layers(model: Any) -> Iterator[nn.Module]:
    """Yields the decoder's modules: image encoders look ahead, and need not run."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return decoder.modules() if isinstance(decoder, nn.Module) else iter(())
