"""Builds the tables that tell the convolution's kernels which tokens a prefix tree shares.

qla_kernels.conv.ops.ConvTables says what each table holds. They are built on the host from the
nodes of a layout, take O(nodes) memory, and depend on the layout and on the width of the weight.
All layers and the backward use the same tables.
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
    """Returns the layout's ConvTables as a list; the first call for a width builds them.

    Raises ValueError if they would have to be built in compiled code or during the capture of a
    CUDA graph.
    """

    def build() -> tuple[list[Tensor], Tensor]:
        on_host = tree_tables(layout.nodes, layout.num_tokens, width)
        buffer = moved(torch.cat([table.flatten() for table in on_host]), layout.tout.device)
        views, start = [], 0
        for table in on_host:
            views.append(buffer[start : start + table.numel()].view(table.shape))
            start += table.numel()
        return views, buffer

    tables = tables_of(layout, ("conv", width), build, partial(_not_prepared, width))
    return cast(list[Tensor], tables)


def _not_prepared(width: int, before: str) -> str:
    """Returns the text of the error that says that the tables must be built before."""
    got = f"the layout has no tables for width {width}"
    fix = f"call prepare_conv1d(layout, {width}) before {before}"
    return need(OP, got, "tables that the host built beforehand", fix)


def tree_tables(nodes: Tensor, num_tokens: int, width: int) -> ConvTables:
    """Returns the tables of a prefix tree, on the host.

    Args:
        nodes: the field of that name of a SharedLayout.
        num_tokens: number of packed tokens, T.
        width: the width of the convolution's weight.
    """
    up, reach = parents(nodes), width - 1
    halo: list[list[int]] = []
    for parent in up:
        if parent < 0:
            halo.append([-1] * reach)
        else:  # the last of the parent's halo and of its tokens
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


def _numbers(values: list[int]) -> Tensor:
    """Returns the values as an int32 CPU tensor, whatever torch's default device is."""
    return torch.tensor(values, dtype=torch.int32, device="cpu")
