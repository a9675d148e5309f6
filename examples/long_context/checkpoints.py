"""Distributed checkpoints: every rank writes its part, and any number of ranks can read them."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


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
    dcp.load(state, checkpoint_id=folder / found[0])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(found[0].removeprefix("step-"))


def _state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}
