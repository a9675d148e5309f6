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
import secrets
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
from benchmarks.harness.records import FAILED, OK, Result, Row, Run
from benchmarks.harness.timing import spread
from benchmarks.model.problem import CONVOLUTION, FUNCTIONS, exchanged, functions_of, plain
from qla_kernels.integrations import transformers as qla

SWAPPED = "TRL after swap(model)"
WAYS = {
    "finetune": ("ours", "FLA and causal-conv1d", "FLA", "PyTorch"),
    "grpo": ("shared prompts", "TRL", SWAPPED),
}
NUMBERS = "steps", "length", "batch", "prompt", "response", "responses"
PACKAGES = "torch", "transformers", "trl", "fla-core", "causal-conv1d", "qla-kernels"
SKIPPED = 2  # steps that compile, tune, and fill the allocator's pools
NAMES = {  # in records
    "ours": "ours", "shared prompts": "ours", "FLA and causal-conv1d": "fla_conv", "FLA": "fla",
    "PyTorch": "torch", "TRL": "trl", SWAPPED: "trl_swap",
}  # fmt: skip


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


def timed(found: Steps, train: Callable[[Steps], None]) -> Steps:
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

    ids = torch.randint(1, 90, (64, options.length), generator=torch.manual_seed(1))
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

    return [timed(Steps(name), partial(train, name)) for name in options.ways]


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

    prompt, response = options.prompt, options.response

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

    return [timed(Steps(name), partial(train, name)) for name in options.ways]


def differs(each: Steps, ours: Steps) -> float | None:
    """How far losses, or norms of gradients, are from the first way's at most."""
    pairs = list(zip(each.losses, ours.losses, strict=False))
    return max((abs(a - b) / abs(b) for a, b in pairs), default=None)


def table(found: Sequence[Steps]) -> str:
    ours = found[0]
    lines = [f"{'':24} {'a step, s':>10} {'/ first':>8} {'peak, GB':>9}  differs by"]
    for each in found:
        if each.median is None:
            lines.append(f"{each.name:24} {each.why or 'too few steps'}")
            continue
        ratio = each.median / ours.median if ours.median else float("nan")
        numbers = f"{each.median:10.4f} {ratio:8.2f} {each.peak / 1e9:9.1f}"
        worst = differs(each, ours)
        lines.append(f"{each.name:24} {numbers}  {float('nan') if worst is None else worst:.1e}")
    return "\n".join(lines)


def record(options: argparse.Namespace, found: Sequence[Steps]) -> Run:
    """The steps as benchmarks have records: by the clock, milliseconds."""
    trains, results = options.what == "finetune", []
    for each in found:
        status, timed = OK if each.median else FAILED, each.seconds[SKIPPED:]
        p20, p50, p80 = (1e3 * x for x in spread(timed)) if timed else (None,) * 3
        worst = None if each is found[0] else differs(each, found[0])
        results.append(Result(
            NAMES[each.name], status, each.why, eager_p20_ms=p20, eager_ms=p50, eager_p80_ms=p80,
            eager_samples=len(timed), first_call_s=each.seconds[0] if each.seconds else None,
            peak_bytes=each.peak,
            errors={} if worst is None else {"loss" if trains else "grad_norm": worst},
        ))  # fmt: skip
    hybrid = trains or options.hybrid
    model = options.config or ("Qwen3.5-2B" if hybrid else "Qwen3-1.7B")
    few, many = options.responses, options.prompt
    layout = f"{few}x{many}+{options.response}"
    tokens = many + few * options.response
    if trains:
        layout, tokens = f"{options.length}x{options.batch}", options.length * options.batch
    name = f"trainer-{options.what}-{'tiny' if options.tiny else model}-{layout}"
    heads = "-" if options.tiny or options.config else "16/16" if hybrid else "8/16"
    row = Row(name, "trainer", options.what, heads, layout, tokens, f"{model}'s sizes",
              results=tuple(results))  # fmt: skip
    (commit, dirty), date = records.git_state(), records.now()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    environment = records.device_environment(kind)
    return Run(
        f"trainer-{date:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}", "trainer",
        date.isoformat(timespec="seconds"), records.device_name(kind), kind, environment, {},
        records.package_versions(PACKAGES), {NAMES[x.name]: x.name for x in found}, {}, {}, commit,
        dirty, records.command_line("python scripts/trainer_steps.py"), rows=(row,),
    )  # fmt: skip


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
    add("--out", type=Path, help="a file for the record, JSON; benchmarks.show prints it")
    add("--save", action="store_true", help="append the record to benchmarks/results")
    given = parser.parse_args(arguments)
    if given.tiny:
        given.length, given.prompt, given.response = 64, 24, 8
    known = WAYS[given.what]
    given.ways = given.ways or [x for x in known[:3] if x != SWAPPED or given.hybrid]
    if wrong := [name for name in given.ways if name not in known]:
        parser.error(f"--ways {','.join(wrong)}; need some of: {', '.join(known)}")
    if given.save and (given.tiny or given.config or not torch.cuda.is_available()):
        parser.error("--save of a small model, or of one's own; need a GPU and the sizes above")
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
    run = record(options, found)
    print(f"{run.device}; {', '.join(f'{n} {v}' for n, v in run.versions.items())}")
    print(table(found))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        records.write_whole(options.out, json.dumps(asdict(run)))
    if options.save:
        print(records.append(run))
    return int(found[0].median is None)


if __name__ == "__main__":
    sys.exit(main())
