"""Fine-tunes Qwen3.5 with the Trainer of transformers; its linear-attention layers call ours.

    python examples/finetune_qwen3_5.py --model Qwen/Qwen3.5-4B --text corpus.txt --output tuned
    torchrun --nproc-per-node 8 examples/finetune_qwen3_5.py ...    the same on eight GPUs
    python examples/finetune_qwen3_5.py --tiny      a random model and text, on a CPU, in seconds
    python examples/finetune_qwen3_5.py --tiny --compare    once without our kernels: same losses

One line makes the difference: `swap(model)`. The rest is an ordinary Trainer. Weights and optimizer
stay in fp32, and the model runs under bf16 autocast, because our GPU kernels take 16-bit tensors.
Needs accelerate, and a transformers that has Qwen3.5.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qla_kernels.integrations import transformers as qla

# Relative difference of losses with and without our kernels. In bf16 one rounding is 4e-3, and the
# mean over hundreds of tokens less.
AGREE, AGREE_BF16 = 1e-5, 4e-3
TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "max_position_embeddings": 512,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


class Chunks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A text in pieces of equal length; labels are the tokens, which the model shifts."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        count = len(tokens) // length
        if not count:
            raise SystemExit(f"{len(tokens)} tokens; need {length}; pass a smaller --length")
        self.pieces = tokens[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[i], "labels": self.pieces[i]}


def tiny_model() -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY))


def tiny_text() -> Tensor:
    """Words of three tokens, so that there is something to learn."""
    words = torch.randint(1, TINY["vocab_size"], (8, 3), generator=torch.manual_seed(1))
    return words[torch.randint(8, (1400,), generator=torch.manual_seed(2))].flatten()


def pretrained(options: argparse.Namespace) -> tuple[Any, Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(options.model)(options.text.read_text())["input_ids"]
    return model, torch.tensor(ids)


def train(options: argparse.Namespace, ours: bool) -> list[float]:
    """Trains, and returns the loss of each step."""
    from transformers import Trainer, TrainingArguments

    model, tokens = (tiny_model(), tiny_text()) if options.tiny else pretrained(options)
    if ours:
        layers = qla.swap(model)
        print(f"{layers} layers call our functions")
        if not layers:
            raise SystemExit("no layer was swapped: this is no Qwen3.5")
    else:
        qla.restore(model)  # models of a kind share functions
    on_gpu = torch.cuda.is_available()
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    settings = TrainingArguments(
        output_dir=str(options.output), max_steps=options.steps, logging_steps=1,
        per_device_train_batch_size=options.batch, learning_rate=options.rate,
        bf16=on_gpu or options.bf16, save_strategy="no" if options.tiny else "steps",
        save_steps=500, report_to=[], use_cpu=not on_gpu, disable_tqdm=options.tiny, seed=0,
    )  # fmt: skip
    trainer = Trainer(model=model, args=settings, train_dataset=Chunks(tokens, options.length))
    trainer.train()
    if not options.tiny:
        trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="Qwen/Qwen3.5-4B", help="a name or a folder")
    add("--text", type=Path, help="a text file to train on")
    add("--output", type=Path, default=Path("out/finetune"))
    add("--tiny", action="store_true", help="a random model and text")
    add("--compare", action="store_true", help="train twice, first without our kernels")
    add("--length", type=int, default=None, help="tokens of a sequence; 4096, or 64 if tiny")
    add("--batch", type=int, default=4)
    add("--steps", type=int, default=None, help="1000, or 8 if tiny")
    add("--rate", type=float, default=None, help="learning rate; 1e-5, or 3e-3 if tiny")
    add("--bf16", action="store_true", help="autocast on a CPU as well; a GPU always has it")
    add("--checkpointing", action="store_true", help="recompute layers in the backward")
    options = parser.parse_args(arguments)
    if not options.tiny and options.text is None:
        parser.error("no text to train on; need --text FILE or --tiny; pass one of them")
    defaults = (64, 8, 3e-3) if options.tiny else (4096, 1000, 1e-5)
    for name, value in zip(("length", "steps", "rate"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    theirs = train(options, ours=False) if options.compare else []
    losses = train(options, ours=True)
    print(f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
    if not theirs:
        return 0
    worst = max(abs(a - b) / b for a, b in zip(losses, theirs, strict=True))
    print(f"largest relative difference from a run without our kernels: {worst:.1e}")
    rounds = options.bf16 or torch.cuda.is_available()
    return int(worst > (AGREE_BF16 if rounds else AGREE))


if __name__ == "__main__":
    sys.exit(main())
