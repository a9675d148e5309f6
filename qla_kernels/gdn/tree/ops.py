"""The torch.library operators over a prefix tree.

    gdn_tree_fwd, gdn_tree_bwd   gdn_fwd and gdn_bwd; nodes start from their parents' end states

A call has no initial state and no cu_seqlens: the tables say which tokens a node has, and nodes
cover all tokens. B is 1. CPU tensors run the reference, CUDA tensors tree/launch.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.ops import (
    GdnBackward,
    activated,
    empty_gradients,
    raw_gradients,
    state_dtype,
    swapped,
)
from qla_kernels.gdn.tree.tables import DeltaTables
from qla_kernels.runtime.cpu import reference
from qla_kernels.runtime.op import op
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


LAUNCHES = "qla_kernels.gdn.tree.launch"


@op(LAUNCHES, _fake_fwd)
def gdn_tree_fwd(call: Call, tables: DeltaTables, options: Options) -> TreeForward:
    nodes, rows = _tree(tables)
    g, beta = activated(call, options)
    done = reference().gdn.tree_chunked(
        call.q, call.k, call.v, g, beta, nodes, rows, call.scale, CHUNK
    )
    states = swapped(done.states, options.state_v_first)
    assert states is not None, "swapped returns None for None alone"
    kept = (done.g_cum, done.A) if options.is_train else (None, None)
    return TreeForward(done.o, states, *kept)


@op(LAUNCHES, lambda call, tables, saved, *_: empty_gradients(call, saved.g_cum, None))
def gdn_tree_bwd(
    call: Call, tables: DeltaTables, saved: SavedTree, incoming: IncomingTree, options: Options
) -> GdnBackward:
    gdn, (nodes, rows) = reference().gdn, _tree(tables)
    states = swapped(saved.states, options.state_v_first)
    dfinal = swapped(incoming.dfinal, options.state_v_first)
    done = gdn.TreeForward(saved.g_cum, saved.A, call.v, states)  # its o is not read
    dstates = None
    if states is not None and dfinal is not None:
        dstates = torch.zeros_like(states)
        dstates[tables.inner.shape[0] :] = dfinal
    _, beta = activated(call, options)
    grads = gdn.tree_chunked_backward(
        call.q, call.k, call.v, beta, done, incoming.do, nodes, rows, dstates, call.scale
    )
    gates = raw_gradients(call, options, grads.dbeta, grads.dg)
    dbeta, dg, dA_log, ddt_bias = gates
    return GdnBackward(grads.dq, grads.dk, grads.dv, dbeta, dg, None, dA_log, ddt_bias)


def _tree(tables: DeltaTables) -> tuple[Tensor, Tensor]:
    """Returns nodes and rows as the reference takes them."""
    return tables.nodes[:, :3].long(), tables.nodes[:, 3].long()
