"""Shared prompts beside the plain trainer, step by step on the same rollouts, on several GPUs.

    torchrun --nproc-per-node 2 scripts/trainer_runs.py trl --fsdp          TRL's GRPOTrainer, FSDP2
    torchrun --nproc-per-node 2 scripts/trainer_runs.py trl --lora          LoRA, DDP
    torchrun --nproc-per-node 2 scripts/trainer_runs.py verl --fsdp|--lora  veRL's engine, FSDP2
    python scripts/trainer_runs.py loop --kind shared --seed 0   100 steps of TRL that generate
    python scripts/trainer_runs.py curves FILE...                what four such runs have in common

`trl` and `verl` draw responses of random lengths in place of generating them, the same for both
ways, and compare losses and gradient norms of each step; models are random, `--hybrid` with gated
delta nets. `loop` generates by transformers: a tiny random model has to answer prompts of even
words with even words, and of odd words with odd ones; the reward is the share of words that are
right. `--tiny` runs on a CPU. `--out` appends rows as scripts/policy_update.py does.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("FLA_FLASH_QLA", "0")  # FLA's own kernels, whatever is installed beside it
os.environ.setdefault("FLA_QLA_KERNELS", "0")

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qla_kernels.integrations import transformers as swapping

SMALL = {  # a model of a few layers with the heads of Qwen3-8B, or of Qwen3.5-4B
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
HYBRID = {
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}  # fmt: skip
TINY = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
TINY_LINEAR = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
LOOP = {  # learns the task of `loop` within 100 steps
    "vocab_size": 34, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip
PACKAGES = (
    "torch", "transformers", "trl", "verl", "peft", "accelerate", "fla-core", "qla-kernels",
)  # fmt: skip
GROUP = 8  # responses to a prompt
ON_GPU = torch.cuda.is_available()


def config_of(hybrid: bool, tiny: bool, **changed: Any) -> Any:
    import transformers

    sizes: dict[str, Any] = dict(SMALL) | (HYBRID if hybrid else {})
    if tiny:
        sizes |= TINY | (TINY_LINEAR if hybrid else {})
    kind = transformers.Qwen3_5TextConfig if hybrid else transformers.Qwen3Config
    return kind(**(sizes | changed))


def model_of(config: Any, seed: int = 0) -> Any:
    import transformers

    torch.manual_seed(seed)
    maker: Any = transformers.AutoModelForCausalLM
    return maker.from_config(config, dtype=torch.float32)


def tokenizer_of(vocabulary: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    fast: Any = Tokenizer(models.WordLevel(words, unk_token="w2"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped: Any = PreTrainedTokenizerFast
    return wrapped(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>")


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )


def sizes_of(options: argparse.Namespace) -> tuple[int, int]:
    """The longest prompt and the longest response."""
    return (48, 16) if options.tiny else (1024, 256)


# TRL


def fsdp_of(options: argparse.Namespace) -> dict[str, Any]:
    if not options.fsdp:
        return {}
    if not ON_GPU:  # accelerate has FSDP for accelerators alone; gloo can do it
        home = importlib.import_module("accelerate.state")
        kinds = importlib.import_module("accelerate.utils").DistributedType
        names = {name: kinds[name] for name in kinds.__members__}
        vars(home)["DistributedType"] = SimpleNamespace(**names | {"MULTI_HPU": kinds.MULTI_CPU})
    layer = "Qwen3_5DecoderLayer" if options.hybrid else "Qwen3DecoderLayer"
    config = {"version": 2, "reshard_after_forward": True, "transformer_layer_cls_to_wrap": layer}
    return {"fsdp": True, "fsdp_config": config}


def trl_steps(kind: Any, options: argparse.Namespace) -> list[dict[str, float]]:
    """The log of each step of a trainer on rollouts that are drawn."""
    import pyarrow
    import trl
    from datasets import Dataset

    config = config_of(options.hybrid, options.tiny)
    longest, response = sizes_of(options)
    drawn = torch.Generator().manual_seed(2 + int(os.environ.get("RANK", 0)))

    def draw(n: int) -> list[int]:
        return torch.randint(2, config.vocab_size, (n,), generator=drawn).tolist()

    class Drawn(kind):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            lengths = torch.randint(
                response // 4, response + 1, (len(prompt_ids),), generator=drawn
            )
            return [draw(n) for n in lengths.tolist()], None

    settings = trl.GRPOConfig(
        output_dir="out/runs", max_steps=options.steps, logging_steps=1, learning_rate=1e-5,
        bf16=True, use_cpu=not ON_GPU, save_strategy="no", report_to=[], disable_tqdm=True, seed=0,
        num_generations=GROUP, per_device_train_batch_size=GROUP, gradient_accumulation_steps=2,
        max_completion_length=response, gradient_checkpointing=True, num_iterations=2,
        **fsdp_of(options),
    )  # fmt: skip
    words = torch.Generator().manual_seed(3)
    lengths = torch.randint(longest // 2, longest + 1, (64,), generator=words).tolist()
    prompts = [
        " ".join(f"w{i}" for i in torch.randint(2, config.vocab_size, (n,), generator=words))
        for n in lengths
    ]

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [sum(map(ord, text[:40])) % 7.0 for text in completions]

    trainer = Drawn(
        model_of(config), reward_funcs=reward, args=settings,
        processing_class=tokenizer_of(config.vocab_size),
        train_dataset=Dataset(pyarrow.table({"prompt": prompts}), fingerprint="drawn"),
        peft_config=lora() if options.lora else None,
    )  # fmt: skip
    trainer.train()
    if options.fsdp and "FSDP" not in type(trainer.model_wrapped).__name__:
        raise RuntimeError(f"no FSDP around a {type(trainer.model_wrapped).__name__}")
    swapping.restore(trainer.accelerator.unwrap_model(trainer.model))
    return [x for x in trainer.state.log_history if "grad_norm" in x]


def of_groups() -> None:
    """Plain TRL shuffles whole groups as well, so that its batches have the same rows."""
    from qla_kernels.integrations import trl as ours

    home = importlib.import_module("trl.trainer.grpo_trainer")
    if hasattr(home, ours.SHUFFLE):
        setattr(home, ours.SHUFFLE, ours.of_groups(getattr(home, ours.SHUFFLE)))


def run_trl(options: argparse.Namespace) -> list[dict[str, Any]]:
    import trl

    from qla_kernels.integrations.trl import shared_prefix_trainer

    of_groups()
    began = time.perf_counter()
    plain = trl_steps(trl.GRPOTrainer, options)
    middle = time.perf_counter()
    shared = trl_steps(shared_prefix_trainer(trl.GRPOTrainer), options)
    seconds = middle - began, time.perf_counter() - middle
    return [compared("TRL", options, plain, shared, seconds)]


# veRL


def verl_engine(options: argparse.Namespace, folder: Path) -> Any:
    if not ON_GPU:  # veRL has platforms with accelerators alone; gloo can do it
        platform = type(importlib.import_module("verl.plugin.platform").get_platform())
        platform.device_name = "cpu"
        platform.current_device = lambda self: "cpu"
        vars(torch.cuda)["mem_get_info"] = lambda *_: (1, 1)
        stream = SimpleNamespace(wait_stream=lambda _: None)
        streams = {"Stream": lambda: stream, "current_stream": lambda: stream}
        place = importlib.import_module("verl.utils.activation_offload")
        vars(place)["get_torch_device"] = lambda: SimpleNamespace(stream=nullcontext, **streams)
        handler = vars(place)["SynchronizedGroupOffloadHandler"]
        handler.offload = staticmethod(partial(handler.offload, pin_memory=False))
    # veRL 0.9.1 asks TRL, if it is there, for a class that TRL 1.16 has no more
    patches = importlib.import_module("verl.models.transformers.monkey_patch")
    vars(patches)["is_trl_available"] = lambda: False
    home = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    configs = importlib.import_module("verl.workers.config")
    model = configs.HFModelConfig(
        path=str(folder), load_tokenizer=False, use_remove_padding=False,
        override_config={"attn_implementation": "sdpa"},
        lora_rank=16 if options.lora else 0, lora_alpha=32,
        enable_gradient_checkpointing=True, enable_activation_offload=options.offload,
    )  # fmt: skip
    engine = configs.FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False)
    optimizer = configs.FSDPOptimizerConfig(lr=1e-5, total_training_steps=options.steps)
    checkpoint = importlib.import_module("verl.trainer.config").CheckpointConfig()
    made = home.FSDPEngineWithLMHead(model, engine, optimizer, checkpoint)
    made.initialize()
    return made


def verl_data(options: argparse.Namespace, vocabulary: int, step: int) -> Any:
    """Two groups of each rank, as its trainers pass them to an engine."""
    tools = importlib.import_module("verl.utils.tensordict_utils")
    longest, response = sizes_of(options)
    drawn = torch.Generator().manual_seed(100 * step + dist.get_rank())

    def lengths(least: int, most: int, n: int) -> list[int]:
        return torch.randint(least, most + 1, (n,), generator=drawn).tolist()

    def draw(n: int) -> Tensor:
        return torch.randint(2, vocabulary, (n,), generator=drawn)

    device = "cuda" if ON_GPU else "cpu"
    prompts = [draw(n) for n in lengths(longest // 2, longest, 2) for _ in range(GROUP)]
    prompts = [prompts[i // GROUP * GROUP] for i in range(len(prompts))]
    responses = [draw(n) for n in lengths(response // 4, response, len(prompts))]
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]

    def jagged(rows: list[Tensor]) -> Tensor:
        return torch.nested.nested_tensor(rows, layout=torch.jagged, device=device)

    tensors = {
        "input_ids": jagged(whole), "prompts": jagged(prompts), "responses": jagged(responses),
        "position_ids": jagged([torch.arange(len(x)) for x in whole]),
        "loss_mask": jagged([torch.ones(len(x)) for x in responses]),
        "advantages": torch.randn(len(whole), generator=drawn).to(device),
    }  # fmt: skip
    notes = {
        "max_token_len_per_gpu": 2 * (longest + GROUP * response), "use_dynamic_bsz": True,
        "use_remove_padding": False, "calculate_entropy": True, "temperature": 1.0,
    }  # fmt: skip
    return tools.get_tensordict(tensors, notes)


def grpo_loss(model_output: Any, data: Any, dp_group: Any) -> Any:
    """The policy's loss beside a KL to a policy that has 0.9 of the log-probabilities."""
    total: Any = 0.0
    for values, response, weight in zip(
        model_output["log_probs"].unbind(), data["responses"].unbind(), data["advantages"],
        strict=True,
    ):  # fmt: skip
        logprobs = values[len(values) - len(response) - 1 : -1].float()
        other = 0.9 * logprobs.detach() - logprobs
        kl = other.clamp(max=10).exp() - other - 1
        ratio = (logprobs - logprobs.detach()).exp()
        total = total + (0.05 * kl - weight * ratio).sum()
    loss = total / data["batch_num_tokens"] * data["dp_size"]
    return loss, {"pg_loss": float(loss.detach())}


