"""Trains a language model on long sequences, each of which several GPUs share.

    torchrun --nproc-per-node 8 examples/long_context_train.py --length 131072 --max-s 86
    torchrun --nproc-per-node 8 examples/long_context_train.py --length 131072 --max-s 86 --ring 4
    torchrun --nproc-per-node 8 examples/long_context_train.py --attention dense
    torchrun --nproc-per-node 8 examples/long_context_train.py --model FOLDER --tokens ids.npy
    torchrun --nproc-per-node 2 examples/long_context_train.py --model tiny --length 700 --steps 3

Ranks form a mesh of data parallel x ring. The ranks of a ring share each sequence, attention over
it is sparse (or dense, to compare), and rings train on different sequences. FSDP2 shards the model
over all ranks. Attention of random weights is nearly even, so --max-s bounds their mask.
docs/long-context.md explains the choices; long_context/ has the parts:

    attention.py     sparse attention and the dense ring: layouts, arguments of the model's call
    sequences.py     tokens, labels and positions of each rank
    loss.py          cross entropy without all logits
    model.py         the model, and FSDP2
    checkpoints.py   saving and resuming

On CPUs, ranks communicate over gloo; use `--model tiny`.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from long_context import attention, checkpoints
from long_context.loss import IGNORED
from long_context.model import causal_model, configuration, distributed
from long_context.sequences import Dealer, Documents, Synthetic
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from qla_kernels.sparse_ring import RingGroups
from qla_kernels.sparse_ring.mask_options import OPTIONS, add_mask_options, mask
from qla_kernels.sparse_ring.measure_inputs import beyond

IGNORED_BY = {  # options without effect, by kind of attention
    "sparse": ("dense_kernel",),
    "dense": ("recall", *OPTIONS, "dense_layers", "schedule", "log_lines"),
}


def main() -> None:
    options = parse()
    device = start(options.device)
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


def start(asked: str | None) -> torch.device:
    """Joins the other ranks that torchrun started, and returns this rank's device."""
    if "RANK" not in os.environ:
        fix = "start with torchrun --nproc-per-node N, also for one GPU"
        raise SystemExit(f"torchrun's variables, such as RANK, are not set: {fix}")
    kind = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return device


