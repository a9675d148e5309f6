"""Time a GRPO policy update of a group on each of several GPUs: FSDP2, random weights, no rollout.

    torchrun --nproc-per-node 2 scripts/policy_update.py --out out/steps.jsonl
    torchrun --nproc-per-node 2 scripts/policy_update.py --tiny    does it run? on a CPU, by gloo
    python scripts/policy_update.py --show [FILE]     the tables of docs/shared-prompts.md, Markdown

An update is forward, backward, clipping and AdamW, of one group on each GPU: weights in fp32, the
model in bf16, layers recomputed in the backward, norms and MLPs by Liger unless --no-liger. Ways:

    ours     the packed group, `transformers_dualkv.prepare`
    flash    whole sequences of equal lengths, 8 to a micro-batch, attention of torch by
             flash-attention; linear layers as transformers runs them with FLA and causal-conv1d
    cudnn    the same by cuDNN's attention
    tree     the packed group with linear layers of `tree-recurrence`, and our attention

All have our head. `mfu` counts useful operations of the packed group, or of whole sequences: three
products of each weight and token, of each visible pair, of the rule's states; no recomputation;
of 989 TFLOP/s a GPU. `tokens_per_s` counts tokens of whole sequences for all ways, on each GPU.
Cases that would begin after `--seconds` are left out; each row is written when it is there.
"""

import argparse
import gc
import importlib
import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("FLA_FLASH_QLA", "0")  # FLA's own kernels, whatever is installed beside it
os.environ.setdefault("FLA_QLA_KERNELS", "0")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qla_kernels import SharedBatch, pack_shared_prompts, shared_prefix_attention
from qla_kernels.integrations import transformers as swapping
from qla_kernels.integrations import transformers_dualkv
from qla_kernels.integrations.packed_head import packed_head

PEAK = 989e12  # bf16 operations a second of a GPU, dense
ROWS = 8  # whole sequences in a micro-batch
LONG = 10.0  # seconds of updates that are enough
PACKAGES = (
    "torch", "transformers", "triton", "fla-core", "causal-conv1d", "tree-recurrence",
    "liger-kernel", "qla-kernels",
)  # fmt: skip
QWEN3 = {  # Qwen3-8B
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
QWEN35 = {  # Qwen3.5-4B
    "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 65536, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip
TINY_LINEAR = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}  # fmt: skip
RECORDS = Path(__file__).resolve().parents[1] / "benchmarks/results/trainer_steps.jsonl"
IDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}


class Case(NamedTuple):
    """What is updated; `ways` in the order in which they run, ours first."""

    model: str  # Qwen3-8B or Qwen3.5-4B
    layers: int
    prompt: int
    response: int
    responses: int
    ways: tuple[str, ...]


CASES = (
    Case("Qwen3-8B", 36, 6144, 2048, 32, ("ours", "flash")),
    Case("Qwen3.5-4B", 32, 6144, 2048, 32, ("ours", "flash", "tree")),
    Case("Qwen3-8B", 8, 4096, 4096, 32, ("ours", "flash", "cudnn")),
    Case("Qwen3.5-4B", 8, 4096, 4096, 32, ("ours", "flash", "tree")),
)


def device() -> torch.device:
    on_gpu = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def model_of(case: Case, tiny: bool, vocabulary: int | None = None) -> Any:
    import transformers

    hybrid = case.model == "Qwen3.5-4B"
    sizes: dict[str, Any] = dict(QWEN35 if hybrid else QWEN3) | IDS
    if tiny:
        sizes |= TINY | (TINY_LINEAR if hybrid else {})
    sizes["num_hidden_layers"] = case.layers
    if vocabulary:
        sizes["vocab_size"] = vocabulary
    kind = transformers.Qwen3_5TextConfig if hybrid else transformers.Qwen3Config
    maker: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device()):
        return maker.from_config(kind(**sizes), dtype=torch.float32)


def with_liger(model: Any) -> Any:
    """Liger's norms and MLPs in the modules of this model alone."""
    kind = model.config.model_type
    name = "qwen3_5" if kind.startswith("qwen3_5") else "qwen3"
    home = sys.modules[type(model).__module__]
    before = dict(vars(home))
    liger = importlib.import_module("liger_kernel.transformers")
    apply = getattr(liger, f"apply_liger_kernel_to_{name}")
    apply(rope=False, fused_linear_cross_entropy=False, rms_norm=True, swiglu=True, model=model)
    vars(home).update(before)  # it replaces classes of the Python module, too
    return model


