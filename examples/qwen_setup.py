"""What the examples share: adapters, an estimate of a GPU's memory, tiny models.

Everything tiny is random and made here, so that `--tiny` downloads nothing.
"""

import importlib.util
from typing import Any

import torch

GB = 1e9  # bytes
TARGETS = [  # the projections of Qwen3 and Qwen3.5; embeddings, norms and convolutions stay frozen
    "q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b",
    "out_proj", "gate_proj", "up_proj", "down_proj",
]  # fmt: skip
WORDS = ["<pad>", "<eos>", "+", "=", *map(str, range(20))]  # of the tiny models
TINY: dict[str, Any] = {
    "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def need_libraries(*names: str, without: str = "") -> None:
    """Exits with the command that installs missing libraries; `without` is another way out."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise SystemExit(
            f"{', '.join(missing)}: not installed; need {', '.join(names)}; "
            f"pip install {' '.join(missing)}{without}"
        )


def adapters(rank: int) -> Any:
    """Returns PEFT's configuration of LoRA on all projections."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM",
        lora_dropout=0.0,
    )  # fmt: skip


def estimate(model: Any, tokens: int, logits: bool) -> str:
    """Returns an estimate of a GPU's memory for a step, with checkpointing and AdamW.

    Gradients come when logits have gone, so the larger of the two counts. For Qwen3.5-2B in fp32
    and 8192 tokens this is 50 GB, which an H100 measured as well.

    Args:
        model: with its adapters, if it has any.
        tokens: of one forward.
        logits: whether the loss keeps all logits, three times in fp32. TRL's head keeps none.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    sizes = model.config.get_text_config()
    n, C, width = sizes.num_hidden_layers, sizes.hidden_size, sizes.intermediate_size
    # the inputs of all layers, and what the layer that is recomputed keeps
    per_token = 2 * n * C + 12 * width + 36 * C
    if next(model.parameters()).dtype == torch.float32:
        per_token += 2 * n * C + 20 * C
    heads = 12 * tokens * sizes.vocab_size if logits else 0
    gradients = sum(p.numel() * p.element_size() for p in trained)
    parts = {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "optimizer": sum(2 * p.numel() * p.element_size() for p in trained),
        "activations": tokens * per_token,
        "logits" if heads > gradients else "gradients": max(heads, gradients),
    }
    listed = ", ".join(f"{name} {size / GB:.3g}" for name, size in parts.items())
    return f"estimated GPU memory: {sum(parts.values()) / GB:.3g} GB ({listed})"


def tiny_model(hybrid: bool = True) -> Any:
    """Returns a random Qwen3.5 with a layer of each kind, or a random Qwen3.

    Weights are larger than by default, so that distant tokens matter as in a trained model.
    """
    import transformers

    torch.manual_seed(0)
    model: Any
    if hybrid:
        config = transformers.Qwen3_5TextConfig(**TINY, **HYBRID)
        model = transformers.Qwen3_5ForCausalLM(config)
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY))
    for name, parameter in model.named_parameters():
        if "A_log" in name:
            torch.nn.init.uniform_(parameter, -3.0, 0.0)  # states that last for some tokens
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)
    return model


def tiny_tokenizer() -> Any:
    """Returns a tokenizer of WORDS, with a chat template that joins contents."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.WordLevel({x: i for i, x in enumerate(WORDS)}, unk_token="="))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return tokenizer
