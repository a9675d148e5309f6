"""Fine-tunes Qwen3.5 with the Trainer of transformers; its linear-attention layers call ours.

    python examples/finetune_qwen3_5.py --model Qwen/Qwen3.5-4B --text corpus.txt --output tuned
    torchrun --nproc-per-node 8 examples/finetune_qwen3_5.py ...    the same on eight GPUs
    python examples/finetune_qwen3_5.py --tiny      a random model and text, on a CPU, in seconds
    python examples/finetune_qwen3_5.py --tiny --full --compare     the same losses without ours

One line makes the difference: `swap(model)`. The rest is an ordinary Trainer. By default weights
are bf16, LoRA of PEFT trains, and layers are recomputed in the backward. `--full` trains all
weights, in fp32. A GPU runs both under bf16 autocast, because our kernels take 16-bit tensors.

Memory of Qwen3.5-4B with 2 sequences of 4096 tokens, in GB, as the script estimates it beforehand:

            total  weights  optimizer  activations  logits
    LoRA     36.2      8.5        0.3          3.0    24.4
    --full   79.6     16.8       33.6          4.8    24.4    too much for 80: --batch 1 has 69.7

Needs peft, accelerate, and a transformers that has Qwen3.5; `--full` needs no peft.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from qwen_setup import WORDS, adapters, estimate, need_libraries, tiny_model
from torch import Tensor

from qla_kernels.integrations import transformers as qla

# Relative difference of losses with and without our kernels. In bf16 one rounding is 4e-3, and the
# mean over hundreds of tokens less.
AGREE, AGREE_BF16 = 1e-5, 4e-3


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


def tiny_text() -> Tensor:
    """Words of three tokens, so that there is something to learn."""
    words = torch.randint(2, len(WORDS), (8, 3), generator=torch.manual_seed(1))
    return words[torch.randint(8, (1400,), generator=torch.manual_seed(2))].flatten()


def pretrained(options: argparse.Namespace) -> tuple[Any, Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.float32 if options.full else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
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
    if not options.full:
        from peft import get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, adapters(options.rank))
    model.config.get_text_config().use_cache = False
    if ours:
        print(estimate(model, options.batch * options.length, logits=True))
    on_gpu = torch.cuda.is_available()
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
    add("--full", action="store_true", help="train all weights, in fp32, in place of LoRA")
    add("--rank", type=int, default=16, help="rank of the adapters")
    add("--compare", action="store_true", help="train twice, first without our kernels")
    add("--length", type=int, default=None, help="tokens of a sequence; 4096, or 64 if tiny")
    add("--batch", type=int, default=2)
    add("--steps", type=int, default=None, help="1000, or 8 if tiny")
    add(
        "--rate",
        type=float,
        default=None,
        help="learning rate; 1e-4, with --full 1e-5; more if tiny",
    )
    add("--bf16", action="store_true", help="autocast on a CPU as well; a GPU always has it")
    options = parser.parse_args(arguments)
    if not options.tiny and options.text is None:
        parser.error("no text to train on; need --text FILE or --tiny; pass one of them")
    if not options.full:
        need_libraries("peft", without=", or pass --full")
    rates = (3e-3, 3e-2) if options.tiny else (1e-5, 1e-4)
    defaults = *((64, 8) if options.tiny else (4096, 1000)), rates[not options.full]
    for name, value in zip(("length", "steps", "rate"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in ("length", "batch", "steps", "rank"):
        if getattr(options, name) < 1:
            parser.error(
                f"--{name} {getattr(options, name)}; need 1 or more; leave it out for the default"
            )
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
