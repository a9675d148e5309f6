"""Two GPUs as two processes over NCCL, for the device test of sequences cut over ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[1]
WORLD = 2
LIMIT = 150  # seconds for everything; a deadlock is a failure
LENGTHS = {
    "one sequence": [8192],
    "cut within": [1000, 6000, 1192],
    "cut between": [4096, 0, 4096],
    "odd": [3, 4000, 187],
}


def run(folder: Path) -> list[dict[str, Any]]:
    """What each rank has to say, by case; what it printed, where it did not come to an end."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = (sys.executable, "-m", "tests.gdn_shard_gpus", str(folder), str(store.port))
    ranks = []
    for r in range(WORLD):
        with (folder / f"{r}.err").open("w") as errors:
            ranks.append(subprocess.Popen([*command, str(r)], cwd=ROOT, stderr=errors))
    for rank in ranks:
        try:
            rank.wait(LIMIT)
        except subprocess.TimeoutExpired:
            rank.kill()
    said = []
    for r in range(WORLD):
        file = folder / f"{r}.json"
        errors = (folder / f"{r}.err").read_text()[-3000:]
        said.append(json.loads(file.read_text()) if file.exists() else {"no end": errors})
    return said


def main(folder: Path, port: int, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from qla_kernels.gdn import build_cp_context
    from tests.compare import relative_l2
    from tests.gdn_calls import on_gpu
    from tests.gdn_shard_ranks import gradients, part

    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=WORLD)
    said = {}
    for name, lengths in LENGTHS.items():
        torch.manual_seed(0)
        x = on_gpu(lengths, heads=(2, 4), padding=0)
        del x["initial_state"]
        x["g"] *= torch.tensor([0.0, 0.002, 0.02, 1.0], device="cuda")  # what heads remember
        x["do"] = torch.randn_like(x["v"])
        context = build_cp_context(x["cu_seqlens"])
        call = part(x, context, dist.group.WORLD)
        got, want = gradients(call), gradients(x)
        want = part({**x, **want}, context, dist.group.WORLD)
        said[name] = max(relative_l2(got[n], want[n]) for n in got)
    torch.cuda.set_sync_debug_mode("error")
    again = gradients(call)
    torch.cuda.set_sync_debug_mode("default")
    said["again"] = all(torch.equal(again[n], got[n]) for n in got)
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
