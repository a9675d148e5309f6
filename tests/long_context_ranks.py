"""Ranks that train by examples/long_context_train.py, for tests/host/test_long_context.py."""

import json
import shutil
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import ROOT

LENGTH, STEPS, SAVED = 500, 4, 2
EXPORTED = "exported"
TINY = ["--model=tiny", f"--length={LENGTH}", "--loss-rows=100", "--device=cpu", "--warmup=1"]
TINY += ["--lr=1e-2"]
SPARSE = [*TINY, "--recall=0.5", "--max-v=32"]


def main(folder: Path, port: int, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "examples"))
    import long_context_train as example

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    device, saved = torch.device("cpu"), folder / "saved"

    printed = StringIO()

    def losses(name: str, *arguments: str) -> list[dict[str, object]]:
        out = folder / f"{name}.json"
        with redirect_stdout(printed):
            example.train(example.parse([*arguments, f"--out={out}"]), device)
        dist.barrier()
        return [json.loads(line) for line in out.read_text().splitlines()]

    saving = ["--checkpoints", str(saved), f"--save-every={SAVED}", f"--steps={STEPS}"]
    said: dict[str, Any] = {"through": losses("through", *SPARSE, *saving, f"--log-lines={SAVED}")}
    if rank == 0:
        shutil.rmtree(saved / f"step-{STEPS:06}")
    dist.barrier()
    said["resumed"] = losses("resumed", *SPARSE, *saving, f"--export={folder / EXPORTED}")
    try:
        example.train(example.parse([*SPARSE, *saving, "--layers=1"]), device)
    except SystemExit as error:
        said["another model"] = str(error)
    if rank == 0:
        (folder / EXPORTED / "tokenizer.json").write_text("a tokenizer")
    dist.barrier()
    model = f"--model={folder / EXPORTED}"
    again = [f"--export={folder / 'again'}", "--layers=1", "--steps=1", f"--length={LENGTH + 100}"]
    losses("again", *SPARSE, model, *again)
    dense = ("--attention=dense", f"--checkpoints={saved}", f"--steps={STEPS + 1}")
    said["after the export"] = losses("after", *TINY, *dense)
    said["dense"] = losses("dense", *TINY, "--attention=dense", "--max-s=3", "--steps=2")
    diagonals = ["--dense-layers", "0", "1", "--checkpointing=none", "--steps=2"]
    said["every diagonal"] = losses("diagonals", *TINY, *diagonals)
    said["two rings"] = losses("rings", *SPARSE, "--ring=1", "--steps=1")
    said["printed"] = printed.getvalue()
    if rank == 0:
        (folder / "0.json").write_text(json.dumps(said))
    dist.destroy_process_group()
