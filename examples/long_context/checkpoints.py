"""Distributed checkpoints: every rank writes its part, and any number of ranks can read them.

`export` writes the model alone, as a folder of transformers.
"""

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

# files of a folder that make up its tokenizer
TOKENIZER = (
    "*token*.*",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "*piece*.model",
    "tekken.json",
)


def save(folder: Path, step: int, model: nn.Module, optimizer: Any) -> None:
    """Writes the state after `step` steps; the checkpoint counts once its name has no `.part`."""
    made = folder / f"step-{step:06}"
    part = made.with_suffix(".part")
    dcp.save(_state(model, optimizer), checkpoint_id=part)
    if dist.get_rank() == 0:
        part.rename(made)
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: Any) -> int:
    """Reads the latest checkpoint, if there is one; returns the number of steps it has seen."""
    found = [None]
    if dist.get_rank() == 0:
        found = [max((p.name for p in folder.glob("step-??????")), default=None)]
    dist.broadcast_object_list(found)
    if found[0] is None:
        return 0
    state = _state(model, optimizer)
    _compare(folder / found[0], state["model"])
    dcp.load(state, checkpoint_id=folder / found[0])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(found[0].removeprefix("step-"))


def _compare(made: Path, weights: dict[str, Any]) -> None:
    """Ends the program unless a checkpoint has the weights of this model, and no others."""
    stored = FileSystemReader(made).read_metadata().state_dict_metadata
    there = {n[6:]: tuple(x.size) for n, x in stored.items() if n.startswith("model.")}
    here = {n: tuple(x.shape) for n, x in weights.items()}
    if other := sorted(n for n in here.keys() | there.keys() if here.get(n) != there.get(n)):
        found, wanted = (x.get(other[0], "missing") for x in (there, here))
        fix = "pass its --model and --layers, or another --checkpoints"
        got = f"{made} is of another model"
        raise SystemExit(f"{got}: {other[0]} is {found} there, and {wanted} here; {fix}")


def export(folder: Path, model: Any, source: str) -> None:
    """Writes a LanguageModel's weights in fp32, its configuration, and the tokenizer of `source`.

    `source` is the folder that the model came from, if any. Rank 0 holds all weights meanwhile.
    """
    everything = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=everything)  # empty on other ranks
    if dist.get_rank() == 0:
        weights = {name.removeprefix("causal."): x for name, x in state.items()}
        model.causal.save_pretrained(folder, state_dict=weights)
        for pattern in TOKENIZER:
            for file in Path(source).glob(pattern):
                if not (folder / file.name).exists():
                    shutil.copy(file, folder)
    dist.barrier()


def _state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}
