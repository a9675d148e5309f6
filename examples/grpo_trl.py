"""Trains a model by GRPO of TRL on sums; the responses to a prompt share its computation.

    python examples/grpo_trl.py --model Qwen/Qwen3-4B --output tuned
    accelerate launch examples/grpo_trl.py ...    the same on several GPUs
    python examples/grpo_trl.py --tiny            a random model, on a CPU, in seconds
    python examples/grpo_trl.py --tiny --plain    TRL's own trainer: the same, up to rounding
    python examples/grpo_trl.py --tiny --hybrid   a random Qwen3.5, with gated delta nets

One line makes the difference: `shared_prefix_trainer(trl.GRPOTrainer)`. The reward checks whether a
response ends with the right result: replace `long_problems` and `reward` (sums.py) by yours.

By default weights are bf16 and LoRA of PEFT trains: 15.5 GB for Qwen3-4B, a prompt of 1250 tokens
and 16 responses of 1024, besides the cache of generation. `--full` trains all weights, in fp32:
75.5 GB. Both are estimates, which the script prints before it starts.

Needs: pip install trl==1.16.0 peft; `--full` needs no peft.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from qwen_setup import adapters, estimate, need_libraries, tiny_model, tiny_tokenizer
from sums import long_problems, problems, reward

from qla_kernels.integrations.trl import shared_prefix_trainer

RESPONSES = 16  # to a prompt


def pretrained(options: argparse.Namespace) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.float32 if options.full else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(options.model)


def train(options: argparse.Namespace) -> list[dict[str, float]]:
    """Trains, and returns what TRL logged of each step; on the first process only."""
    import trl
    from datasets import Dataset

    if options.tiny:
        model, tokenizer, made = tiny_model(options.hybrid), tiny_tokenizer(), problems(8)
    else:
        (model, tokenizer), made = pretrained(options), long_problems(8192)
    on_gpu = torch.cuda.is_available()
    settings = trl.GRPOConfig(
        # whole groups in each batch: a prompt is computed once for its responses
        num_generations=RESPONSES, per_device_train_batch_size=RESPONSES,
        gradient_accumulation_steps=options.accumulate, max_completion_length=options.response,
        output_dir=str(options.output), max_steps=options.steps, learning_rate=options.rate,
        bf16=on_gpu, use_cpu=not on_gpu, gradient_checkpointing=True,
        save_strategy="no" if options.tiny else "steps", logging_steps=1, report_to=[],
        disable_tqdm=options.tiny, seed=0,
    )  # fmt: skip
    kind = trl.GRPOTrainer if options.plain else shared_prefix_trainer(trl.GRPOTrainer)
    torch.manual_seed(0)
    trainer = kind(
        model, reward_funcs=reward, args=settings, processing_class=tokenizer,
        train_dataset=Dataset.from_list(made),
        peft_config=None if options.full else adapters(options.rank),
    )  # fmt: skip
    prompt = len(tokenizer(made[0]["prompt"][0]["content"])["input_ids"])
    copies = RESPONSES if options.plain else 1
    tokens = copies * prompt + RESPONSES * (options.response + 1)
    if trainer.is_world_process_zero():
        print(estimate(trainer.model, tokens, logits=False))
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
    add("--model", default="Qwen/Qwen3-4B", help="a name or a folder; one that can chat")
    add("--output", type=Path, default=Path("out/grpo"))
    add("--tiny", action="store_true", help="a random model and short sums")
    add("--hybrid", action="store_true", help="with --tiny: a model with gated delta nets")
    add("--plain", action="store_true", help="TRL's own trainer, to compare")
    add("--full", action="store_true", help="train all weights, in fp32, in place of LoRA")
    add("--rank", type=int, default=16, help="rank of the adapters")
    add("--response", type=int, default=None, help="most tokens of a response; 1024, or 8 if tiny")
    add("--accumulate", type=int, default=1, help="batches of a step")
    add("--steps", type=int, default=None, help="500, or 4 if tiny")
    add("--rate", type=float, default=None, help="learning rate; 1e-5, full 1e-6, or 1e-2 if tiny")
    options = parser.parse_args(arguments)
    if options.hybrid and not options.tiny:
        parser.error("--hybrid without --tiny; need --tiny; to train a Qwen3.5 pass --model")
    need_libraries(*(("trl",) if options.full else ("trl", "peft")))
    defaults = (8, 4, 1e-2) if options.tiny else (1024, 500, 1e-6 if options.full else 1e-5)
    for name, value in zip(("response", "steps", "rate"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    for step, x in enumerate(train(options), 1):
        numbers = f"loss {x['loss']:9.6f}  gradient {x['grad_norm']:.5f}"
        print(f"step {step}  {numbers}  reward {x['reward']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
