"""A decoding step on a packed projection: q, k and v of one token a sequence in one row.

Inference engines hold them like this after their convolution, beside raw gates and betas.
"""

import torch
from torch import Tensor

from qla_kernels.arguments import flag
from qla_kernels.derivatives import refuse_forward_mode
from qla_kernels.errors import need
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.decode.ops import Pool, gdn_recurrent_slots
from qla_kernels.gdn.decode.validate import (
    expect_indices,
    expect_null_slot,
    expect_out,
    expect_pool,
    recurrent_refusal,
)
from qla_kernels.gdn.keywords import scale_of
from qla_kernels.gdn.validate import Gate, check_activations, check_tensors
from qla_kernels.programs import RECORD, Programs
from qla_kernels.sm90 import expect_tensors, require

PACKED_OP = "packed_decode_gated_delta_rule"
PACKED = Programs(PACKED_OP)


@torch.no_grad()
def packed_decode_gated_delta_rule(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    initial_state: Tensor,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    null_slot: int = -1,
    out: Tensor | None = None,
) -> Tensor:
    """Runs one token of each of N sequences, from and into a pool of states; one launch.

    The same as `fused_recurrent_gated_delta_rule` with use_gate_in_kernel and
    use_beta_sigmoid_in_kernel. Not differentiable.

    Args:
        mixed_qkv: [N, 2 H K + HV V], of each sequence its H queries, H keys and HV values; any row
            stride that is a multiple of 16 bytes. H follows from the other sizes.
        a, b: [N, HV], the inputs of the gate and of beta's sigmoid.
        A_log, dt_bias: [HV]; dt_bias may be None.
        initial_state: the pool [slots, HV, V, K], or [slots, HV, K, V] without state_v_first; fp32,
            or bf16 with mixed_qkv in bf16. Slots may lie any multiple of 4 numbers apart.
        state_indices: [N], as in `fused_recurrent_gated_delta_rule`, and null_slot as well.
        scale: K ** -0.5 if None.
        use_qk_l2norm_in_kernel, allow_neg_eigval: as in `fused_recurrent_gated_delta_rule`.
        out: a contiguous [N, 1, HV, V] in mixed_qkv's dtype; o is written to it and returned.

    Returns:
        o [N, 1, HV, V].

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: this version cannot run the call.
    """
    given = (
        mixed_qkv, a, b, A_log, dt_bias, initial_state, state_indices, scale,
        use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, null_slot, out,
    )  # fmt: skip
    found = None if torch.compiler.is_compiling() else PACKED.find(*given)
    if type(found) is tuple:
        for x in (initial_state, out):
            if x is not None:
                torch.autograd.graph.increment_version(x)
        return out if out is not None else found[0]
    options = Options(
        flag(PACKED_OP, "use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=flag(PACKED_OP, "allow_neg_eigval", allow_neg_eigval),
        state_v_first=flag(PACKED_OP, "state_v_first", state_v_first),
    )
    _, _, v, *_ = q_k_v = split(PACKED_OP, mixed_qkv, initial_state, options.state_v_first)
    expect_tensors(PACKED_OP, a=a, b=b)
    g, beta = (x.unsqueeze(1) if x.dim() == 2 else x for x in (a, b))
    check_tensors(PACKED_OP, *q_k_v, g, beta)
    check_activations(PACKED_OP, v, Gate(True, A_log, dt_bias), options)
    expect_pool(PACKED_OP, q_k_v[0], v, initial_state, options.state_v_first)
    expect_indices(PACKED_OP, "state_indices", state_indices, v.shape[:1], v)
    expect_null_slot(PACKED_OP, null_slot)
    if out is not None:
        expect_out(PACKED_OP, out, v)
    require(recurrent_refusal(*q_k_v, pool=initial_state, op=PACKED_OP))
    scale = scale_of(PACKED_OP, scale, q_k_v[0])
    refuse_forward_mode(PACKED_OP, mixed_qkv, a, b, A_log, dt_bias, initial_state, out)

    def run() -> tuple[Tensor, ...]:
        q, k, v = split(PACKED_OP, mixed_qkv, initial_state, options.state_v_first)
        call = Call(
            q, k, v, a.unsqueeze(1), b.unsqueeze(1), scale, None, None, None, A_log, dt_bias
        )
        o = v.new_empty(v.shape) if out is None else out
        gdn_recurrent_slots(call, Pool(initial_state, state_indices, o, null_slot), options)
        return (o,) if out is None else ()

    done = PACKED.record(given, run) if found is RECORD else run()
    return out if out is not None else done[0]


def split(
    op: str, mixed_qkv: Tensor, states: Tensor, state_v_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q and k [N, 1, H, K] and v [N, 1, HV, V], views of a packed projection."""
    expect_tensors(op, mixed_qkv=mixed_qkv, initial_state=states)
    if mixed_qkv.dim() != 2 or states.dim() != 4:
        got = f"mixed_qkv has shape {tuple(mixed_qkv.shape)}, the pool {tuple(states.shape)}"
        needs = "[N, 2 H K + HV V] and a pool of four dimensions"
        raise ValueError(need(op, got, needs, "reshape them"))
    (N, width), (HV, V, K) = mixed_qkv.shape, states.shape[1:]
    if not state_v_first:
        V, K = K, V
    keys = width - HV * V
    if K == 0 or keys <= 0 or keys % (2 * K):
        got = f"mixed_qkv has {width} columns"
        needs = f"2 H K + HV V with K={K}, HV={HV} and V={V}"
        raise ValueError(need(op, got, needs, "pass q, k and v of every head, in this order"))
    sizes = [keys // 2, keys // 2, HV * V]
    q, k, v = torch.split(mixed_qkv, sizes, 1)
    return q.view(N, 1, -1, K), k.view(N, 1, -1, K), v.view(N, 1, HV, V)
