"""Two ranks that train a swapped model, for tests/host/test_transformers_swap.py."""

import json
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from qla_kernels.integrations import transformers as swapping
from tests.tiny_hybrids import VOCABULARY, of_two_layers

KIND = "Qwen3.5"
WAYS = ("DDP", "FSDP2", "FSDP2, compiled", "FSDP2, checkpointing")
WAYS += ("FSDP2, recompute", "FSDP2, recompute, checkpointing")
ORDERS = ("swap first", "swap last")


def step(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    found = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}
    return {"loss": loss.detach(), **found}


def wrapped(model: nn.Module, way: str, world: int) -> nn.Module:
    if way == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    if way.endswith("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = dist.init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if way.endswith("compiled"):
        model.compile(backend="aot_eager")
    return model


def main(folder: Path, port: int, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (2 * world, 70))
    want = step(of_two_layers(KIND), ids)  # without our functions
    said = {}
    for way, order in product(WAYS, ORDERS):
        torch.compiler.reset()
        model = of_two_layers(KIND)
        if order == "swap first":
            swapping.swap(model, recompute="recompute" in way)
        model = wrapped(model, way, world)
        if order == "swap last":
            swapping.swap(model, recompute="recompute" in way)
        ours = swapping.whole(model)
        got = step(model, ids.chunk(world)[rank])
        dist.all_reduce(got["loss"])
        got["loss"] /= world
        swapping.restore(model)
        largest = max(x.norm() for x in want.values())
        errors = [(got[n] - x).norm() / (x.norm() + 1e-4 * largest) for n, x in want.items()]
        said[f"{way}, {order}"] = [sum(ours.values()), max(errors).item()]
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()
