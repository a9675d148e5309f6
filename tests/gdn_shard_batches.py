"""Batches after batches with other cu_seqlens, over gloo, under the rule of GPUs: compare once.

For tests.ranks; in groups of three and of four ranks.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.gdn_shard_ranks import batch, gradients, part, solved
from tests.ranks import raised, serve

TOKENS = 48  # divisible by 3 and by 4
BATCHES = 25
# on three ranks: the line of rank 0 is known at the second batch, those of the others are new
FIRST = [[32, 16], [24, 24], [48], [16, 16, 16], [1, 47], [47, 1], [0, 48, 0]]


def lengths_of(seed: int) -> list[int]:
    """Of sequences that end anywhere, or nearly so."""
    rng = random.Random(seed)
    ends = sorted(rng.choices(range(TOKENS + 1), k=rng.randrange(6)))
    return [b - a for a, b in zip([0, *ends], [*ends, TOKENS], strict=True)]


def groups(rank: int) -> Iterator[Any]:
    import torch.distributed as dist

    three = dist.new_group([0, 1, 2])
    if rank < 3:
        yield three
    yield dist.group.WORLD


class GpuRule:
    """`agree` as for CUDA tensors, which differs in nothing else; counts exchanges."""

    def __init__(self) -> None:
        import torch.distributed as dist

        from qla_kernels.gdn.sharded import api as shard_api

        self.exchanges = 0
        agree, gather = shard_api.agree, dist.all_gather_object

        def counted(*args: Any, **options: Any) -> None:
            self.exchanges += 1
            gather(*args, **options)

        dist.all_gather_object = counted
        shard_api.agree = lambda op, shard, facts, problem, _: agree(
            op, shard, facts, problem, True
        )


def batches() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [solved(tuple(x)) for x in FIRST + [lengths_of(seed) for seed in range(BATCHES)]]


def changing(rank: int) -> Iterator[tuple[str, Any]]:
    """The largest error of any tensor of all batches, and how often ranks compared."""
    from qla_kernels.gdn import build_cp_context
    from tests.compare import relative_l2

    rule = GpuRule()
    for group in groups(rank):
        rule.exchanges, errors = 0, []
        for x, whole in batches():
            call = part(x, build_cp_context(x["cu_seqlens"], group), group)
            want = part({**x, **whole}, None, group)
            errors += [relative_l2(t, want[n]) for n, t in gradients(call).items()]
        yield f"changing, {group.size()} ranks", max(errors)
        yield f"exchanges, {group.size()} ranks", rule.exchanges


def mixed(rank: int) -> Iterator[tuple[str, Any]]:
    """What is raised where ranks mix calls that have all been agreed on; and that they go on."""
    import torch
    import torch.distributed as dist

    from qla_kernels import chunk_gated_delta_rule
    from qla_kernels.gdn import build_cp_context

    group = dist.group.WORLD
    x = batch([TOKENS])
    mine = part(x, build_cp_context(x["cu_seqlens"], group), group)
    del mine["do"]
    other = replace(mine["cp_context"], pre_num_ranks=1)
    calls: dict[str, dict[str, Any]] = {
        "scale": {"scale": 0.3},
        "exact": {"exact": True},
        "norm": {"use_qk_l2norm_in_kernel": True},
        "line": {"cp_context": other} if rank == 2 else {},
    }
    for change in ({}, *list(calls.values())[:3]):
        chunk_gated_delta_rule(**mine, **change)
    for name, change in calls.items():
        call = {**mine, **change} if rank == 2 else mine
        yield f"mixed {name}", raised(lambda call=call: chunk_gated_delta_rule(**call))
    with torch.no_grad():
        yield "afterwards", raised(lambda: chunk_gated_delta_rule(**mine))


def mixed_backwards(rank: int) -> Iterator[tuple[str, Any]]:
    """Two calls that were the same on all ranks, whose backwards rank 2 takes in another order."""
    import torch.distributed as dist

    from qla_kernels import chunk_gated_delta_rule
    from qla_kernels.gdn import build_cp_context
    from tests.gdn_calls import leaves

    x = batch([TOKENS])
    mine = part(x, build_cp_context(x["cu_seqlens"], dist.group.WORLD), dist.group.WORLD)
    do, mine = mine.pop("do"), leaves(mine)
    done = [chunk_gated_delta_rule(**mine, scale=scale)[0] for scale in (0.3, 0.5)]
    for o in reversed(done) if rank == 2 else done:
        yield "a backward", raised(lambda o=o: o.backward(do))


if __name__ == "__main__":
    serve(changing, mixed, mixed_backwards, before=batches)
