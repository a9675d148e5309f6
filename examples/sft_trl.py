"""Fine-tunes Qwen3.5 by SFTTrainer of TRL on packed sequences, without padding between them.

    python examples/sft_trl.py --model Qwen/Qwen3.5-4B --data data.jsonl --output tuned
    accelerate launch examples/sft_trl.py ...       the same on several GPUs
    python examples/sft_trl.py --tiny               a random model and texts, on a CPU, in seconds
    python examples/sft_trl.py --tiny --compare     the same losses from rows that are not packed

`--data` has what TRL takes in each line: a `text`, `messages`, or a `prompt` and a `completion`.

One line makes the difference: `swap(model)`. With `packing=True` TRL's collator passes what the
gated delta nets need to keep sequences apart: position_ids, cu_seq_lens_q and seq_idx, and no
attention_mask. So leave `packing_strategy` at "bfd" ("wrapped" makes sequences see each other), and
set no collator of your own. Attention may be sdpa, for which TRL warns without need: a mask that
follows position_ids keeps sequences apart, and takes T x T entries. flash_attention_2 takes bounds.

LoRA and the memory are those of finetune_qwen3_5.py; TRL's loss keeps no logits, so that a pack of
8192 tokens takes 12 GB with Qwen3.5-4B. Needs: pip install trl==1.16.0 peft
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from qwen_setup import WORDS, adapters, estimate, need_libraries, tiny_model, tiny_tokenizer

from qla_kernels.integrations import transformers as qla

AGREE = 1e-5  # fp32: relative difference of losses from packed rows and from others
TINY_LENGTHS = 50, 20, 130, 56  # one pack of 256


def tiny_texts() -> list[str]:
    draw = torch.manual_seed(1)
    picks = [torch.randint(2, len(WORDS), (n - 1,), generator=draw) for n in TINY_LENGTHS]
    return [" ".join(WORDS[i] for i in pick) for pick in picks]  # TRL appends <eos>


def train(options: argparse.Namespace, packs: bool) -> list[float]:
    """Trains, and returns the loss of each step."""
    import trl
    from datasets import Dataset, load_dataset

    if options.tiny:
        model, tokenizer = tiny_model(), tiny_tokenizer()
        data = Dataset.from_dict({"text": tiny_texts()})
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.bfloat16, attn_implementation=options.attention
        )
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        data = load_dataset("json", data_files=str(options.data), split="train")
    if not qla.swap(model):
        raise SystemExit("no layer was swapped: this is no Qwen3.5")
    on_gpu = torch.cuda.is_available()
    settings = trl.SFTConfig(
        packing=packs, max_length=options.length,
        # tiny, not packed: all sequences of the pack, as rows of one batch
        per_device_train_batch_size=1 if packs else len(TINY_LENGTHS),
        output_dir=str(options.output), max_steps=options.steps, learning_rate=options.rate,
        bf16=on_gpu, use_cpu=not on_gpu, save_strategy="no" if options.tiny else "steps",
        logging_steps=1, report_to=[], disable_tqdm=options.tiny, seed=0,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model, args=settings, train_dataset=data, processing_class=tokenizer,
        peft_config=adapters(options.rank),
    )  # fmt: skip
    print(estimate(trainer.model, options.length, logits=False))
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
    add("--data", type=Path, help="a file of JSON lines")
    add("--output", type=Path, default=Path("out/sft"))
    add("--attention", default="sdpa", help="sdpa, or flash_attention_2 where it is installed")
    add("--tiny", action="store_true", help="a random model and texts")
    add("--compare", action="store_true", help="with --tiny: train a second time without packing")
    add("--length", type=int, default=None, help="tokens of a pack; 8192, or 256 if tiny")
    add("--rank", type=int, default=16, help="rank of the adapters")
    add("--steps", type=int, default=None, help="1000, or 4 if tiny")
    add("--rate", type=float, default=None, help="learning rate; 1e-4, or 3e-2 if tiny")
    options = parser.parse_args(arguments)
    if not options.tiny and options.data is None:
        parser.error("no data to train on; need --data FILE or --tiny; pass one of them")
    if options.compare and not options.tiny:
        parser.error("--compare without --tiny; need sequences of one pack; pass --tiny as well")
    need_libraries("trl", "peft")
    defaults = (256, 4, 3e-2) if options.tiny else (8192, 1000, 1e-4)
    for name, value in zip(("length", "steps", "rate"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.tiny and options.length != sum(TINY_LENGTHS):
        parser.error(f"--length {options.length}; need 256 with --tiny; leave it out")
    losses = train(options, packs=True)
    print(f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
    if not options.compare:
        return 0
    alone = train(options, packs=False)
    worst = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
    print(f"largest relative difference from rows that are not packed: {worst:.1e}")
    return int(worst > AGREE)


if __name__ == "__main__":
    sys.exit(main())
