"""The operators over a prefix tree as one differentiable function."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn.autograd import gradients, normalised, restored, save, without_aliases
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.gdn.tree import ops
from qla_kernels.gdn.tree.tables import DeltaTables
from qla_kernels.runtime.derivatives import refuse_second_derivative
from qla_kernels.runtime.programs import Programs

TREE_OP = "shared_prefix_gated_delta_rule"

TREE_FORWARDS, TREE_BACKWARDS = Programs(f"{TREE_OP}, forward"), Programs(f"{TREE_OP}, backward")


def over_tree(call: Call, tables: DeltaTables, options: Options) -> tuple[Tensor, Tensor | None]:
    """Runs a checked call over a tree, differentiable if `options.is_train`.

    Returns o [1, T, HV, V], and the end states of the leaves if the tables keep them, else None.
    """
    if options.is_train:
        if options.use_qk_l2norm_in_kernel:
            call = normalised(call, True)
        o, final = GatedDeltaTree.apply(  # type: ignore[no-untyped-call]
            *without_aliases(call), *tables, options
        )
        return o, final
    done = TREE_FORWARDS.run(_forward, (call, tables, options), ops.TreeForward)
    return done.o, _final(done.states, tables, options)


def _forward(call: Call, tables: DeltaTables, options: Options) -> ops.TreeForward:
    if options.use_qk_l2norm_in_kernel and not options.is_train:
        call = normalised(call, False)
    done: ops.TreeForward = ops.gdn_tree_fwd(call, tables, options)
    return done


def _final(states: Tensor, tables: DeltaTables, options: Options) -> Tensor | None:
    """Returns the end states of the leaves, which are the last rows, or None unless asked for."""
    if not options.output_final_state:
        return None
    return states[tables.inner.shape[0] :].clone() if tables.inner.shape[0] else states


class GatedDeltaTree(torch.autograd.Function):
    """Applies gdn_tree_fwd, with gdn_tree_bwd as its derivative.

    The arguments are the fields of a Call and of DeltaTables, and Options. Saves the inputs, g_cum
    and A, as GatedDeltaRule does, and the end states of nodes with children: 4 K V bytes for each
    such node and value head.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, options = arguments
        call, tables = (
            Call(*tensors[: len(Call._fields)]),
            DeltaTables(*tensors[len(Call._fields) :]),
        )
        done = TREE_FORWARDS.run(_forward, (call, tables, options), ops.TreeForward)
        ctx.set_materialize_grads(False)
        ctx.options = options
        save(ctx, call, done.g_cum, done.A, done.states, *tables)
        return done.o, _final(done.states, tables, options)

    @staticmethod
    @refuse_second_derivative(TREE_OP)
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        call, results = restored(ctx)
        num = len(ops.SavedTree._fields)
        saved, tables = ops.SavedTree(*results[:num]), DeltaTables(*results[num:])
        if do is None:  # only the final states were used
            do = call.v.new_zeros(()).expand(call.v.shape)
        records = call, tables, saved, ops.IncomingTree(do, dfinal), ctx.options
        done = TREE_BACKWARDS.run(ops.gdn_tree_bwd, records, GdnBackward)
        return *gradients(ctx, call, done), *[None] * len(tables), None
