"""Time whole steps of trainers on a GPU, random weights: with our kernels and as they come.

    python scripts/trainer_steps.py finetune        the Trainer of transformers, Qwen3.5-2B's sizes
    python scripts/trainer_steps.py grpo            GRPO of TRL, Qwen3-1.7B's sizes
    python scripts/trainer_steps.py grpo --hybrid   the same of Qwen3.5-2B's sizes
    python scripts/trainer_steps.py grpo --config FOLDER    of a model whose config.json lies there
    python scripts/trainer_steps.py finetune --tiny         does it run? also on a CPU, in a minute

`finetune` needs accelerate; `grpo` needs TRL: pip install trl==1.16.0. FLA and causal-conv1d are
compared with where they are installed (docs/install.md#compare-with-other-libraries).

A step is what the trainer does between two of its callbacks: forward, backward, optimizer. `grpo`
draws responses at random in place of generating them, which the same functions would do on both
sides. Weights and the optimizer are in fp32, the model runs under bf16 autocast, and layers are
recomputed in the backward. Each way begins with the same weights and data; the table has medians of
the steps after the second, and how far losses (of `grpo`: norms of gradients) are from the first's.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import records
from benchmarks.model.problem import CONVOLUTION, FUNCTIONS, exchanged, functions_of, plain
from benchmarks.model.random_models import random_model
from qla_kernels.integrations import transformers as qla

SWAPPED = "TRL after swap(model)"
WAYS = {
    "finetune": ("ours", "FLA and causal-conv1d", "FLA", "PyTorch"),
    "grpo": ("shared prompts", "TRL", SWAPPED),
}
NUMBERS = "steps", "length", "batch", "prompt", "response", "responses"
PACKAGES = "torch", "transformers", "trl", "fla-core", "causal-conv1d", "qla-kernels"
SKIPPED = 2  # steps that compile, tune, and fill the allocator's pools


@dataclass
class Steps:
    """What a way took and found."""

    name: str
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of grpo, norms of gradients
    peak: int = 0
    why: str = ""  # it has no times

    @property
    def median(self) -> float | None:
        timed = self.seconds[SKIPPED:]
        return median(timed) if timed else None


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clock(found: Steps) -> Any:
    """A callback that times steps."""
    import transformers

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            synchronize()
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()
            found.seconds.append(time.perf_counter() - self.begin)

    return Clock()


def run(found: Steps, train: Callable[[Steps], None]) -> Steps:
    """Trains once; a way that fails says why, and the others go on."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        train(found)
    except Exception as error:
        found.why = f"{type(error).__name__}: {error}".splitlines()[0]
    if torch.cuda.is_available():
        found.peak = torch.cuda.max_memory_allocated()
        gc.collect()
        torch.cuda.empty_cache()
    print(f"{found.name}: {[round(x, 4) for x in found.seconds]} s, {found.why}", flush=True)
    return found


def arguments_of(options: argparse.Namespace) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": "out/steps", "max_steps": options.steps, "logging_steps": 1,
        "learning_rate": 1e-6, "bf16": on_gpu, "use_cpu": not on_gpu, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "seed": 0, "gradient_checkpointing": True,
        "optim": "adamw_torch_fused" if on_gpu else "adamw_torch",
    }  # fmt: skip


@contextmanager
def linear_layers(model: Any, name: str) -> Iterator[None]:
    """Layers call ours, or FLA's with causal-conv1d or without, or PyTorch's functions."""
    home = sys.modules[type(model).__module__]
    if name == "ours":
        qla.swap(model)
        try:
            yield
        finally:
            qla.restore(model)
        return
    theirs = functions_of(home)
    needed = {"FLA and causal-conv1d": ("fla", "causal_conv1d"), "FLA": ("fla",), "PyTorch": ()}
    for module in needed[name]:
        __import__(module)
    if name != "FLA and causal-conv1d":
        theirs[CONVOLUTION] = plain(theirs[CONVOLUTION])
    if name == "PyTorch":
        theirs = {function: plain(theirs[function]) for function in FUNCTIONS}
    with exchanged(home, theirs):
        yield


def finetune(options: argparse.Namespace) -> list[Steps]:
    from transformers import Trainer, TrainingArguments

    length = 64 if options.tiny else options.length
    ids = torch.randint(1, 90, (64, length), generator=torch.manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]

    def train(name: str, found: Steps) -> None:
        model = random_model(True, options.tiny, options.config)
        settings = TrainingArguments(
            per_device_train_batch_size=options.batch, **arguments_of(options)
        )
        with linear_layers(model, name):
            trainer = Trainer(
                model=model, args=settings, train_dataset=data, callbacks=[clock(found)]
            )
            trainer.train()
        found.losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]

    return [run(Steps(name), partial(train, name)) for name in options.ways]


