"""A tokenizer and models for trainers of an installed TRL."""

from pathlib import Path
from typing import Any

import torch

from qla_kernels.integrations import transformers as swapping
from tests.tiny_hybrids import KINDS, grown, hybrid

WORDS = [f"w{i}" for i in range(40)]


def tokenizer_of() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate(["<pad>", "<eos>", *WORDS])}
    fast = Tokenizer(models.WordLevel(ids, unk_token="w0"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>")


def model_of(kind: str, vocabulary: int, folder: Path) -> Any:
    """From a folder, where TRL finds the weights of its reference policy."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "vocab_size": vocabulary}
    if kind in KINDS:
        model = hybrid(kind, **ids)
    else:
        torch.manual_seed(0)
        config = Qwen3Config(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=128, **ids,
        )  # fmt: skip
        model = grown(Qwen3ForCausalLM(config))
    model.save_pretrained(folder)
    swapping.restore(model)  # functions that models of its kind share
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
