"""What ranks find where sequences are cut over them, for tests.ranks. The last case kills one."""

import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from tests.ranks import DEADLINE, raised, serve

TOKENS = 280  # divisible by 4, and not by 64

LENGTHS = {
    "one sequence": [280],
    "ends within ranks": [30, 170, 80],
    "ends between ranks": [140, 0, 140],
    "several on a rank": [3, 4, 200, 0, 1, 72],
    "none on two ranks": [70, 70, 70, 70],
    "wide heads": [10, 260, 10],
}
WIDE_SIZES = (256, 64)  # K and V of wide heads


def batch(lengths: list[int], sizes: tuple[int, int] = (16, 8), **others: Any) -> dict[str, Any]:
    """A whole batch, the same on every rank, and the gradient of its output."""
    import torch

    from tests.gdn_calls import call

    torch.manual_seed(len(lengths))
    x = call(lengths, heads=(1, 2), sizes=sizes, **others)
    del x["initial_state"]
    return {**x, "do": torch.randn_like(x["v"])}


@functools.cache
def solved(
    lengths: tuple[int, ...], sizes: tuple[int, int] = (16, 8), fp32: bool = False, **others: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A whole batch, and o and the gradients of all its tensors."""
    import torch

    x = batch(list(lengths), sizes, **others)
    if fp32:
        wide = torch.float64
        x = {n: t.float() if torch.is_tensor(t) and t.dtype == wide else t for n, t in x.items()}
    return x, gradients(x)


def part(x: dict[str, Any], context: Any, group: Any) -> dict[str, Any]:
    """This rank's arguments of the call, in the layout of the context."""
    import torch

    rank, world, zigzag = group.rank(), group.size(), getattr(context, "layout", "") == "zigzag"

    def mine(t: Any) -> Any:
        size = t.shape[1] // (2 * world if zigzag else world)
        numbers = (rank, 2 * world - 1 - rank) if zigzag else (rank,)
        return torch.cat([t[:, n * size : (n + 1) * size] for n in numbers], 1)

    names = ("q", "k", "v", "g", "beta", "do", "o")
    tokens = {n: mine(x[n]) for n in names if n in x}
    others = {n: t for n, t in x.items() if n not in (*tokens, "cu_seqlens")}
    call = {**others, **tokens, "cp_context": context}
    return {n: t.clone() if torch.is_tensor(t) else t for n, t in call.items()}


def gradients(call: dict[str, Any]) -> dict[str, Any]:
    """o, and the gradient of every tensor."""
    import torch

    from qla_kernels import chunk_gated_delta_rule
    from tests.gdn_calls import leaves

    do = call["do"]
    x = leaves({n: t for n, t in call.items() if n != "do"})
    o, state = chunk_gated_delta_rule(**x)
    assert state is None
    names = [n for n, t in x.items() if torch.is_tensor(t) and t.requires_grad]
    found = torch.autograd.grad(o, [x[n] for n in names], do)
    return {"o": o.detach(), **dict(zip(names, found, strict=True))}


def groups(rank: int) -> Iterator[Any]:
    """All four ranks, and this rank's half of them."""
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    yield dist.group.WORLD
    yield pairs[rank // 2]


def batches() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return {
        name: solved(
            tuple(lengths),
            WIDE_SIZES if name == "wide heads" else (16, 8),
            activations=name == "ends within ranks",
        )
        for name, lengths in LENGTHS.items()
    }


def results(rank: int) -> Iterator[tuple[str, Any]]:
    """The largest relative error of every tensor, by how the batch is cut."""
    import torch.distributed as dist

    from qla_kernels.gdn import build_cp_context
    from tests.compare import relative_l2

    for group in groups(rank):
        for name, (x, whole) in batches().items():
            context = build_cp_context(x["cu_seqlens"], group)
            got = gradients(part(x, context, group))
            want = part({**x, **whole}, context, group)
            errors = []
            for n in got:
                if n in ("A_log", "dt_bias"):  # sums over tokens, so over ranks
                    dist.all_reduce(got[n], group=group)
                errors.append(relative_l2(got[n], want[n]))
            yield f"{name}, {group.size()} ranks", max(errors)
        fla = SimpleNamespace(**{n: getattr(context, n) for n in (
            "cu_seqlens", "is_first_rank", "is_last_rank", "pre_num_ranks", "post_num_ranks")},
            group=group, conv1d_kernel_size=None)  # fmt: skip
        same = gradients(part(x, fla, group))
        yield f"FLA's context, {group.size()} ranks", max(relative_l2(same[n], got[n]) for n in got)


def refusals(rank: int) -> Iterator[tuple[str, Any]]:
    """What each rank raises when one of them was given something else, and how soon."""
    import torch
    import torch.distributed as dist

    from qla_kernels import chunk_gated_delta_rule
    from qla_kernels.gdn import build_cp_context

    group = dist.group.WORLD
    x = batch(LENGTHS["one sequence"])
    context = build_cp_context(x["cu_seqlens"], group)
    other = build_cp_context(torch.tensor([0, 140, 280]), group)
    longer = build_cp_context(torch.tensor([0, 560]), group)
    names = ("q", "k", "v", "g", "beta")
    mine = {n: t for n, t in part(x, context, group).items() if n != "do"}
    wrong: dict[str, Callable[[], dict[str, Any]]] = {
        "dtype": lambda: {n: t.float() if torch.is_tensor(t) else t for n, t in mine.items()},
        "gradients": lambda: {**mine, "q": mine["q"].clone().requires_grad_()},
        "malformed": lambda: {**mine, "g": mine["g"][:, :5]},
        "missing": lambda: {**mine, "q": None},
        "flags": lambda: {**mine, "use_qk_l2norm_in_kernel": True},
        "whole batch": lambda: {**mine, **{n: x[n] for n in names}},
        "states": lambda: {**mine, "output_final_state": True},
        "contents": lambda: {**mine, "beta": mine["beta"] * torch.nan},
        "bound": lambda: {**mine, "exact": True},
        "context": lambda: {**mine, "cp_context": other},
        "chunk size": lambda: {**mine, "chunk_size": 7},
        "keyword": lambda: {**mine, "head_dim": 64},
        "both bounds": lambda: {**mine, "exact": True, "warm_log_bound": -5.0},
        "scale": lambda: {**mine, "scale": [1]},
        "flag": lambda: {**mine, "allow_neg_eigval": "no"},
        "layout": lambda: {**mine, "cp_context": replace(context, layout="striped")},
        "place": lambda: {**mine, "cp_context": replace(context, pre_num_ranks=3)},
        "total": lambda: {
            **{n: torch.cat([t, t], 1) if n in names else t for n, t in mine.items()},
            "cp_context": longer,
        },
        "no bounds": lambda: {**mine, "cp_context": replace(context, cu_seqlens=None)},
        "nothing": lambda: mine,
    }
    os.environ["QLA_CHECK"] = "1"
    for name, change in wrong.items():
        call = change() if rank == 2 else mine
        yield name, raised(lambda call=call: chunk_gated_delta_rule(**call))
    del os.environ["QLA_CHECK"]


def deaths(rank: int) -> Iterator[tuple[str, Any]]:
    """What is raised by those that are left, and when, once a rank is gone."""
    import torch.distributed as dist

    from qla_kernels import chunk_gated_delta_rule
    from qla_kernels.gdn import build_cp_context

    group = dist.new_group(timeout=timedelta(seconds=DEADLINE))
    x = batch(LENGTHS["one sequence"])
    call = part(x, build_cp_context(x["cu_seqlens"], group), group)
    del call["do"]
    dist.barrier()  # nobody is late but the one that is gone
    if rank == 3:
        return
    started = time.monotonic()
    yield "a death", raised(lambda: chunk_gated_delta_rule(**call))
    yield "seconds until it is noticed", time.monotonic() - started


if __name__ == "__main__":
    serve(results, refusals, deaths, before=batches)
