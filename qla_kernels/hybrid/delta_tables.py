"""Tables with which the gated delta rule follows a prefix tree, built from a layout's nodes.

DeltaTables of qla_kernels.gdn.tree.tables says what each holds. All layers and the backward share
them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels import device
from qla_kernels.device_tables import Kept
from qla_kernels.dualkv.plan import SharedLayout, moved
from qla_kernels.errors import need
from qla_kernels.gdn.tree.autograd import TREE_OP
from qla_kernels.gdn.tree.tables import DeltaTables, moved_together, one_buffer, tree_tables


class PreparedTree(NamedTuple):
    """Tables of a layout, and the stream on which they were filled."""

    tables: DeltaTables
    kept: Kept[DeltaTables]


def prepare(layout: SharedLayout, output_final_state: bool) -> DeltaTables:
    """Returns the layout's tables; the first call builds and copies them.

    The copy to a GPU does not block the host. A call on another stream makes that stream wait for
    the copy; compiled code does not. Raises ValueError if the tables would have to be built inside
    compiled code or during the capture of a CUDA graph.
    """
    key = ("gdn", int(output_final_state))
    ready: PreparedTree | None = layout.further.get(key)
    if ready is None:
        ready = layout.further[key] = _built(layout, output_final_state)
    if torch.compiler.is_compiling():
        return ready.tables
    with device.of(layout.tout):
        return ready.kept.here()


def _built(layout: SharedLayout, output_final_state: bool) -> PreparedTree:
    if torch.compiler.is_compiling():
        raise ValueError(_not_prepared(output_final_state, "the function that is compiled"))
    with device.of(layout.tout):
        if layout.tout.is_cuda and device.capturing():
            raise ValueError(_not_prepared(output_final_state, "the capture of a CUDA graph"))
        bounds = [*layout.nodes[:, 0].tolist(), layout.num_tokens]
        built = tree_tables(bounds, parents(layout.nodes), output_final_state)
        there = moved(one_buffer(built), layout.tout.device)
        tables = moved_together(built, there)
        return PreparedTree(tables, Kept(tables, there))


def _not_prepared(output_final_state: bool, before: str) -> str:
    """Returns the text of an error: the tables are missing where they cannot be built."""
    final = ", output_final_state=True" if output_final_state else ""
    fix = f"call prepare_gated_delta_rule(layout{final}) before {before}"
    got = "the layout has no tables for it"
    return need(TREE_OP, got, "tables that the host built beforehand", fix)


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