def verl_steps(options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    torch.manual_seed(0)
    engine = verl_engine(options, folder)
    vocabulary = engine.model_config.hf_config.vocab_size
    logs = []
    for step in range(options.steps):
        with engine.train_mode():
            out = engine.train_batch(verl_data(options, vocabulary, step), grpo_loss)
        losses = torch.tensor(out["metrics"]["pg_loss"], dtype=torch.float64).flatten()
        total = losses.sum().to("cuda" if ON_GPU else "cpu")
        dist.all_reduce(total)
        loss = float(total) / dist.get_world_size()
        logs.append({"loss": loss, "grad_norm": out["metrics"]["grad_norm"]})
    swapping.restore(engine.module)
    return logs


def run_verl(options: argparse.Namespace) -> list[dict[str, Any]]:
    from qla_kernels import integrations

    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model_of(config_of(options.hybrid, options.tiny)).save_pretrained(folder[0])
    dist.barrier()
    began = time.perf_counter()
    plain = verl_steps(options, Path(folder[0]))
    middle = time.perf_counter()
    integrations.verl.patch()
    shared = verl_steps(options, Path(folder[0]))
    seconds = middle - began, time.perf_counter() - middle
    return [compared("veRL's engine", options, plain, shared, seconds)]


def compared(
    trainer: str, options: argparse.Namespace, plain: Sequence[dict[str, float]],
    shared: Sequence[dict[str, float]], seconds: tuple[float, float],
) -> dict[str, Any]:  # fmt: skip
    """A row: how far losses (absolutely) and norms (relatively) of each step are apart."""
    gaps = {
        "loss_differs": [abs(a["loss"] - b["loss"]) for a, b in zip(plain, shared, strict=True)],
        "grad_norm_differs": [
            abs(a["grad_norm"] - b["grad_norm"]) / a["grad_norm"]
            for a, b in zip(plain, shared, strict=True)
        ],
    }
    ways = [name for name in ("fsdp", "lora", "offload") if getattr(options, name)]
    return {
        **row_of(options), "trainer": trainer, "what": "same rollouts", "way": "+".join(ways),
        "model": "Qwen3.5's kind, random" if options.hybrid else "Qwen3's kind, random",
        "lora": options.lora, "generation": False, "steps_run": len(shared),
        "ratio": None, "mfu": None, "seconds_of_both": seconds, **gaps,
        "plain": [[x["loss"], x["grad_norm"]] for x in plain],
        "shared": [[x["loss"], x["grad_norm"]] for x in shared],
    }  # fmt: skip


def row_of(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    world = int(os.environ.get("WORLD_SIZE", 1))
    return {
        "entry": "trainer_step", "date": datetime.now(timezone.utc).isoformat("T", "seconds"),
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu", "gpus": world,
        "versions": found, "command": " ".join(sys.argv),
    }  # fmt: skip


# Generation in the loop


def right(prompt: str, completion: str) -> float:
    """The share of eight words of a completion that have the parity of the prompt's words."""
    parity = int(prompt.split()[-1][1:]) % 2
    words = [word for word in completion.split() if word.startswith("w")][:8]
    return sum(int(word[1:]) % 2 == parity for word in words) / 8


def run_loop(options: argparse.Namespace) -> list[dict[str, Any]]:
    import pyarrow
    import transformers
    import trl
    from datasets import Dataset

    from qla_kernels.integrations.trl import shared_prefix_trainer

    config = config_of(options.hybrid, False, **LOOP | (TINY_LINEAR if options.hybrid else {}))
    if options.hybrid:  # sizes that kernels have
        config.linear_key_head_dim = config.linear_value_head_dim = 64
    shared = options.kind == "shared"
    of_groups()
    kind = shared_prefix_trainer(trl.GRPOTrainer) if shared else trl.GRPOTrainer
    words = torch.Generator().manual_seed(7)
    drawn = 2 * torch.randint(1, config.vocab_size // 2, (256, 12), generator=words)
    drawn += torch.arange(256)[:, None] % 2
    prompts = [" ".join(f"w{i}" for i in row) for row in drawn.tolist()]
    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [right(*pair) for pair in zip(prompts, completions, strict=True)]

    settings = trl.GRPOConfig(
        output_dir="out/loop", max_steps=options.steps, logging_steps=1, learning_rate=2e-3,
        lr_scheduler_type="constant", bf16=True, use_cpu=not ON_GPU, save_strategy="no",
        report_to=[], disable_tqdm=True, seed=options.seed, data_seed=options.seed,
        num_generations=GROUP, per_device_train_batch_size=4 * GROUP,
        max_completion_length=8, generation_kwargs={"min_new_tokens": 8},
    )  # fmt: skip
    model = model_of(config, options.seed)
    torch.manual_seed(1000 + options.seed)
    trainer = kind(
        model, reward_funcs=reward, args=settings, processing_class=tokenizer_of(config.vocab_size),
        train_dataset=Dataset(pyarrow.table({"prompt": prompts}), fingerprint="words"),
        callbacks=[Clock()],
    )  # fmt: skip
    began = time.perf_counter()
    trainer.train()
    log = [x for x in trainer.state.log_history if "grad_norm" in x]
    names = ("reward", "loss", "grad_norm")
    row = {
        **row_of(options), "trainer": "TRL", "what": "generation in the loop", "way": options.kind,
        "model": f"Qwen3{'.5' if options.hybrid else ''}'s kind, random, 2 layers",
        "seed": options.seed, "lora": False, "generation": "transformers",
        "steps_run": len(log), "ratio": None, "mfu": None, "seconds": times[-1] - began,
        "curves": {name: [x[name] for x in log] for name in names},
    }  # fmt: skip
    rewards = row["curves"]["reward"]
    tenth = max(1, len(rewards) // 10)
    first, last = (sum(x) / tenth for x in (rewards[:tenth], rewards[-tenth:]))
    print(f"loop {options.kind} seed {options.seed}: reward {first:.3f} -> {last:.3f}", flush=True)
    return [row]


def curves(files: Sequence[Path]) -> str:
    """Distances of reward curves, means over blocks of ten steps: of ways, and of seeds."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    found = {(x["way"], x["seed"]): x["curves"] for x in rows if "curves" in x}

    def blocks(key: Any) -> Tensor:
        x = torch.tensor(found[key]["reward"])
        return x[: len(x) // 10 * 10].view(-1, 10).mean(1)

    def apart(a: Any, b: Any) -> float:
        return float((blocks(a) - blocks(b)).abs().mean())

    seeds = sorted({seed for _, seed in found})
    lines = [
        f"{way:6} seed {seed}: {' '.join(f'{x:.2f}' for x in blocks((way, seed)).tolist())}"
        for way, seed in sorted(found)
    ]
    ways = [apart(("shared", s), ("plain", s)) for s in seeds]
    of_seeds = [
        apart((way, a), (way, b))
        for way in ("plain", "shared") for a in seeds for b in seeds if a < b
    ]  # fmt: skip
    spread = " and ".join(f"{x:.3f}" for x in of_seeds)
    said = f"shared and plain are {max(ways):.3f} apart at most, seeds of one way {spread}"
    return "\n".join([*lines, said])


def line_of(row: dict[str, Any]) -> str:
    loss, norm = max(row["loss_differs"]), max(row["grad_norm_differs"])
    plain, shared = row["seconds_of_both"]
    ran = f"{row['steps_run']} steps on {row['gpus']} ranks, {plain:.1f} and {shared:.1f} s"
    name = f"{row['trainer']} {row['way']} {row['model']}"
    return f"{name}: {ran}, loss {loss:.1e}, gradient norm {norm:.1e} apart"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=("trl", "verl", "loop", "curves"))
    add("files", nargs="*", type=Path)
    add("--steps", type=int, help="6, or 100 of loop")
    add("--fsdp", action="store_true", help="FSDP2 of all weights (veRL: always FSDP2)")
    add("--lora", action="store_true")
    add("--offload", action="store_true", help="of verl: enable_activation_offload")
    add("--hybrid", action="store_true", help="a Qwen3.5, with gated delta nets")
    add("--kind", choices=("shared", "plain"), default="shared")
    add("--seed", type=int, default=0)
    add("--tiny", action="store_true")
    add("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.what == "curves":
        print(curves(options.files))
        return 0
    options.steps = options.steps or (100 if options.what == "loop" else 6)
    rows = {"trl": run_trl, "verl": run_verl, "loop": run_loop}[options.what](options)
    if int(os.environ.get("RANK", 0)) == 0:
        for row in rows:
            if "loss_differs" in row:
                print(line_of(row), flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
