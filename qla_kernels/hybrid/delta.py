"""The public function `shared_prefix_gated_delta_rule`: the rule over shared prompts."""

import torch
from torch import Tensor

from qla_kernels.dualkv.plan import SharedLayout
from qla_kernels.gdn import contents
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.keywords import checked_flags, scale_of
from qla_kernels.gdn.tree.autograd import TREE_OP, over_tree
from qla_kernels.gdn.validate import (
    Gate,
    check_activations,
    check_tensors,
    refusal,
    wants_gradients,
)
from qla_kernels.hybrid.delta_tables import prepare
from qla_kernels.hybrid.layouts import check_layout
from qla_kernels.runtime.arguments import flag
from qla_kernels.runtime.contents import checks_contents
from qla_kernels.runtime.derivatives import refuse_forward_mode
from qla_kernels.runtime.sm90 import require


def shared_prefix_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    layout: SharedLayout,
    *,
    scale: float | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gated delta rule over packed sequences that store shared prefixes once.

    A response starts from the final state of its prompt, and a prompt starts from a state of 0. In
    general the layout is a forest of nodes; a node is a run of tokens, such as a prompt or a
    response, and starts from the final state of its parent. Results and gradients equal those of
    running `chunk_gated_delta_rule` on each sequence alone; the gradient of a shared token is the
    sum over the sequences that contain it. Differentiable once, in every tensor; two runs give the
    same bits. Dtypes and strides are those of `chunk_gated_delta_rule`.

    The final states of nodes with children are saved for the backward: 4 * K * V bytes per such
    node and value head. Final states of other nodes are written only with output_final_state.

    On a GPU the first call with a layout builds the kernels' index tables on the host. Call
    `prepare_gated_delta_rule` to build them earlier; torch.compile and CUDA graph captures require
    this.

    Args:
        q, k: [1, T, H, K] packed tokens.
        v: [1, T, HV, V].
        g, beta: [1, T, HV], natural log of each token's decay, and step size.
        layout: which tokens form which sequence, on q's device: the `layout` of a `SharedBatch`, or
            SharedLayout.from_forest(..).
        scale: factor of q; K ** -0.5 if None.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norm over K first.
        use_beta_sigmoid_in_kernel: use sigmoid(beta); with allow_neg_eigval 2 * sigmoid(beta).
        state_v_first: final states are [N, HV, V, K].
        use_gate_in_kernel, A_log, dt_bias: g holds the input of the gate; use
            -exp(A_log) * softplus(g + dt_bias), with A_log and dt_bias (0 if None) of shape [HV].

    Returns:
        o [1, T, HV, V] in q's dtype, and the final states in fp32 (fp64 where q is fp64), or None.
        Final states are [N, HV, K, V], one per node without children, in packed order. A response
        without tokens has no node; the padding of a layout with `pad_to` has one.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: the arguments fit, but this version cannot run them; see
            `qla_kernels.gdn.refusal`.
    """
    gate = Gate(flag(TREE_OP, "use_gate_in_kernel", use_gate_in_kernel), A_log, dt_bias)
    recorded = wants_gradients((q, k, v, g, beta, *gate.parameters()))
    options = checked_flags(
        TREE_OP,
        Options(
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            output_final_state=output_final_state,
            is_train=recorded,
        ),
    )
    check_tensors(TREE_OP, q, k, v, g, beta)
    check_activations(TREE_OP, v, gate, options)
    check_layout(TREE_OP, "q", q, layout)
    require(refusal(q, k, v, op=TREE_OP))
    call = Call(q, k, v, g, beta, scale_of(TREE_OP, scale, q), None, None, None, *gate.parameters())
    refuse_forward_mode(TREE_OP, *call)
    if checks_contents() and not torch.compiler.is_compiling():
        contents.check_contents(TREE_OP, call)
    return over_tree(call, prepare(layout, options.output_final_state), options)


def prepare_gated_delta_rule(layout: SharedLayout, output_final_state: bool = False) -> None:
    """Builds the index tables that `shared_prefix_gated_delta_rule` needs for a layout.

    Otherwise the first call with the layout builds them, which it cannot do in compiled code or
    while a CUDA graph is captured.

    Args:
        layout: the layout of the calls, which will hold the tables.
        output_final_state: the value that the calls will pass.
    """
    prepare(layout, flag(TREE_OP, "output_final_state", output_final_state))
