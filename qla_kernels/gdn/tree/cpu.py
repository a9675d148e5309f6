"""The operators over a tree on CPU tensors: they run the reference."""

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.cpu import activated, raw_gradients, swapped
from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.gdn.tree.ops import IncomingTree, SavedTree, TreeForward
from qla_kernels.gdn.tree.tables import DeltaTables
from qla_kernels.runtime.cpu import reference
from qla_kernels.tile.constants import CHUNK


@torch.no_grad()
def gdn_tree_fwd(call: Call, tables: DeltaTables, options: Options) -> TreeForward:
    nodes, rows = _tree(tables)
    g, beta = activated(call, options)
    with torch.autocast("cpu", enabled=False):
        done = reference().gdn.tree_chunked(
            call.q, call.k, call.v, g, beta, nodes, rows, call.scale, CHUNK
        )
    states = swapped(done.states, options.state_v_first)
    assert states is not None, "swapped returns None for None alone"
    kept = (done.g_cum, done.A) if options.is_train else (None, None)
    return TreeForward(done.o, states, *kept)


@torch.no_grad()
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
    with torch.autocast("cpu", enabled=False):
        grads = gdn.tree_chunked_backward(
            call.q, call.k, call.v, beta, done, incoming.do, nodes, rows, dstates, call.scale
        )
    gates = raw_gradients(call, options, grads.dbeta, grads.dg)
    dbeta, dg, dA_log, ddt_bias = gates
    return GdnBackward(grads.dq, grads.dk, grads.dv, dbeta, dg, None, dA_log, ddt_bias)


def _tree(tables: DeltaTables) -> tuple[Tensor, Tensor]:
    """Returns nodes and rows as the reference takes them."""
    return tables.nodes[:, :3].long(), tables.nodes[:, 3].long()