def sharded(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def bare_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    scaling: float | None = None, shared_prefix: Any = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Our attention without a look at other layers, which are tree-recurrence's here."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return shared_prefix_attention(q, k, v, shared_prefix, scale=scaling)[None], None


def prepared(model: Any, way: str) -> Any:
    if way == "ours":
        transformers_dualkv.prepare(model)
    elif way == "tree":
        import transformers

        tree_recurrence: Any = importlib.import_module("tree_recurrence")
        swapping.restore(model)
        transformers.AttentionInterface.register("bare_shared_prefix", bare_attention)
        model.set_attn_implementation("bare_shared_prefix")
        support = tree_recurrence.install(model)
        if support.mode != "tree":
            raise RuntimeError(f"tree-recurrence has {support.mode}: {support.reason}")
    else:
        swapping.restore(model)
        model.set_attn_implementation("sdpa")
    return model


def forgotten(model: Any, way: str) -> None:
    """What a way changed in modules that models share."""
    if way == "ours":
        swapping.restore(model)
    elif way == "tree":
        importlib.import_module("tree_recurrence").uninstall(model)


def tree_of(case: Case) -> dict[str, Any]:
    """TRL's description of the packed group: segments, and the path to the end of each."""
    P, R, N = case.prompt, case.response, case.responses
    prompt = torch.arange(P)
    paths = [prompt] + [
        torch.cat([prompt, torch.arange(P + i * R, P + (i + 1) * R)]) for i in range(N)
    ]
    q = torch.tensor([0, P] + [P + (i + 1) * R for i in range(N)])
    k = torch.tensor([0, *map(len, paths)]).cumsum(0)
    sizes = {
        "tree_kv_index": torch.cat(paths),
        "tree_cu_seqlens_q": q.int(),
        "tree_cu_seqlens_k": k.int(),
    }
    return {name: x.to(device()) for name, x in sizes.items()}


class Part(NamedTuple):
    """A micro-batch: its batch, how the model is called, and the advantages of its targets."""

    batch: SharedBatch
    call: dict[str, Any]
    advantages: Tensor


def parts_of(case: Case, way: str, vocabulary: int) -> list[Part]:
    drawn = torch.Generator().manual_seed(1 + dist.get_rank())
    ids = torch.randint(
        2, vocabulary, (case.prompt + case.responses * case.response,), generator=drawn
    )
    prompt = ids[: case.prompt]
    responses = ids[case.prompt :].view(case.responses, case.response)
    advantages = torch.randn(case.responses, generator=drawn)
    if way in ("ours", "tree"):
        batch = pack_shared_prompts([prompt], [list(responses)]).to(device())
        call = batch.model_inputs()
        if way == "tree":
            call |= tree_of(case)
        return [Part(batch, call, advantages.to(device())[batch.row])]
    parts = []
    for i in range(0, case.responses, ROWS):
        chosen, weights = responses[i : i + ROWS], advantages[i : i + ROWS]
        batch = pack_shared_prompts([prompt] * len(chosen), [[x] for x in chosen]).to(device())
        rows = torch.cat([prompt.expand(len(chosen), -1), chosen], 1).to(device())
        call = {"input_ids": rows, "use_cache": False}
        parts.append(Part(batch, call, weights.to(device())[batch.row]))
    return parts


@contextmanager
def kernels_of(way: str) -> Iterator[None]:
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    with (
        sdpa_kernel(backends[way])
        if way in backends and torch.cuda.is_available()
        else nullcontext()
    ):
        yield


def loss_of(model: Any, part: Part, targets: int) -> tuple[Tensor, float]:
    """GRPO's loss of new responses, summed over targets, and the mean log-probability."""
    with packed_head(model, part.batch) as values:
        out = model(**part.call)
    logprobs, _ = values(out)
    ratio = (logprobs - logprobs.detach()).exp()
    return -(ratio * part.advantages).sum() / targets, float(logprobs.detach().sum()) / targets


class Found(NamedTuple):
    seconds: list[float]
    first: float
    peak: int
    norm: float  # of the gradient of the first whole update
    logprob: float


def updates(case: Case, way: str, options: argparse.Namespace) -> Found:
    model = model_of(case, options.tiny)
    if options.liger:
        with_liger(model)
    prepared(model, way)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=torch.cuda.is_available())
    parts = parts_of(case, way, model.config.vocab_size)
    targets = case.responses * case.response
    norms, logprobs = [], []

    def update(parts: Sequence[Part], rate: float = 1e-6) -> None:
        logprob = 0.0
        for group in optimizer.param_groups:
            group["lr"] = rate
        for part in parts:
            loss, mean = loss_of(model, part, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            logprob += mean
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        logprobs.append(logprob)

    def clocked(parts: Sequence[Part], rate: float = 1e-6) -> float:
        synchronize()
        begin = time.perf_counter()
        update(parts, rate)
        synchronize()
        return time.perf_counter() - begin

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        with kernels_of(way):
            first = clocked(parts[:1], 0.0)  # compiles and fills pools, and changes no weight
            seconds = [clocked(parts)]
            while len(seconds) < options.steps and agreed(sum(seconds)) < LONG:
                seconds.append(clocked(parts))
    finally:
        forgotten(model, way)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return Found(seconds, first, peak, norms[1], logprobs[1])


def operations(case: Case, way: str, model_config: Any) -> float:
    """Useful operations of an update on one GPU."""
    P, R, N = case.prompt, case.response, case.responses
    c, whole = model_config, way in ("flash", "cudnn")
    tokens = N * (P + R) if whole else P + N * R
    pairs = N * (P + R) * (P + R + 1) / 2
    if not whole:
        pairs = P * (P + 1) / 2 + N * (P * R + R * (R + 1) / 2)
    C, D, H, kv = c.hidden_size, c.head_dim, c.num_attention_heads, c.num_key_value_heads
    kinds = getattr(c, "layer_types", None) or ["full_attention"] * c.num_hidden_layers
    hybrid = "linear_attention" in kinds
    total = 0.0
    for kind in kinds:
        weights = 3 * C * c.intermediate_size
        if kind == "linear_attention":
            keys = c.linear_num_key_heads * c.linear_key_head_dim
            values = c.linear_num_value_heads * c.linear_value_head_dim
            weights += C * (2 * keys + 3 * values + 2 * c.linear_num_value_heads)
            total += 12 * tokens * values * c.linear_key_head_dim  # states: write and read
        else:
            weights += C * D * ((3 if hybrid else 2) * H + 2 * kv)  # a gate beside the queries
            total += 12 * pairs * H * D
        total += 6 * tokens * weights
    operations_of_head: float = 6 * N * R * C * c.vocab_size
    return total + operations_of_head


def region(case: Case, way: str, options: argparse.Namespace) -> float:
    """Seconds of forward and backward of a linear layer's mixer over the whole group."""
    model = prepared(model_of(case._replace(layers=4), options.tiny, vocabulary=64), way)
    parts = parts_of(case, way, 64)
    mixer = model.model.layers[0].linear_attn.to(torch.bfloat16)
    ids = parts[0].call["input_ids"]
    x = torch.randn(*ids.shape, model.config.hidden_size, device=device(), dtype=torch.bfloat16)
    keys = ("shared_prefix", *(name for name in parts[0].call if name.startswith("tree_")))
    extra = {name: parts[0].call[name] for name in keys if name in parts[0].call}
    times = []
    try:
        for _ in range(1 + options.region_steps):
            synchronize()
            begin = time.perf_counter()
            for _ in parts:  # equal ones
                x.requires_grad_()
                mixer(hidden_states=x, cache_params=None, attention_mask=None, **extra).backward(x)
                x = x.detach()
            synchronize()
            times.append(time.perf_counter() - begin)
    finally:
        forgotten(model, way)
    return float(median(times[1:]))


def functions_of(case: Case, way: str) -> dict[str, str]:
    """The modules whose functions linear layers of transformers call."""
    if case.model != "Qwen3.5-4B" or way == "ours":
        return {}
    home = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    found = {}
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        chosen = inspect.getclosurevars(getattr(home, name)).nonlocals.get("implementation")
        found[name] = getattr(chosen, "__module__", "unknown")
    return found


def freed() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def agreed(value: float) -> float:
    """The largest value of all ranks."""
    x = torch.tensor([value], dtype=torch.float64, device=device())
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x)


