"""Checks that the layers of a Hugging Face model have full causal attention.

Gated-delta-net layers pass too if the caller allows them. The checks are needed because
transformers only logs that it cannot replace a model's attention, and continues with its own.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

Complaint = tuple[str, str]  # a property of the model, and what is needed instead: for `need`

LINEAR = "linear_attention"
# methods of embeddings like RoBERTa's, in all releases of transformers
AFTER_PADDING = ("create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds")


def layer_kinds(model: Any) -> tuple[str, ...]:
    """Returns the kind of each layer of a model, such as "full_attention", from its config.

    `model` is a model of transformers, a layer of one, or a config. The result is empty if the
    config does not list kinds.
    """
    text = text_config(model)
    # models of transformers 4 use the second name
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    return tuple(kinds or ())


def text_config(model: Any) -> Any:
    """Returns the config of a model's text decoder, which models with images nest in their own.

    `model` is a model of transformers, a layer of one, or a config.
    """
    config = getattr(model, "config", model)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def other_layers(model: Any, linear: bool = False) -> Complaint | None:
    """Returns None if all layers of a model have full attention, else two texts for an error.

    The texts are (got, needs): which other layers the model has, and what is needed instead.

    Args:
        model: a model of transformers, or its config.
        linear: True also allows layers with linear attention, such as gated delta nets.
    """
    others = sorted(
        {*layer_kinds(model)} - {"full_attention", "attention"} - ({LINEAR} if linear else set())
    )
    if not others:
        return None
    got = f"layers of {', '.join(others)}"
    if LINEAR in others:
        got += ", as gated delta nets, that carry a state from token to token"
    return got, "layers of full_attention alone"


def anything_else(model: Any, linear: bool = False) -> Complaint | None:
    """Returns None if this package's attention can replace a model's, else two texts for an error.

    The texts are (got, needs): a property of the model, and what is needed instead. Such properties
    are sliding windows, capped scores, dropout, attention to later tokens, positions that do not
    begin at 0, recurrent layers, and an attention that transformers cannot exchange.

    Args:
        model: a model of transformers, or its config.
        linear: True allows layers with linear attention, such as gated delta nets.
    """
    if (complaint := other_layers(model, linear)) is not None:
        return complaint
    text, kinds = text_config(model), layer_kinds(model)
    if not _exchangeable(model, kinds):
        got = f"{type(model).__name__}, whose attention cannot be exchanged"
        return got, "a model that calls transformers' AttentionInterface"
    if not kinds and getattr(text, "sliding_window", None) is not None:
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
        if any(hasattr(layer, name) for name in AFTER_PADDING):
            got = f"{type(layer).__name__}, which counts positions from padding_idx + 1 on"
            return got, "positions that begin at 0"
    return None


def _exchangeable(model: Any, kinds: tuple[str, ...]) -> bool:
    """Returns whether a model calls its attention through transformers' AttentionInterface.

    Only then can another attention be selected. Models with linear layers have a wrong value in the
    attribute that says so, but a method that finds out from their source.
    """
    if LINEAR in kinds and hasattr(model, "_can_set_attn_implementation"):
        return bool(model._can_set_attn_implementation())
    return bool(getattr(model, "_supports_attention_backend", True))


def looks_ahead(module: nn.Module, is_causal: bool | None) -> str | None:
    """Returns None if an attention layer is causal, else a text that says why it may not be.

    Reads the keyword is_causal of the call if it has one, else the layer's attribute of this name,
    as transformers does. A layer without both may not be causal, as some encoders.

    Args:
        module: the attention layer.
        is_causal: the keyword, or None if the call does not have it.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        return f"{type(module).__name__} that does not say is_causal"
    return None if is_causal else f"{type(module).__name__} with is_causal=False"


def _decoder_layers(model: Any) -> Iterator[nn.Module]:
    """Returns the modules of the decoder, without image encoders, which need not be causal."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return decoder.modules() if isinstance(decoder, nn.Module) else iter(())
