"""Helpers of functions over a SharedLayout: its check, its tree, and the tables that it stores."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.dualkv.plan import SharedLayout
from qla_kernels.runtime import device
from qla_kernels.runtime.device_tables import Kept
from qla_kernels.runtime.errors import need


class PreparedTables(NamedTuple):
    """Tables of a layout, and a handle that makes other streams wait for them."""

    tables: Any
    kept: Kept[Any]


def check_layout(op: str, name: str, x: Tensor, layout: SharedLayout) -> None:
    """Raises ValueError unless the layout describes the tokens of x [B, T, ..], named `name`."""
    if not isinstance(layout, SharedLayout):
        got, fix = f"layout is of type {type(layout).__name__}", "pass batch.layout"
        raise ValueError(need(op, got, "a SharedLayout", fix))
    if x.shape[0] != 1 or x.shape[1] != layout.num_tokens:
        got = f"{name} has {x.shape[0]} rows of {x.shape[1]} tokens"
        needs = f"1 row of {layout.num_tokens} tokens, those of the layout"
        raise ValueError(need(op, got, needs, "pass one row for each packed token"))
    if layout.tout.device != x.device:
        got, fix = f"layout is on {layout.tout.device}", f"pass layout.to({name}.device)"
        raise ValueError(need(op, got, f"{x.device}, as {name}", fix))


def parents(nodes: Tensor) -> list[int]:
    """Returns the parent of each node, -1 for roots; `nodes` [n, 3] is SharedLayout.nodes.

    Nodes are in depth-first order, so a node's ancestors are the earlier nodes whose subtrees have
    not ended.
    """
    parents_of: list[int] = []
    path: list[tuple[int, int]] = []  # (tout, node)
    for node, (first, _, tout) in enumerate(nodes.tolist()):
        while path and path[-1][0] <= first:
            path.pop()
        parents_of.append(path[-1][1] if path else -1)
        path.append((tout, node))
    return parents_of


def tables_of(
    layout: SharedLayout,
    key: tuple[str, int],
    build: Callable[[], tuple[Any, Tensor]],
    missing: Callable[[str], str],
) -> Any:
    """Returns the layout's tables for `key`; the first call builds them and copies them.

    The copy to a GPU does not block the host. A call on another stream makes that stream wait for
    the copy; compiled code does not. Raises ValueError if the tables would have to be built inside
    compiled code or during the capture of a CUDA graph.

    Args:
        build: returns the tables on the layout's device, and the buffer that they are views of.
        missing: returns the error's text, given what the tables must be built before.
    """
    ready: PreparedTables | None = layout.further.get(key)
    if ready is None:
        if torch.compiler.is_compiling():
            raise ValueError(missing("the function that is compiled"))
        with device.of(layout.tout):
            if layout.tout.is_cuda and device.capturing():
                raise ValueError(missing("the capture of a CUDA graph"))
            tables, buffer = build()
            ready = layout.further[key] = PreparedTables(tables, Kept(tables, buffer))
    if torch.compiler.is_compiling():
        return ready.tables
    with device.of(layout.tout):
        return ready.kept.here()
