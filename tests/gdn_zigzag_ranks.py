"""The zigzag layout over gloo: 2, 3 and 4 ranks against one, refusals, mixed calls.

For tests.ranks.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.gdn_shard_batches import GpuRule
from tests.gdn_shard_ranks import WIDE_SIZES, batch, gradients, part, solved
from tests.ranks import raised, serve

TOKENS = 480  # stretches of 120, 80 and 60: longer than a chunk, and shorter
BATCHES = 12
SHORT = 24  # stretches of 6, 4 and 3 tokens
LENGTHS = {
    "one sequence": [480],
    "ends within stretches": [30, 270, 100, 80],
    "ends between stretches": [120, 0, 120, 240],
    "ends in the middle": [240, 240],
    "several in a stretch": [3, 4, 300, 0, 1, 172],
    "no stretch is left": [60] * 8,
    "wide heads": [10, 450, 20],
}


def lengths_of(seed: int, tokens: int) -> list[int]:
    """Of sequences that end anywhere, often where a stretch ends, and may be empty."""
    rng = random.Random(seed)
    places = [*range(tokens + 1), *[n * tokens // 8 for n in range(9)] * (tokens // 9)]
    ends = sorted(rng.choices(places, k=rng.randrange(7)))
    return [b - a for a, b in zip([0, *ends], [*ends, tokens], strict=True)]


def groups(rank: int) -> Iterator[Any]:
    """This rank's half of the four ranks, the first three of them, and all."""
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    three = dist.new_group([0, 1, 2])
    yield pairs[rank // 2]
    if rank < 3:
        yield three
    yield dist.group.WORLD


Solved = tuple[dict[str, Any], dict[str, Any]]


def largest_error(batch: Solved, context: Any, group: Any) -> float:
    """Of o and the gradients of all tensors, against those of the whole batch."""
    import torch.distributed as dist

    from tests.compare import relative_l2

    x, whole = batch
    got = gradients(part(x, context, group))
    want = part({**x, **whole}, context, group)
    errors = []
    for n in got:
        if n in ("A_log", "dt_bias"):  # sums over tokens, so over ranks
            dist.all_reduce(got[n], group=group)
        errors.append(relative_l2(got[n], want[n]))
    return max(errors)


def batches() -> dict[str, list[Solved]]:
    """By the name of a result: the batches of which it is the largest error."""
    named = {
        name: [
            solved(
                tuple(lengths),
                WIDE_SIZES if name == "wide heads" else (16, 8),
                activations=name == "ends within stretches",
            )
        ]
        for name, lengths in LENGTHS.items()
    }
    for kind, tokens in (("random", TOKENS), ("short", SHORT), ("fp32", TOKENS)):
        lengths = [tuple(lengths_of(seed, tokens)) for seed in range(BATCHES)]
        named[kind] = [solved(its, fp32=kind == "fp32") for its in lengths]
    return named


def changing() -> list[Solved]:
    return [solved(tuple(lengths_of(seed, SHORT))) for seed in range(2 * BATCHES)]


def results(rank: int) -> Iterator[tuple[str, Any]]:
    from qla_kernels.gdn import build_cp_context

    for group in groups(rank):
        for name, its in batches().items():
            errors = []
            for x in its:
                context = build_cp_context(x[0]["cu_seqlens"], group, layout="zigzag")
                errors.append(largest_error(x, context, group))
            yield f"{name}, {group.size()} ranks", max(errors)
        x = batches()["several in a stretch"][0]
        context = build_cp_context(x[0]["cu_seqlens"], group, layout="zigzag")
        names = ("cu_seqlens", "layout", "part_len", "front_num_seqs", "pre_num_ranks_by_part",
            "post_num_ranks_by_part", "is_first_by_part", "is_last_by_part")  # fmt: skip
        fields = {n: getattr(context, n) for n in names}
        unset = dict.fromkeys(("pre_num_ranks", "post_num_ranks", "is_first_rank", "is_last_rank"))
        fla = SimpleNamespace(**fields, **unset, group=group, conv1d_kernel_size=4)
        yield f"FLA's context, {group.size()} ranks", largest_error(x, fla, group)


def refusals(rank: int) -> Iterator[tuple[str, Any]]:
    """What each rank raises when rank 2 was given something else."""
    import torch
    import torch.distributed as dist

    from qla_kernels import chunk_gated_delta_rule
    from qla_kernels.gdn import build_cp_context

    x, group = batch([300, 180]), dist.group.WORLD
    context = build_cp_context(x["cu_seqlens"], layout="zigzag")
    mine = {n: t for n, t in part(x, context, group).items() if n != "do"}
    by_order = build_cp_context(x["cu_seqlens"])
    other = build_cp_context(torch.tensor([0, 240, 480]), layout="zigzag")
    contexts: dict[str, Any] = {
        "layout": by_order,
        "other bounds": other,
        "place": replace(context, pre_num_ranks_by_part=(3, 0)),
        "front": replace(context, front_num_seqs=0),
        "pairs": replace(context, post_num_ranks_by_part=(1,)),
        "half a pair": replace(context, pre_num_ranks_by_part=(None, None)),
        "missing": replace(context, part_len=None),
        "length": replace(context, part_len=50),
        "front's end": replace(context, cu_seqlens_cpu=torch.tensor([0, 50, 120])),
        "nothing": context,
    }
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        name: lambda its=its: {**mine, "cp_context": its} for name, its in contexts.items()
    }
    whole = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    calls["whole batch"] = lambda: {**mine, **whole}
    for name, change in calls.items():
        call = change() if rank == 2 else mine
        yield f"refused {name}", raised(lambda call=call: chunk_gated_delta_rule(**call))


def mixed(rank: int) -> Iterator[tuple[str, Any]]:
    """As on GPUs: both layouts are agreed on once; then rank 2 makes another call than the rest."""
    import torch.distributed as dist

    from qla_kernels import chunk_gated_delta_rule
    from qla_kernels.gdn import build_cp_context
    from tests.gdn_calls import leaves

    rule, group = GpuRule(), dist.new_group()  # of which nothing is known
    errors = []
    for seed, x in enumerate(changing()):
        layout = ("zigzag", "contiguous")[seed % 2]
        context = build_cp_context(x[0]["cu_seqlens"], group, layout=layout)
        errors.append(largest_error(x, context, group))
    yield "changing", max(errors)
    yield "exchanges", rule.exchanges
    x = batch([SHORT])
    mine = part(x, build_cp_context(x["cu_seqlens"], group, layout="zigzag"), group)
    do = mine.pop("do")
    line = replace(mine["cp_context"], pre_num_ranks_by_part=(1, 5))  # right on rank 2: (2, 5)
    calls: dict[str, dict[str, Any]] = {
        "scale": {"scale": 0.3},
        "line": {"cp_context": line} if rank == 2 else {},
    }
    chunk_gated_delta_rule(**mine)
    chunk_gated_delta_rule(**mine, **calls["scale"])
    for name, change in calls.items():
        call = {**mine, **change} if rank == 2 else mine
        yield f"mixed {name}", raised(lambda call=call: chunk_gated_delta_rule(**call))
        yield "afterwards", raised(lambda: chunk_gated_delta_rule(**mine))
    mine = leaves(mine)
    done = [chunk_gated_delta_rule(**mine, scale=scale)[0] for scale in (0.3, 0.5)]
    for o in reversed(done) if rank == 2 else done:
        yield "a backward", raised(lambda o=o: o.backward(do))


if __name__ == "__main__":
    serve(results, refusals, mixed, before=lambda: (batches(), changing()))
