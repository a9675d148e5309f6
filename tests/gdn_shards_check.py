"""Ranks one after the other in one process, each through the launches of a GPU's rank."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call as Record
from qla_kernels.gdn.call import Options, SavedForward
from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.gdn.sharded import context as contexts
from qla_kernels.gdn.sharded import exchange
from qla_kernels.gdn.sharded import launch as launch_shards
from qla_kernels.gdn.sharded.layouts import CONTIGUOUS, STRETCHES, ShardPlace, held_by
from qla_kernels.gdn.sharded.ops import Arriving
from tests.gdn_calls import Call


class _Told(Exception):
    """A rank's link, on its way to the others."""


def run(
    x: Call,
    do: Tensor,
    world: int,
    warm_log_bound: float,
    monkeypatch: Any,
    layout: str = CONTIGUOUS,
) -> tuple[Tensor, GdnBackward]:
    """o and the gradients of a whole batch, put together from those of its ranks."""
    scale, each, T = x["q"].shape[-1] ** -0.5, STRETCHES[layout], x["q"].shape[1]
    numbers = [held_by(r, world, each) for r in range(world)]
    tokens = torch.arange(T, device=do.device).view(each * world, -1)
    held = [tokens[list(its)].flatten() for its in numbers]
    bounds = x["cu_seqlens"].cpu()
    options = Options(is_train=True, warm_log_bound=warm_log_bound)

    def rank(r: int) -> tuple[Record, ShardPlace]:
        rows = [x[n][:, held[r]] for n in ("q", "k", "v", "g", "beta")]
        monkeypatch.setattr(contexts, "_place_in", lambda *_: (r, world))
        place = contexts.place_of("ranks in turn", made(bounds, layout))
        before, after = ([getattr(x, n) for x in place.stretches] for n in ("before", "after"))
        its = made(bounds, layout).cu_seqlens.to(do.device, torch.int32)
        return Record(*rows, scale, None, its), ShardPlace("", before, after, place.front)

    def made(bounds: Tensor, layout: str) -> contexts.CPContext:
        group: Any = SimpleNamespace()
        return contexts.build_cp_context(bounds, group, layout=layout)

    def forward(r: int) -> Any:
        given, place = rank(r)
        return launch_shards.gdn_shard_fwd(given, options, place)

    saved = _in_turn(forward, world, monkeypatch)

    def backward(r: int) -> Any:
        (given, place), (_, entered, g_cum, A) = rank(r), saved[r]
        arriving = Arriving(do[:, held[r]], entered)
        return launch_shards.gdn_shard_bwd(
            given, SavedForward(g_cum, A, []), arriving, options, place
        )

    done = _in_turn(backward, world, monkeypatch)
    in_order = torch.cat(held).argsort()

    def whole(parts: Any) -> Tensor:
        return torch.cat(list(parts), 1)[:, in_order]

    grads = (whole(parts) for parts in list(zip(*done, strict=True))[:5])
    return whole(rank.o for rank in saved), GdnBackward(*grads, None, None, None)


def _in_turn(call: Callable[[int], Any], world: int, monkeypatch: Any) -> list[Any]:
    """Each rank up to the gather, to hear what it tells the others; then each with all links."""
    links: list[Tensor] = []

    def gather(link: Tensor, _: Any) -> Tensor:
        if len(links) < world:
            raise _Told(link)
        return torch.stack(links)

    def here(r: int) -> Any:
        monkeypatch.setattr(exchange, "group_named", lambda _: SimpleNamespace(rank=lambda: r))
        return call(r)

    monkeypatch.setattr(exchange, "gather", gather)
    for r in range(world):
        try:
            here(r)
        except _Told as told:
            links.append(told.args[0])
    return [here(r) for r in range(world)]
