"""Trains a model by GRPO of TRL; responses to a prompt share its computation.

    python examples/grpo_trl.py --model Qwen/Qwen3-4B --prompts prompts.txt --output tuned
    accelerate launch examples/grpo_trl.py ...    the same on several GPUs
    python examples/grpo_trl.py --tiny            a random model, on a CPU, in seconds
    python examples/grpo_trl.py --tiny --plain    TRL's own trainer: the same, up to rounding
    python examples/grpo_trl.py --tiny --hybrid   a random Qwen3.5, with gated delta nets

One line makes the difference: `shared_prefix_trainer(trl.GRPOTrainer)`. Replace `reward` by yours.
Needs TRL: pip install trl==1.16.0
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qla_kernels.integrations.trl import shared_prefix_trainer

WORDS = [f"w{i}" for i in range(40)]
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip

HYBRID = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def reward(completions: list[str], **_: Any) -> list[float]:
    """Returns the share of each response's words that are not repetitions."""
    words = [text.split() for text in completions]
    return [len(set(x)) / max(len(x), 1) for x in words]


def tiny(hybrid: bool) -> tuple[Any, Any, list[str]]:
    """Returns a random model, its tokenizer and four prompts, made without a download."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate(["<pad>", "<eos>", *WORDS])}
    fast = Tokenizer(models.WordLevel(ids, unk_token="w0"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": len(ids), **TINY}
    if hybrid:
        config = transformers.Qwen3_5TextConfig(**sizes, **HYBRID)
        model = transformers.Qwen3_5ForCausalLM(config)
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    return model, tokenizer, [" ".join(WORDS[i : i + 24]) for i in (0, 5, 10, 15)]


def pretrained(options: argparse.Namespace) -> tuple[Any, Any, list[str]]:
    """Returns a model in fp32, which trains under autocast, its tokenizer and a prompt per line."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    prompts = options.prompts.read_text().splitlines()
    return model, AutoTokenizer.from_pretrained(options.model), prompts


def train(options: argparse.Namespace) -> list[dict[str, float]]:
    """Trains, and returns what TRL logged of each step; on the first process only."""
    import trl
    from datasets import Dataset

    model, tokenizer, prompts = tiny(options.hybrid) if options.tiny else pretrained(options)
    on_gpu = torch.cuda.is_available()
    settings = trl.GRPOConfig(
        # whole groups in each batch: a prompt is computed once for its 16 responses
        num_generations=16, per_device_train_batch_size=16, steps_per_generation=1,
        gradient_accumulation_steps=options.accumulate, max_completion_length=options.response,
        output_dir=str(options.output), max_steps=options.steps, learning_rate=options.rate,
        bf16=on_gpu, use_cpu=not on_gpu, gradient_checkpointing=not options.tiny,
        save_strategy="no" if options.tiny else "steps", logging_steps=1, report_to=[],
        disable_tqdm=options.tiny, seed=0,
    )  # fmt: skip
    kind = trl.GRPOTrainer if options.plain else shared_prefix_trainer(trl.GRPOTrainer)
    trainer = kind(
        model, reward_funcs=reward, args=settings, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )  # fmt: skip
    trainer.train()
    if not options.tiny:
        trainer.save_model()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return logged if trainer.is_world_process_zero() else []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="Qwen/Qwen3-4B", help="a name or a folder")
    add("--prompts", type=Path, help="a text file with a prompt in each line")
    add("--output", type=Path, default=Path("out/grpo"))
    add("--tiny", action="store_true", help="a random model and four prompts")
    add("--hybrid", action="store_true", help="with --tiny: a model with gated delta nets")
    add("--plain", action="store_true", help="TRL's own trainer, to compare")
    add("--response", type=int, default=None, help="most tokens of a response; 1024, or 8 if tiny")
    add("--accumulate", type=int, default=1, help="batches of a step")
    add("--steps", type=int, default=None, help="500, or 4 if tiny")
    add("--rate", type=float, default=None, help="learning rate; 1e-6, or 1e-2 if tiny")
    options = parser.parse_args(arguments)
    if not options.tiny and options.prompts is None:
        parser.error("no prompts; need --prompts FILE or --tiny; pass one of them")
    defaults = (8, 4, 1e-2) if options.tiny else (1024, 500, 1e-6)
    for name, value in zip(("response", "steps", "rate"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    for step, x in enumerate(train(options), 1):
        numbers = f"loss {x['loss']:9.6f}  gradient {x['grad_norm']:.5f}"
        print(f"step {step}  {numbers}  reward {x['reward']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
