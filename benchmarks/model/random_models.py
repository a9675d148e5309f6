"""Whole models of the sizes of published ones, with random weights in fp32: for trainers."""

from pathlib import Path
from typing import Any

import torch

QWEN35 = {  # Qwen3.5-2B
    "vocab_size": 248320, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 65536, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
QWEN3 = {  # Qwen3-1.7B
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
TINY_LINEAR = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}  # fmt: skip


def random_model(hybrid: bool, tiny: bool = False, config: Path | None = None) -> Any:
    """A Qwen3.5, a Qwen3, or what a folder's config.json describes; the same weights each time."""
    import transformers

    sizes: dict[str, Any] = dict(QWEN35 if hybrid else QWEN3)
    if tiny:
        sizes |= TINY | (TINY_LINEAR if hybrid else {})
    kind = transformers.Qwen3_5TextConfig if hybrid else transformers.Qwen3Config
    given: Any = transformers.AutoConfig.from_pretrained(config) if config else kind(**sizes)
    maker: Any = transformers.AutoModelForCausalLM  # it has no types
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return maker.from_config(given, dtype=torch.float32)
