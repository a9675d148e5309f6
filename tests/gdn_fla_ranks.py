"""FLA's function with FLA's contexts and our backend, over NCCL, for a device test.

A rank says the largest error of o and of each gradient, against the same function over the whole
batch on one GPU, and how many of its calls our backend ran.
"""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

LIMIT = 300  # seconds for everything, with FLA's imports; a deadlock is a failure
LENGTHS = {  # 10240 tokens, as in FLA's own tests
    "sequences are cut": [3000, 4000, 3240],
    "boundaries are aligned": [5120, 5120],
    "one sequence": [10240],
    "many short sequences": [1000, 1500, 2000, 2500, 1240, 1000, 1000],
}
CALLS = 2 * len(LENGTHS)  # of a layout: the whole batch, and this rank's part


def main(folder: Path, port: int, rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    os.environ["FLA_FLASH_QLA"] = "0"
    from fla.ops.cp import build_cp_context
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from qla_kernels.integrations import fla
    from tests.compare import relative_l2
    from tests.gdn_calls import leaves, on_gpu
    from tests.gdn_shard_ranks import part

    runs, ours = 0, fla.chunk_gated_delta_rule

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        return ours(*args, **kwargs)

    fla.chunk_gated_delta_rule = counted
    assert fla.register(prefer=True)

    def outcomes(x: dict[str, Any], do: torch.Tensor) -> dict[str, torch.Tensor]:
        names = ("q", "k", "v", "g", "beta")
        x = leaves(x)
        o, _ = chunk_gated_delta_rule(**x)
        found = torch.autograd.grad(o, [x[n] for n in names], do)
        return {"o": o.detach(), **dict(zip(names, found, strict=True))}

    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world)
    said: dict[str, object] = {}
    for layout, name in itertools.product(("contiguous", "zigzag"), LENGTHS):
        torch.manual_seed(0)
        x = on_gpu(LENGTHS[name], heads=(2, 4), padding=0)
        del x["initial_state"]
        x["g"] *= torch.tensor([0.0, 0.002, 0.02, 1.0], device="cuda")  # what heads remember
        do = torch.randn_like(x["v"])
        context = build_cp_context(x["cu_seqlens"], group=dist.group.WORLD, layout=layout)
        want = part({**x, **outcomes(x, do)}, context, dist.group.WORLD)
        mine = part({**x, "do": do}, context, dist.group.WORLD)
        got = outcomes(mine, mine.pop("do"))
        said[f"{name}, {layout}"] = max(relative_l2(got[n], want[n]) for n in got)
    said["calls that ours ran"] = runs
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
