"""Attention heads to look at: synthetic ones, or q and k that a model's owner dumped.

A synthetic head is the simplest that has both kinds of lines. Queries and keys scatter around one
mean vector, and are rotated by their positions: the expected score is then a function of the
distance alone, which makes slashes. A few keys lean on the mean in the pairs that rotate slowest,
so they are seen from everywhere, which makes verticals.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qla_kernels.sparse_ring import VerticalSlash, VSIndex
from qla_kernels.sparse_ring.balance import Lines
from qla_kernels.sparse_ring.cpu import window_lse, window_mass
from qla_kernels.sparse_ring.select import cut, last_block, select
from qla_kernels.sparse_ring.shapes import BLOCK

D, PAIRS = 128, 64
BASE = 1e6  # of the rotation
SLOW = 8  # pairs of the lowest frequencies, which outliers lean on
# (seed, RMS size of the mean): from one wide diagonal to many thin ones
HEADS = ((2, 1.3), (4, 1.2), (5, 1.2), (6, 1.3), (7, 1.3), (2, 1.4), (3, 1.4), (0, 1.3))


KINDS = ("columns", "diagonals")


class Head(NamedTuple):
    name: str
    q: Tensor  # [rows, D], rotated
    rows: Tensor  # [rows], which tokens these queries are
    k: Tensor  # [T, D], rotated

    def scores(self, some: slice) -> Tensor:
        """Of some queries, [rows, T], causal."""
        S: Tensor = self.q[some] @ self.k.T * self.q.shape[1] ** -0.5
        return S.masked_fill(torch.arange(len(self.k)) > self.rows[some, None], -torch.inf)


def synthetic(T: int, seed: int, mean: float, rows: Tensor, outliers: int = 64) -> Head:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    center = mean * normal(D)
    sigma = 0.7
    k = center + sigma * normal(T, D)
    leaning = center.view(2, PAIRS).clone()
    leaning[:, :-SLOW] = 0
    k[torch.randperm(T, generator=generator)[:outliers]] += 3.0 * leaning.flatten()
    q = center + sigma * normal(len(rows), D)
    return Head(f"seed {seed}, mean {mean}", rotated(q, rows), rows, rotated(k, torch.arange(T)))


def rotated(x: Tensor, position: Tensor) -> Tensor:
    angle = position[:, None] * BASE ** -(torch.arange(PAIRS, dtype=torch.float64) / PAIRS)
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x[:, :PAIRS], x[:, PAIRS:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], 1)


def heads(T: int, random_rows: int = 0) -> Iterator[Head]:
    """Eight heads, each with the queries of the last block and of some random tokens before."""
    window = torch.arange(T - BLOCK, T)
    for seed, mean in HEADS:
        draw = torch.Generator().manual_seed(1000 + seed)
        others = torch.randint(T // 8, T - BLOCK, (random_rows,), generator=draw)
        yield synthetic(T, seed, mean, torch.cat([window, others]))


def dumped(file: Path) -> Iterator[Head]:
    """A dict of q [T, H, D] and k [T, Hk, D] after rotation, saved by torch.save; any D."""
    saved = torch.load(file, weights_only=True)
    q, k = saved["q"].float(), saved["k"].float()
    T, H = k.shape[0] // BLOCK * BLOCK, q.shape[1]
    rows = torch.arange(T - BLOCK, T)
    for h in range(H):
        yield Head(f"head {h}", q[rows, h], rows, k[:T, h * k.shape[1] // H])


def save(file: Path, T: int, lines: dict[str, Lines]) -> None:
    """Floats choose differently elsewhere; what was chosen here is kept."""
    arrays: dict[str, Any] = {}
    for name, pair in lines.items():
        for kind, given in zip(KINDS, pair, strict=True):
            arrays[f"{name}/{kind}"] = np.asarray(given, np.int32)
    np.savez_compressed(file, T=np.asarray(T), **arrays)


def load(file: Path) -> tuple[int, dict[str, Lines]]:
    """T, and the lines of each head by its name."""
    saved = np.load(file)
    names = dict.fromkeys(key.rpartition("/")[0] for key in saved if key != "T")
    lines = {n: tuple(saved[f"{n}/{kind}"].tolist() for kind in KINDS) for n in names}
    return int(saved["T"]), lines


def index_of(head: Head, pattern: VerticalSlash) -> VSIndex:
    """What `build_index` chooses, of the window's queries alone."""
    T = len(head.k)
    q, k = head.q[None, :BLOCK, None], head.k[None, :, None]
    position = torch.arange(T)
    window = (torch.arange(T // BLOCK), last_block(T))
    scale = head.q.shape[1] ** -0.5
    mass = window_mass(q, k, *window, window_lse(q, k, *window, scale), scale)
    tile = mass.view(1, 1, -1, BLOCK).sum(-1, dtype=torch.int32)
    return select(cut(mass, position, tile, T, pattern), tile, T, T, pattern)


def recall(head: Head, index: VSIndex, some: slice) -> float:
    """Share of the attention of some rows that the lines hold."""
    P = head.scores(some).softmax(-1)
    token = torch.arange(len(head.k))
    distance = (head.rows[some, None] // BLOCK - token // BLOCK).clamp(min=0)
    columns = torch.zeros(len(token) + 1, dtype=torch.bool)
    columns[index.v_idx[0, 0].long()] = True
    seen = index.diagonals()[0, 0][distance] | columns[:-1]
    return float((P * seen).sum(-1).mean())