def attempt(name: str, function: Callable[[], Any]) -> tuple[Any, str]:
    """What a function returns on all ranks, or why it failed."""
    try:
        found, why = function(), ""
    except Exception as error:  # the other ways go on
        found, why = None, f"{type(error).__name__}: {error}".splitlines()[0][:300]
        print(f"rank {dist.get_rank()}, {name}: {why}", flush=True)
        traceback.print_exc()
    freed()
    failed = agreed(float(found is None))
    return (None, why or "another rank failed") if failed else (found, "")


def rows_of(case: Case, options: argparse.Namespace, left: Callable[[], float]) -> list[Any]:
    P, R, N = case.prompt, case.response, case.responses
    config = model_of(case._replace(layers=1), options.tiny, vocabulary=64).config
    config.num_hidden_layers = case.layers
    real = {**QWEN3, **(QWEN35 if case.model == "Qwen3.5-4B" else {})}
    config.vocab_size = TINY["vocab_size"] if options.tiny else real["vocab_size"]
    if hasattr(config, "layer_types"):
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        hybrid = case.model == "Qwen3.5-4B"
        config.layer_types = [
            kinds[i % 4] if hybrid else "full_attention" for i in range(case.layers)
        ]
    rows: list[dict[str, Any]] = []
    ours: Found | None = None
    of_ours = 0.0  # seconds, of the slowest rank
    regions: dict[str, float] = {}
    for way in case.ways:
        if agreed(left()) <= 0:
            continue
        begin = time.perf_counter()
        found, why = attempt(f"{case} {way}", partial(updates, case, way, options))
        if not found and options.liger and not rows:  # once without, for all that follow
            options.liger = False
            found, why = attempt(f"{case} {way}", partial(updates, case, way, options))
        row = {
            "entry": "trainer_step", "date": datetime.now(timezone.utc).isoformat("T", "seconds"),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "trainer": "FSDP2 loop", "what": "policy update",
            "model": case.model, "layers": case.layers, "prompt": P, "response": R,
            "responses": N, "way": way, "gpus": dist.get_world_size(), "lora": False,
            "generation": False, "liger": options.liger, "steps_run": 0, "seconds": None,
            "ratio": None, "mfu": None, "why": why,
            "functions": functions_of(case, way), "versions": versions(),
            "command": options.command,
        }  # fmt: skip
        if found:
            seconds = agreed(median(found.seconds))
            if way == "ours":
                ours, of_ours = found, seconds
            row |= {
                "steps_run": len(found.seconds), "seconds": seconds, "first_seconds": found.first,
                "all_seconds": found.seconds, "peak_gb": found.peak / 1e9,
                "tokens_per_s": N * (P + R) / seconds,
                "mfu": operations(case, way, config) / seconds / PEAK,
                "grad_norm": found.norm, "logprob": found.logprob,
            }  # fmt: skip
            if ours and way != "ours":
                row["ratio"] = seconds / of_ours
                row["logprob_differs"] = abs(found.logprob - ours.logprob) / abs(ours.logprob)
                if ours.norm:
                    row["grad_norm_differs"] = abs(found.norm - ours.norm) / ours.norm
        if case.model == "Qwen3.5-4B" and agreed(left()) > 0:
            time_of_region, _ = attempt(f"region {way}", partial(region, case, way, options))
            if time_of_region:
                regions[way] = row["region_seconds"] = agreed(time_of_region)
                if way != "ours" and "ours" in regions:
                    row["region_ratio"] = regions[way] / regions["ours"]
        row["wall_s"] = time.perf_counter() - begin
        rows.append(row)
        if dist.get_rank() == 0:
            print(line_of(row), flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return rows


def line_of(row: dict[str, Any]) -> str:
    name = f"{row['model']} {row['layers']}L {row['prompt']}+{row['responses']}x{row['response']}"
    if row["seconds"] is None:
        return f"{name:32} {row['way']:6} {row['why']}"
    ratio = f"{row['ratio']:.2f}" if row["ratio"] else "-"
    gap = max(row.get("logprob_differs", 0), row.get("grad_norm_differs", 0))
    part = f"{1e3 * row['region_seconds']:.2f}" if "region_seconds" in row else "-"
    return (
        f"{name:32} {row['way']:6} {row['seconds']:8.3f} s  ratio {ratio:>5}  mfu {row['mfu']:.3f}"
        f"  {row['tokens_per_s']:9.0f} tokens/s  {row['peak_gb']:6.1f} GB  differs {gap:.1e}"
        f"  region {part} ms {row.get('region_ratio', 0):.2f}  ({row['wall_s']:.0f} s)"
    )


RIVALS = {
    "flash": "whole sequences, flash-attention", "cudnn": "whole sequences, cuDNN's attention",
    "tree": "`tree-recurrence` and our attention",
}  # fmt: skip


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of the newest rows of each kind: updates, and steps beside the plain trainer."""
    timed, same, loops = {}, {}, {}
    for row in rows:
        if row.get("entry") != "trainer_step":
            continue
        if row["what"] == "policy update" and row["seconds"]:
            names = ("device", "gpus", "model", "layers", "responses", "prompt", "response", "way")
            timed[tuple(row[name] for name in names)] = row
        elif row["what"] == "same rollouts":
            same[tuple(row[x] for x in ("device", "gpus", "trainer", "way", "model"))] = row
        elif row["what"] == "generation in the loop":
            loops[tuple(row[x] for x in ("device", "model", "way", "seed"))] = row
    lines = [
        "| model | layers | N x (P + R) | beside | ours, s | theirs, s | ratio | MFU | peak, GB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, row in timed.items():
        ours = timed.get((*key[:-1], "ours"))
        if row["way"] == "ours" or not ours:
            continue
        region = f"; linear layers {x:.2f}" if (x := row.get("region_ratio")) else ""
        lines.append(
            f"| {row['model']} | {row['layers']} | {row['responses']} x ({row['prompt']} + "
            f"{row['response']}) | {RIVALS[row['way']]} | {ours['seconds']:.2f} | "
            f"{row['seconds']:.2f} | {row['seconds'] / ours['seconds']:.2f}{region} | "
            f"{ours['mfu']:.0%} / {row['mfu']:.0%} | {ours['peak_gb']:.0f} / {row['peak_gb']:.0f} |"
        )
    lines += ["", "| trainer | way | model | GPUs | steps | losses apart | norms apart |"]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row['trainer']} | {row['way']} | {row['model']} | {row['gpus']} | {row['steps_run']} "
        f"| {max(row['loss_differs']):.0e} | {max(row['grad_norm_differs']):.0e} |"
        for row in same.values()
    ]
    lines += [
        "",
        "| generation by transformers | seed | steps | reward, first and last tenth | s |",
    ]
    lines += ["|---|---|---|---|---|"]
    for row in loops.values():
        rewards = row["curves"]["reward"]
        n = max(1, len(rewards) // 10)
        ends = f"{sum(rewards[:n]) / n:.3f}, {sum(rewards[-n:]) / n:.3f}"
        lines.append(
            f"| {row['way']} | {row['seed']} | {row['steps_run']} | {ends} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=2, help="timed updates of each way, fewer if they are long")
    add("--region-steps", type=int, default=3)
    add("--seconds", type=float, default=300, help="no case begins later")
    add("--cases", default="0,1,2,3", help="numbers of cases, in their order")
    add("--layers", type=int, help="in place of the cases' own")
    add("--ways", help="in place of the cases' own, with commas")
    add("--no-liger", dest="liger", action="store_false")
    add("--tiny", action="store_true", help="small models and few tokens")
    add("--out", type=Path, help="a file to which rows are appended, JSON")
    add("--show", type=Path, nargs="?", const=RECORDS, metavar="FILE", help="print tables of rows")
    options = parser.parse_args(arguments)
    if options.show and not options.show.exists():
        parser.error(f"{options.show}: no such file; need rows that --out wrote")
    if options.show:
        print(tables([json.loads(line) for line in options.show.read_text().splitlines()]))
        return 0
    began = time.monotonic()
    options.command = " ".join(["torchrun --nproc-per-node 2", *sys.argv])
    options.liger &= bool(importlib.util.find_spec("liger_kernel") and torch.cuda.is_available())
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    rows = []
    for number in map(int, options.cases.split(",")):
        case = CASES[number]
        if options.tiny:
            case = case._replace(layers=4, prompt=96, response=64, responses=16)
        if options.layers:
            case = case._replace(layers=options.layers)
        if options.ways:
            case = case._replace(ways=tuple(options.ways.split(",")))
        rows += rows_of(case, options, lambda: options.seconds - (time.monotonic() - began))
    if dist.get_rank() == 0:
        print("== policy updates", *map(line_of, rows), sep="\n", flush=True)
    dist.destroy_process_group()
    return int(not rows or any(row["seconds"] is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
