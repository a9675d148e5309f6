"""Ranks one after the other in one process, each through the launches of a GPU's rank."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call as Record
from qla_kernels.gdn.call import Options, SavedForward
from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.gdn.sharded import exchange
from qla_kernels.gdn.sharded import launch as launch_shards
from qla_kernels.gdn.sharded.context import local_bounds
from qla_kernels.gdn.sharded.ops import Arriving, ShardPlace
from tests.gdn_calls import Call


class _Told(Exception):
    """A rank's link, on its way to the others."""


def run(
    x: Call, do: Tensor, world: int, warm_log_bound: float, monkeypatch: Any
) -> tuple[Tensor, GdnBackward]:
    """o and the gradients of a whole batch, put together from those of its ranks."""
    scale, size = x["q"].shape[-1] ** -0.5, x["q"].shape[1] // world
    held = [local_bounds(r, x["cu_seqlens"].tolist(), size) for r in range(world)]

    options = Options(is_train=True, warm_log_bound=warm_log_bound)

    def rank(r: int) -> tuple[Record, ShardPlace]:
        rows = [x[n][:, r * size : (r + 1) * size] for n in ("q", "k", "v", "g", "beta")]
        bounds = torch.tensor(held[r][0], dtype=torch.int32, device=x["q"].device)
        return Record(*rows, scale, None, bounds), ShardPlace("", *held[r][1:])

    def forward(r: int) -> Any:
        given, place = rank(r)
        return launch_shards.gdn_shard_fwd(given, options, place)

    saved = _in_turn(forward, world, monkeypatch)

    def backward(r: int) -> Any:
        (given, place), (_, entered, g_cum, A) = rank(r), saved[r]
        arriving = Arriving(do[:, r * size : (r + 1) * size], entered)
        return launch_shards.gdn_shard_bwd(
            given, SavedForward(g_cum, A, []), arriving, options, place
        )

    done = _in_turn(backward, world, monkeypatch)
    grads = (torch.cat(parts, 1) for parts in list(zip(*done, strict=True))[:5])
    return torch.cat([rank.o for rank in saved], 1), GdnBackward(*grads, None, None, None)


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
