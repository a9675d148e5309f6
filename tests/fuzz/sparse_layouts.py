"""Attacks on who holds what, and on the simulator of how even that is."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qla_kernels.sparse_ring import ContiguousLayout, StripedLayout, ZigZagLayout, build_index
from qla_kernels.sparse_ring.balance import balance_report
from tests.fuzz.draw import Draw
from tests.fuzz.sparse import BLOCK, heads_of, index_call
from tests.fuzz.target import Call, Target

TILE = 128

Held = list[list[int]]  # tokens of each rank, in the order of its rows


def layout(d: Draw) -> Any:
    world = d.choose("world", (1, 2, 3, 4, 8))
    made = d.choose("layout", (ContiguousLayout, ZigZagLayout, StripedLayout, "stripes of 64"))
    return StripedLayout(world, 64) if made == "stripes of 64" else made(world)


def held_by(its: Any, T: int) -> Held:
    """The table of docs/long-context.md."""
    world = its.world
    if isinstance(its, StripedLayout):
        return [[t for t in range(T) if t // its.stripe % world == r] for r in range(world)]
    if isinstance(its, ZigZagLayout):
        part = T // (2 * world)
        ends = [[*range(r * part, (r + 1) * part)] for r in range(2 * world)]
        return [ends[r] + ends[2 * world - 1 - r] for r in range(world)]
    part = T // world
    return [list(range(r * part, (r + 1) * part)) for r in range(world)]


def unit_of(its: Any) -> int:
    return its.world * TILE * (2 if isinstance(its, ZigZagLayout) else 1)


def shard_call(d: Draw) -> Call:
    its = layout(d)
    T = unit_of(its) * d.choose("units", (1, 2, 3))
    shape, dim = [3, 2], d.choose("dim", (0, 1, 2))
    shape.insert(dim, T)
    x = d.strided("x", torch.arange(6.0 * T).reshape(shape))
    return {"its": its, "x": x, "dim": dim, "rank": d.numbers("rank").randrange(its.world)}


def shard(its: Any, **x: Any) -> Tensor:
    return its.shard(**x)


def verify_shard(d: Draw, x: Call, got: Tensor) -> None:
    """shard, and all else that a layout says."""
    its, T = x["its"], x["x"].shape[x["dim"]]
    held = held_by(its, T)
    mine = held[x["rank"]]
    assert torch.equal(got, x["x"].index_select(x["dim"], torch.tensor(mine))), "shard"
    for rank, tokens in enumerate(held):
        assert its.positions(T, rank).tolist() == tokens, "positions"
    assert its.perm(T).tolist() == [t for tokens in held for t in tokens], "perm"
    assert its.unit == unit_of(its)
    for length in (0, 1, T - 1, T, T + 1):
        least = its.pad_len(length)
        assert least % its.unit == 0
        assert least >= max(1, length)
        assert least - its.unit < max(1, length)
    owner = {t: (r, row) for r, tokens in enumerate(held) for row, t in enumerate(tokens)}
    every = torch.arange(T)
    owners, rows = its.owner(every, T).tolist(), its.local(every, T).tolist()
    assert list(zip(owners, rows, strict=True)) == [owner[t] for t in range(T)], "owner, local"
    token = d.numbers("token").randrange(T)
    assert (its.owner(token, T), its.local(token, T)) == owner[token]
    assert its.position(*owner[token], T) == token, "position"


def balance_call(d: Draw) -> Call:
    its = layout(d)
    T = unit_of(its) * d.choose("units", (1, 2)) if its.world < 8 else unit_of(its)
    blocks, numbers = T // BLOCK, d.numbers("lines")
    kind = d.choose("mask", ("lines", "blocks", "index"))
    mask: Any = np.tril(d.uniform("blocks", blocks, blocks).numpy() < 0.3)
    mask |= np.eye(blocks, dtype=bool)
    if kind == "index" and its.world == 1:
        call = index_call(d)
        mask, T = build_index(**call), call["q"].shape[1]
    elif kind != "blocks":
        mask = [
            (sorted(numbers.sample(range(T), numbers.randint(0, 9))),
             sorted({0, *numbers.sample(range(blocks), numbers.randint(0, min(9, blocks)))}))
            for _ in range(d.whole("heads", 1, 3))
        ]  # fmt: skip
    divisors = [n for n in range(1, its.world + 1) if its.world % n == 0]
    return {
        "mask": mask,
        "T": T,
        "layout": its,
        "inner_size": d.choose("inner_size", (None, *divisors)),
        "t": d.choose("t", (1.0, 0.5)),
        "x": d.choose("transfer", (0.0, 3.0, 100.0)),
        "x_outer": d.choose("outer transfer", (0.0, 7.0, 500.0)),
        "columns_last": d.flag("columns last"),
    }


def verify_balance(d: Draw, x: Call, report: Any) -> None:
    its, T = x["layout"], x["T"]
    world, inner = its.world, x.get("inner_size") or its.world
    work = np.zeros((world, world))
    late = np.zeros(world)
    step_of = {(r, (r // inner * inner + (r - s) % inner - s // inner * inner) % world): s
               for r in range(world) for s in range(world)}  # fmt: skip
    rank = {t // BLOCK: r for r, tokens in enumerate(held_by(its, T)) for t in tokens[::BLOCK]}
    tiles, columns = tiles_of(x["mask"], T)
    for i, j in tiles:
        work[rank[i], step_of[rank[i], rank[j]]] += 1
    for i, j in columns:
        if x["columns_last"]:
            late[rank[i]] += 1 / BLOCK
        else:
            work[rank[i], step_of[rank[i], rank[j]]] += 1 / BLOCK
    work[:, -1] += late
    np.testing.assert_allclose(report.work, work, rtol=1e-9, atol=1e-9)
    start, end = simulated(x["t"] * work, inner, x["x"], x["x_outer"])
    np.testing.assert_allclose(report.start, start, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(report.end, end, rtol=1e-9, atol=1e-9)
    total = [sum(row) for row in work]
    degrees = {
        "id_total": max(total) / (sum(total) / world),
        "id_step": sum(work.max(0)) / (sum(total) / world),
        "id_within": sum(max(row) / (sum(row) / world) for row in work) / world,
        "makespan": end.max() / (x["t"] * sum(total) / world),
    }
    for name, want in degrees.items():
        assert abs(getattr(report, name) - want) < 1e-9 * max(1, want), name
    assert f"makespan {degrees['makespan']:.3f}" in str(report)


def tiles_of(mask: Any, T: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Active tiles, and (row block, column's block) of columns that no slash covers there."""
    if isinstance(mask, np.ndarray):
        return [(int(i), int(j)) for i, j in zip(*np.nonzero(mask), strict=True)], []
    if hasattr(mask, "v_idx"):
        mask = [head for row in heads_of(mask) for head in row]
    blocks, tiles, columns = T // BLOCK, [], []
    for of_head, diagonals in mask:
        tiles += [(i, i - n) for n in diagonals for i in range(n, blocks)]
        columns += [
            (i, c // BLOCK)
            for c in of_head
            for i in range(c // BLOCK + 1, blocks)
            if i - c // BLOCK not in diagonals
        ]
    return tiles, columns


def simulated(work: Any, inner: int, x: float, x_outer: float) -> tuple[Any, Any]:
    """Start and end of each step of each rank, one at a time.

    Step s of a rank needs the chunk of its neighbour in the node, which both post when they begin
    step s - 1. The first step of a turn needs that of the node before, which both posted when they
    began the turn before.
    """
    world = len(work)
    start, end = np.zeros_like(work), np.zeros_like(work)
    for s in range(world):
        for r in range(world):
            if s:
                node, seat = divmod(r, inner)
                if s % inner:
                    source, posted, takes = node * inner + (seat - 1) % inner, s - 1, x
                else:
                    source, posted, takes = (r - inner) % world, s - inner, x_outer
                arrives = max(start[r, posted], start[source, posted]) + takes
                start[r, s] = max(end[r, s - 1], arrives)
            end[r, s] = start[r, s] + work[r, s]
    return start, end


TARGETS = {
    "sparse_ring.shard": Target(
        shard_call,
        shard,
        verify_shard,
        ("ContiguousLayout", "StripedLayout", "ZigZagLayout"),
        given=("its", "x=on meta"),
    ),
    "sparse_ring.balance_report": Target(
        balance_call, balance_report, verify_balance, ("balance_report",)
    ),
}