def tokenizer_of(vocabulary: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    fast: Any = Tokenizer(models.WordLevel(words, unk_token="w2"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped: Any = PreTrainedTokenizerFast  # it has no types
    return wrapped(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>")


def grpo(options: argparse.Namespace) -> list[Steps]:
    """Responses are drawn at random in place of generation: the same for both."""
    import pyarrow
    import trl
    from datasets import Dataset

    from qla_kernels.integrations.trl import shared_prefix_trainer

    prompt, response = (24, 8) if options.tiny else (options.prompt, options.response)

    def train(name: str, found: Steps) -> None:
        model = random_model(options.hybrid, options.tiny, options.config)
        vocabulary = model.config.vocab_size
        shares = name == "shared prompts"
        base = shared_prefix_trainer(trl.GRPOTrainer) if shares else trl.GRPOTrainer
        if not shares:  # models of a kind share functions, so a way before may have exchanged them
            (qla.swap if name == SWAPPED else qla.restore)(model)
        drawn = torch.Generator().manual_seed(2)

        class Drawn(base):  # type: ignore[misc, valid-type]
            def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
                shape = len(prompt_ids), response
                ids = torch.randint(2, vocabulary, shape, generator=drawn).tolist()
                return ids, None

        settings = trl.GRPOConfig(
            num_generations=options.responses, per_device_train_batch_size=options.responses,
            steps_per_generation=1, max_completion_length=response, **arguments_of(options),
        )  # fmt: skip
        words = torch.randint(2, vocabulary, (8, prompt), generator=torch.manual_seed(3)).tolist()
        prompts = [" ".join(f"w{i}" for i in row) for row in words]

        def reward(completions: list[str], **_: Any) -> list[float]:
            return [sum(map(ord, text[:40])) % 7.0 for text in completions]

        trainer = Drawn(
            model, reward_funcs=reward, args=settings, processing_class=tokenizer_of(vocabulary),
            callbacks=[clock(found)],
            # with a fingerprint, since some releases fail to make one
            train_dataset=Dataset(pyarrow.table({"prompt": prompts}), fingerprint="drawn"),
        )  # fmt: skip
        trainer.train()
        found.losses = [x["grad_norm"] for x in trainer.state.log_history if "grad_norm" in x]

    return [run(Steps(name), partial(train, name)) for name in options.ways]


def table(found: Sequence[Steps]) -> str:
    ours = found[0]
    lines = [f"{'':24} {'a step, s':>10} {'/ first':>8} {'peak, GB':>9}  differs by"]
    for each in found:
        if each.median is None:
            lines.append(f"{each.name:24} {each.why or 'too few steps'}")
            continue
        ratio = each.median / ours.median if ours.median else float("nan")
        pairs = zip(each.losses, ours.losses, strict=True) if ours.losses else ()
        worst = max((abs(a - b) / abs(b) for a, b in pairs), default=float("nan"))
        numbers = f"{each.median:10.4f} {ratio:8.2f} {each.peak / 1e9:9.1f}"
        lines.append(f"{each.name:24} {numbers}  {worst:.1e}")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    return {**dict.fromkeys(PACKAGES, "not installed"), **records.package_versions(PACKAGES)}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=("finetune", "grpo"))
    add("--steps", type=int, default=7)
    add("--length", type=int, default=8192, help="of sequences of finetune (default: 8192)")
    add("--batch", type=int, default=1, help="sequences of finetune (default: 1)")
    add("--prompt", type=int, default=2048, help="tokens of prompts of grpo (default: 2048)")
    add("--response", type=int, default=512, help="tokens of responses (default: 512)")
    add("--responses", type=int, default=16, help="to each prompt (default: 16)")
    add("--hybrid", action="store_true", help="of grpo: a Qwen3.5, with gated delta nets")
    said = "; ".join(f"{what}: {', '.join(ways)}" for what, ways in WAYS.items())
    add("--ways", type=lambda text: text.split(","), help=f"to compare, with commas. {said}")
    add("--config", type=Path, metavar="FOLDER", help="of a model, in place of the sizes above")
    add("--tiny", action="store_true", help="a small model and few tokens")
    add("--out", type=Path, help="a file for the numbers, JSON")
    given = parser.parse_args(arguments)
    known = WAYS[given.what]
    given.ways = given.ways or [x for x in known[:3] if x != SWAPPED or given.hybrid]
    if wrong := [name for name in given.ways if name not in known]:
        parser.error(f"--ways {','.join(wrong)}; need some of: {', '.join(known)}")
    if few := [n for n in NUMBERS if getattr(given, n) < 1]:
        parser.error(f"--{few[0]} {getattr(given, few[0])}; need at least 1")
    if given.what == "grpo" and not find_spec("trl"):
        parser.error("TRL is not installed; need it for grpo: pip install trl==1.16.0")
    if not (torch.cuda.is_available() or given.tiny or given.config):
        parser.error("no GPU; need one for models of these sizes; --tiny runs a small one on a CPU")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    os.environ["FLA_FLASH_QLA"] = "0"  # FLA's own kernels, whatever is installed beside it
    found = {"finetune": finetune, "grpo": grpo}[options.what](options)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}; {', '.join(f'{n} {v}' for n, v in versions().items())}")
    print(table(found))
    if options.out:
        given = {n: str(v) if isinstance(v, Path) else v for n, v in vars(options).items()}
        ways = [asdict(each) for each in found]
        kept = {"device": device, "versions": versions(), "options": given, "ways": ways}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        records.write_whole(options.out, json.dumps(kept, indent=1))
    return int(found[0].median is None)


if __name__ == "__main__":
    sys.exit(main())
