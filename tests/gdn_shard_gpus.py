"""Two GPUs as two processes over NCCL, for the device test of sequences cut over ranks."""

import itertools
import json
import os
import sys
from pathlib import Path

WORLD = 2
LIMIT = 150  # seconds for everything; a deadlock is a failure
LENGTHS = {
    "one sequence": [8192],
    "cut within": [1000, 6000, 1192],
    "cut between": [4096, 0, 4096],
    "odd": [3, 4000, 189],
    "wide heads": [1000, 6000, 1192],
}


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
    for layout, name in itertools.product(("contiguous", "zigzag"), LENGTHS):
        lengths = LENGTHS[name]
        torch.manual_seed(0)
        sizes = (256, 512) if name == "wide heads" else (128, 128)
        x = on_gpu(lengths, heads=(2, 4), sizes=sizes, padding=0)
        del x["initial_state"]
        x["g"] *= torch.tensor([0.0, 0.002, 0.02, 1.0], device="cuda")  # what heads remember
        x["do"] = torch.randn_like(x["v"])
        context = build_cp_context(x["cu_seqlens"], layout=layout)
        call = part(x, context, dist.group.WORLD)
        got, want = gradients(call), gradients(x)
        want = part({**x, **want}, context, dist.group.WORLD)
        said[f"{name}, {layout}"] = max(relative_l2(got[n], want[n]) for n in got)
        torch.cuda.set_sync_debug_mode("error")
        again = gradients(call)
        torch.cuda.set_sync_debug_mode("default")
        said[f"{name}, {layout}, again"] = all(torch.equal(again[n], got[n]) for n in got)
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
