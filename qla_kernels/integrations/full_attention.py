"""Whether tokens of a Hugging Face model meet in full attention alone, and in ours if we are asked.

transformers itself only logs that a model has an attention of its own, and goes on with that.
"""

from typing import Any

Complaint = tuple[str, str]  # what it has, and what is needed instead


def anything_else(model: Any) -> Complaint | None:
    """What a model, or its config, says of layers that slide a window, cap scores or recur."""
    if not getattr(model, "_supports_attention_backend", True):
        got = f"{type(model).__name__}, whose attention cannot be exchanged"
        return got, "a model that calls transformers' AttentionInterface"
    config = getattr(model, "config", model)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    # by its second name in models of transformers 4
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    others = sorted({*(kinds or ())} - {"full_attention", "attention"})
    if others:
        return f"layers of {', '.join(others)}", "layers of full_attention alone"
    if kinds is None and getattr(text, "sliding_window", None) is not None:
        return f"sliding_window={text.sliding_window}", "None"
    for name in ("attn_logit_softcapping", "attention_dropout"):
        if getattr(text, name, None):
            return f"{name}={getattr(text, name)}", "none"
    return None
