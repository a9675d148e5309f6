"""Tables with which the gated delta rule follows a prefix tree, built from a layout's nodes.

DeltaTables of qla_kernels.gdn.tree.tables says what each holds. All layers and the backward share
them.
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
    """Returns the layout's tables, as `tables_of` does."""

    def build() -> tuple[DeltaTables, Tensor]:
        bounds = [*layout.nodes[:, 0].tolist(), layout.num_tokens]
        built = tree_tables(bounds, parents(layout.nodes), output_final_state)
        there = moved(one_buffer(built), layout.tout.device)
        return moved_together(built, there), there

    key, missing = ("gdn", int(output_final_state)), partial(_not_prepared, output_final_state)
    return cast(DeltaTables, tables_of(layout, key, build, missing))


def _not_prepared(output_final_state: bool, before: str) -> str:
    """Returns the text of an error: the tables are missing where they cannot be built."""
    final = ", output_final_state=True" if output_final_state else ""
    fix = f"call prepare_gated_delta_rule(layout{final}) before {before}"
    got = "the layout has no tables for it"
    return need(TREE_OP, got, "tables that the host built beforehand", fix)
