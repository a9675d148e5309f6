"""Tables with which the convolution follows a prefix tree, built on the host from a layout's nodes.

qla_kernels.conv.ops.ConvTables says what each holds. They take O(nodes) memory and depend on the
layout and on the width. All layers and the backward share them.
"""

from functools import partial
from typing import cast

import torch
from torch import Tensor

from qla_kernels.conv.ops import ConvTables
from qla_kernels.conv.shapes import GIVEN, KEPT
from qla_kernels.dualkv.plan import SharedLayout, moved
from qla_kernels.hybrid.layouts import parents, tables_of
from qla_kernels.runtime.errors import need

OP = "shared_prefix_conv1d"


def prepare(layout: SharedLayout, width: int) -> list[Tensor]:
    """Returns the fields of the layout's ConvTables, as `tables_of` does."""

    def build() -> tuple[list[Tensor], Tensor]:
        built = tree_tables(layout.nodes, layout.num_tokens, width)
        there = moved(torch.cat([table.flatten() for table in built]), layout.tout.device)
        views, start = [], 0
        for table in built:
            views.append(there[start : start + table.numel()].view(table.shape))
            start += table.numel()
        return views, there

    found = tables_of(layout, ("conv", width), build, partial(_not_prepared, width))
    return cast(list[Tensor], found)


def _not_prepared(width: int, before: str) -> str:
    """Returns the text of an error: the tables are missing where they cannot be built."""
    got = f"the layout has no tables for width {width}"
    fix = f"call prepare_conv1d(layout, {width}) before {before}"
    return need(OP, got, "tables that the host built beforehand", fix)


def tree_tables(nodes: Tensor, num_tokens: int, width: int) -> ConvTables:
    """Returns the tables of a tree on the host; `nodes` are those of a SharedLayout."""
    up, reach = parents(nodes), width - 1
    halo: list[list[int]] = []
    for parent in up:
        if parent < 0:
            halo.append([-1] * reach)
        else:  # the end of the parent's line: its halo, then its tokens
            first, end, _ = nodes[parent].tolist()
            own = list(range(max(first, end - reach), end))
            halo.append([*halo[parent], *own][-reach:])
    inner = sorted(set(up) - {-1})
    rows = torch.full((len(up), 2), -1, dtype=torch.int32, device="cpu")
    shared: list[int] = []
    for node in inner:
        first, end, _ = nodes[node].tolist()
        rows[node, KEPT] = len(shared)
        shared += range(max(first, end - reach), end)
    readers: dict[int, list[int]] = {token: [] for token in shared}
    row = len(shared)
    for node in range(len(up)):
        for token in halo[node]:
            if token >= 0:
                readers[token].append(row)
                rows[node, GIVEN] = row
                row += 1
    counts = [0, *(len(readers[token]) for token in shared)]
    return ConvTables(
        _numbers([*nodes[:, 0].tolist(), num_tokens]),
        _numbers([token for line in halo for token in line]).view(-1, reach),
        rows,
        _numbers(shared),
        _numbers(counts).cumsum(0, dtype=torch.int32),
        _numbers([row for token in shared for row in readers[token]]),
    )


def _numbers(found: list[int]) -> Tensor:
    """Returns an int32 CPU tensor, whatever torch's default device is."""
    return torch.tensor(found, dtype=torch.int32, device="cpu")
