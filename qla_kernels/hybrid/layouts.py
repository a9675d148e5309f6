"""Helpers of the functions that take a SharedLayout: its check, its tree, its stored tables."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.dualkv.plan import SharedLayout
from qla_kernels.runtime import device
from qla_kernels.runtime.device_tables import Kept
from qla_kernels.runtime.errors import need


class PreparedTables(NamedTuple):
    """Tables of a layout, and a handle that makes a stream wait until they are on the GPU."""

    tables: Any
    kept: Kept[Any]


def check_layout(op: str, name: str, x: Tensor, layout: SharedLayout) -> None:
    """Raises ValueError unless x is [1, T, ..] with the T tokens of the layout, on its device.

    `op` and `name` are the function and the argument that the error names.
    """
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
    """Returns the index of each node's parent, or -1 for a root.

    `nodes` is the field of that name of a SharedLayout. A node is a run of tokens, such as a prompt
    or a response, and the parent of a response is its prompt. Nodes are in depth-first order, so a
    node's ancestors are the earlier nodes whose subtrees have not ended.
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
    """Returns tables that a layout holds under `key`; the first call builds them.

    The copy to a GPU does not block the host. A call on another stream makes that stream wait for
    the copy, except in compiled code. Raises ValueError if the tables would have to be built inside
    compiled code or during the capture of a CUDA graph.

    Args:
        layout: the layout.
        key: the name of the kernels and a number, such as ("conv", width).
        build: returns the tables on the layout's device, and the buffer that they are views of.
        missing: returns the text of the error; its argument says what was going on, such as "the
            capture of a CUDA graph".
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
