"""Builds the tables that tell the gated delta rule's kernels the shape of a prefix tree.

DeltaTables of qla_kernels.gdn.tree.tables says what each table holds. They are built on the host
from the nodes of a layout. All layers and the backward use the same tables.
"""

from functools import partial
from typing import cast

from torch import Tensor

from qla_kernels.dualkv.plan import SharedLayout, moved
from qla_kernels.gdn.tree.autograd import TREE_OP
from qla_kernels.gdn.tree.tables import DeltaTables, moved_together, one_buffer, tree_tables
from qla_kernels.hybrid.layouts import parents, tables_of
from qla_kernels.runtime.errors import need


def prepare(layout: SharedLayout, output_final_state: bool) -> DeltaTables:
    """Returns the layout's DeltaTables; the first call builds them.

    Raises ValueError if they would have to be built in compiled code or during the capture of a
    CUDA graph.

    Args:
        layout: the layout.
        output_final_state: whether the calls return the final state of each sequence.
    """

    def build() -> tuple[DeltaTables, Tensor]:
        bounds = [*layout.nodes[:, 0].tolist(), layout.num_tokens]
        on_host = tree_tables(bounds, parents(layout.nodes), output_final_state)
        buffer = moved(one_buffer(on_host), layout.tout.device)
        return moved_together(on_host, buffer), buffer

    key, missing = ("gdn", int(output_final_state)), partial(_not_prepared, output_final_state)
    return cast(DeltaTables, tables_of(layout, key, build, missing))


def _not_prepared(output_final_state: bool, before: str) -> str:
    """Returns the text of the error that says that the tables must be built before."""
    final = ", output_final_state=True" if output_final_state else ""
    fix = f"call prepare_gated_delta_rule(layout{final}) before {before}"
    got = "the layout has no tables for it"
    return need(TREE_OP, got, "tables that the host built beforehand", fix)
