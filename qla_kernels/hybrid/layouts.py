"""What the functions over a SharedLayout share: its check, its tree, and tables that it keeps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels import device
from qla_kernels.device_tables import Kept
from qla_kernels.dualkv.plan import SharedLayout
from qla_kernels.errors import need


class PreparedTables(NamedTuple):
    """Tables of a layout, and the stream on which they were filled."""

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
    """Returns each node's parent, or -1 for a root, from (first token, end, tout) of each [n, 3].

    Nodes are in depth-first order and none is empty, as in SharedLayout.nodes: a node's ancestors
    are the earlier nodes whose subtrees have not ended.
    """
    found: list[int] = []
    path: list[tuple[int, int]] = []  # (tout, node)
    for node, (first, _, tout) in enumerate(nodes.tolist()):
        while path and path[-1][0] <= first:
            path.pop()
        found.append(path[-1][1] if path else -1)
        path.append((tout, node))
    return found


def tables_of(
    layout: SharedLayout,
    key: tuple[str, int],
    build: Callable[[], tuple[Any, Tensor]],
    missing: Callable[[str], str],
) -> Any:
    """Returns the tables that the layout keeps under `key`; the first call builds and copies them.

    The copy to a GPU does not block the host. A call on another stream makes that stream wait for
    the copy; compiled code does not. Raises ValueError if the tables would have to be built inside
    compiled code or during the capture of a CUDA graph.

    Args:
        build: returns the tables on the layout's device, and the buffer that they are views of.
        missing: returns the text of that error, for what the call has to come before.
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