def train(options: argparse.Namespace, device: torch.device) -> None:
    world = dist.get_world_size()
    ring = options.ring or world
    if world % ring:
        raise SystemExit(f"--ring {ring} of {world} ranks: pass a divisor")
    mesh = init_device_mesh(device.type, (world // ring, ring), mesh_dim_names=("data", "ring"))
    group = RingGroups.from_mesh(mesh["ring"])
    layers = tuple(options.dense_layers) if options.attention == "sparse" else ()
    config = configuration(options.model, options.length, options.layers, layers)
    if options.without_effect:
        given = ", ".join(options.without_effect)
        say(f"without effect under --attention {options.attention}: {given}")
    if options.attention == "sparse":
        recomputed = options.checkpointing == "full"
        chosen = attention.sparse(group, options.mask, options.schedule, layers, recomputed)
    else:
        kernel = options.dense_kernel or attention.default_kernel(device)
        chosen = attention.dense(group, kernel)

    everyone = init_device_mesh(device.type, (world,))
    causal = causal_model(options.model, config, chosen.name, device)
    if warning := beyond(config, options.length):
        say(warning)
    vocabulary = causal.config.vocab_size
    model = distributed(causal, everyone, options.loss_rows, options.checkpointing == "full")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1,
        fused=device.type == "cuda" or None,
    )  # fmt: skip
    first = checkpoints.load(options.checkpoints, model, optimizer) if options.checkpoints else 0
    if first >= options.steps:
        say(f"the checkpoint has {first} steps: pass more than that as --steps to train on")
    elif first:
        say(f"resumed at step {first} from {options.checkpoints}")

    source: Synthetic | Documents = Synthetic(options.length, vocabulary)
    if options.tokens is not None:
        source = Documents(options.tokens, options.bounds, options.length, vocabulary)
    number = mesh.get_local_rank("data"), world // ring
    dealer = Dealer(source, chosen.layout, group.rank, *number, device)
    log = Log(options.out, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the whole model was here before it was sharded
    for step in range(first, options.steps):
        began = time.monotonic()
        shard = dealer.shard(step)
        count = summed((shard.labels != IGNORED).sum())
        of_mine = model(*shard[:3], **chosen.arguments(shard.seqlen))
        # FSDP averages gradients over all ranks, and each rank has the sum of its own tokens
        (of_mine * world / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip).full_tensor()
        for parameters in optimizer.param_groups:
            parameters["lr"] = options.lr * min(1.0, (step + 1) / options.warmup)
        optimizer.step()
        optimizer.zero_grad()
        loss = summed(of_mine.detach()) / count  # waits for the GPU
        log.step(step, float(loss), float(norm), int(count) + number[1], time.monotonic() - began)
        if chosen.log is not None and options.log_lines and step % options.log_lines == 0:
            log.lines(step, chosen.log.lines())
        done = step + 1
        if options.checkpoints and (done == options.steps or done % options.save_every == 0):
            checkpoints.save(options.checkpoints, done, model, optimizer)
    if options.export is not None:
        checkpoints.export(options.export, model, options.model)


def say(text: str) -> None:
    """Prints on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def summed(x: Tensor) -> Tensor:
    """Returns the sum of x over all ranks."""
    x = x.clone()
    dist.all_reduce(x)
    return x


class Log:
    """Prints a line for each step on rank 0, and appends it as JSON to a file."""

    def __init__(self, file: Path | None, device: torch.device) -> None:
        self._file, self._device = file, device

    def step(self, step: int, loss: float, norm: float, tokens: int, seconds: float) -> None:
        """Reports a step; `tokens` are those of all rings."""
        memory = torch.tensor(self._memory(), device=self._device)
        dist.all_reduce(memory, dist.ReduceOp.MAX)
        gigabytes = float(memory)
        self._say(
            f"step {step:5}  loss {loss:.6f}  gradient {norm:.4f}  {seconds * 1e3:9.1f} ms  "
            f"{tokens / seconds:10.0f} tokens/s  {gigabytes:6.2f} GB",
            step=step, loss=loss, norm=norm, ms=seconds * 1e3, tokens=tokens, gb=gigabytes,
        )  # fmt: skip

    def lines(self, step: int, layers: list[Any]) -> None:
        """Reports density and recall of each layer's lines."""
        for layer in layers:
            self._say(f"step {step:5}  {layer}", step=step, **vars(layer))

    def _memory(self) -> float:
        """Returns the most memory that this rank has had, in GB: of the GPU, or of the process."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6

    def _say(self, text: str, **numbers: Any) -> None:
        say(text)
        if self._file is not None and dist.get_rank() == 0:
            with self._file.open("a") as file:
                file.write(json.dumps(numbers) + "\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name: str, default: Any = None, help: str = "", **settings: Any) -> None:
        said = help if default in (None, ()) else f"{help}; left out: %(default)s"
        parser.add_argument(name, default=default, help=said, **settings)

    add("--model", "qwen2.5-3b", "qwen2.5-3b, tiny, or a folder with a checkpoint")
    add("--layers", type=int, help="only the first layers of the model, to try a length out")
    add("--length", 131072, "most tokens of a sequence", type=int)
    add("--tokens", type=Path, help="tokens in one dimension, by numpy.save; synthetic without")
    add("--bounds", type=Path, help="first token of each document and, last, the number of tokens")
    add("--ring", type=int, help="ranks that share a sequence; all by default")
    kinds = "sparse under a mask, or dense: a ring of exact attention, to compare with"
    add("--attention", "sparse", kinds, choices=("sparse", "dense"))
    add("--recall", 0.95, "target of the lines: the share of attention that they hold", type=float)
    add_mask_options(parser)
    add("--dense-layers", (), "layers with every diagonal", type=int, nargs="*")
    add("--schedule", "auto", "auto, allgather, ring or double_ring")
    kernels = "of --attention dense; cudnn by default, definition on a CPU"
    add("--dense-kernel", help=kernels, choices=("fa4", "cudnn", "flash", "definition"))
    kinds = "full computes each layer again in the backward, none keeps activations"
    add("--checkpointing", "full", kinds, choices=("full", "none"))
    add("--loss-rows", 1024, "rows whose logits are in memory", type=int)
    add("--steps", 20, "of all runs: a resumed one does the rest of them", type=int)
    add("--lr", 1e-4, "learning rate of AdamW", type=float)
    add("--warmup", 10, "steps until the learning rate is reached", type=int)
    add("--clip", 1.0, "largest norm of a gradient", type=float)
    add("--checkpoints", type=Path, help="folder: resumes from the latest one, and saves")
    add("--save-every", 1000, "steps from one checkpoint to the next", type=int)
    add("--export", type=Path, help="folder: at the end the model, as transformers reads it")
    add("--log-lines", 0, "every so many steps: density and recall of each layer", type=int)
    add("--out", type=Path, help="also append each line as JSON")
    add("--device", choices=("cuda", "cpu"), help="cuda by default, if there is one")
    options = parser.parse_args(arguments)
    if options.save_every < 1:
        got, fix = f"--save-every {options.save_every}", "pass more than --steps to save at the end"
        raise SystemExit(f"{got}; need 1 or more; {fix} alone")
    options.without_effect = [
        f"--{name.replace('_', '-')}"
        for name in IGNORED_BY[options.attention]
        if getattr(options, name) != parser.get_default(name)
    ]
    if options.attention == "sparse":
        try:
            options.mask = mask(options, options.recall)
        except ValueError as error:
            raise SystemExit(str(error)) from None
    return options


if __name__ == "__main__":
    main()
