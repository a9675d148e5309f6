"""The torch.library operators over a prefix tree.

    gdn_tree_fwd, gdn_tree_bwd   gdn_fwd and gdn_bwd; nodes start from their parents' end states

A call has no initial state and no cu_seqlens: the tables say which tokens a node has, and nodes
cover all tokens. B is 1. CPU tensors go to tree/cpu.py, CUDA tensors to tree/launch.py.
"""

from typing import NamedTuple

from torch import Tensor

from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.ops import GdnBackward, empty_gradients, state_dtype
from qla_kernels.gdn.tree.tables import DeltaTables
from qla_kernels.runtime.op import define_on_records, implementations
from qla_kernels.tile.constants import CHUNK


class TreeForward(NamedTuple):
    """Results of gdn_tree_fwd; fp32 is fp64 where q is fp64."""

    o: Tensor  # [1, T, HV, V] in q's dtype
    states: Tensor  # [rows, HV, K, V], or [.., V, K] if state_v_first; fp32: see DeltaTables
    g_cum: Tensor | None  # as in gdn_fwd's results
    A: Tensor | None

    def flat(self) -> tuple[Tensor | None, ...]:
        return self


class SavedTree(NamedTuple):
    """Results of a forward that its backward needs."""

    g_cum: Tensor  # [1, T, HV] fp32
    A: Tensor  # [1, T, HV, 64]
    states: Tensor


class IncomingTree(NamedTuple):
    """The gradients that a backward starts from."""

    do: Tensor  # [1, T, HV, V], any strides
    dfinal: Tensor | None  # [leaves, HV, K, V], of the last rows of `states`


def _fake_fwd(call: Call, tables: DeltaTables, options: Options) -> TreeForward:
    q = call.q
    B, T, HV, V = call.v.shape
    wide = state_dtype(q)
    return TreeForward(
        o=q.new_empty(call.v.shape),
        states=q.new_empty(tables.num_rows, HV, *options.state_size(q.shape[-1], V), dtype=wide),
        g_cum=q.new_empty(call.g.shape, dtype=wide) if options.is_train else None,
        A=q.new_empty(B, T, HV, CHUNK) if options.is_train else None,
    )


def _fake_bwd(
    call: Call, tables: DeltaTables, saved: SavedTree, incoming: IncomingTree, options: Options
) -> GdnBackward:
    return empty_gradients(call, saved.g_cum, None)


TREE_HOMES = "qla_kernels.gdn.tree.launch", "qla_kernels.gdn.tree.cpu"
gdn_tree_fwd = define_on_records(
    "gdn_tree_fwd",
    (Call, DeltaTables, Options),
    TreeForward,
    _fake_fwd,
    *implementations("gdn_tree_fwd", *TREE_HOMES),
)
gdn_tree_bwd = define_on_records(
    "gdn_tree_bwd",
    (Call, DeltaTables, SavedTree, IncomingTree, Options),
    GdnBackward,
    _fake_bwd,
    *implementations("gdn_tree_bwd", *TREE_HOMES),
)
