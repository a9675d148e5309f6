"""Batches whose cu_seqlens change, on three or four GPUs over NCCL, as processes.

No rank makes its GPU the current one: all tensors say where they are.
"""

import json
import os
import sys
from pathlib import Path

LIMIT = 200  # seconds for everything; a deadlock is a failure
TOKENS = 6144  # 2048 or 1536 a rank
BATCHES = [
    [4096, 2048],  # on three ranks: 0 and 1 share a sequence
    [3072, 3072],  # so do they, as before; and now 1 and 2
    [6144],
    [2048, 2048, 2048],
    [100, 2000, 4044],
    [1, 6143],
    [6143, 0, 1],
    [1536, 1536, 1536, 1536],
    [3000, 64, 3080],
]


def main(folder: Path, port: int, rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    from qla_kernels.gdn import build_cp_context
    from tests.compare import relative_l2
    from tests.gdn_calls import on_gpu
    from tests.gdn_shard_ranks import gradients, part

    here = torch.device("cuda", rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world)
    exchanges, gather = 0, dist.all_gather_object

    def counted(*args: object, **options: object) -> None:
        nonlocal exchanges
        exchanges += 1
        gather(*args, **options)

    dist.all_gather_object = counted
    said: dict[str, object] = {}
    for round_, layout in enumerate(("contiguous", "zigzag", "contiguous")):
        for lengths in BATCHES:
            torch.manual_seed(0)
            x = on_gpu(lengths, heads=(2, 4), padding=0)
            x = {n: t.to(here) if torch.is_tensor(t) else t for n, t in x.items()}
            del x["initial_state"]
            x["g"] *= torch.tensor([0.0, 0.002, 0.02, 1.0], device=here)  # what heads remember
            x["do"] = torch.randn_like(x["v"])
            context = build_cp_context(x["cu_seqlens"], layout=layout)
            got = gradients(part(x, context, dist.group.WORLD))
            want = part({**x, **gradients(x)}, context, dist.group.WORLD)
            said[f"{lengths}, round {round_}"] = max(relative_l2(got[n], want[n]) for n in got)
    said["exchanges"] = exchanges
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.all_reduce(torch.zeros(1, device=here))
    torch.cuda.synchronize(here)  # nobody leaves before the others are done
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
