"""The public function that verifies draft tokens and saves the state after each of them."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.decode.ops import VERIFY_OP, Drafts, gdn_verify
from qla_kernels.gdn.decode.validate import (
    expect_out,
    recurrent_refusal,
    refused_states,
)
from qla_kernels.gdn.keywords import checked_flags, scale_of
from qla_kernels.gdn.validate import Gate, check_activations, check_tensors
from qla_kernels.runtime.arguments import check_null_slot, flag
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.programs import RECORD, Programs
from qla_kernels.runtime.signature import layouts
from qla_kernels.runtime.sm90 import require

VERIFYING = Programs(VERIFY_OP)
CALL = layouts(
    "q [B, T, H, K]; initial_state [slots, HV, {K, V}] float; state_indices [N] or [N, steps] int;"
    "num_accepted_tokens [N] int?; checkpoints [rows, S, HV, {K, V}] as initial_state?;"
    "checkpoint_indices [N] int?; parents [N, columns] int?",
    "N HV V",
    checkpoints="allocate them like the pool",
)


@torch.no_grad()
def verify_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    state_indices: Tensor,
    *,
    num_accepted_tokens: Tensor | None = None,
    checkpoints: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    parents: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    null_slot: int = -1,
    out: Tensor | None = None,
) -> Tensor:
    """Runs the gated delta rule on draft tokens of N sequences, and saves the state after each.

    For speculative decoding, with states in a cache: the next call starts from the state after the
    last accepted token. The shape of state_indices says where states are saved: with [N, S] in
    slots of the cache; with [N] in `checkpoints`, if passed, and the cache is not changed. One
    launch; not differentiable.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV], natural log of each token's decay.
        beta: [B, T, HV], step size of each token.
        initial_state: the cache [slots, HV, K, V], or [slots, HV, V, K] if state_v_first.
        state_indices: [N, S] or [N], int32 or int64.
            [N, S]: the state after token t of sequence n overwrites slot state_indices[n, t]; all
            slots must differ. The sequence starts from slot state_indices[n, num_accepted_tokens[n]
            - 1], where the previous call saved the state after the last accepted token.
            [N]: sequence n starts from slot state_indices[n]. Several sequences may start from one
            slot.
            A sequence whose first slot is at most null_slot is padding: o is 0, and no state is
            saved. If a later slot is at most null_slot, the state of that token is not saved.
        num_accepted_tokens: [N], with state_indices [N, S]: from 1 to S; 1 if None.
        checkpoints: [rows, S, HV, K, V], or [.., V, K] if state_v_first, in the cache's dtype, only
            with state_indices [N]: the state after token t overwrites checkpoints[row, t].
        checkpoint_indices: [N], with checkpoints: the row of each sequence. Two sequences must not
            share a row. A negative row marks padding.
        parents: [N, S] or fewer columns, with checkpoints, if a sequence's drafts are a tree. Token
            t > 0 starts from the state after token parents[n, t] < t, or from the sequence's slot
            if parents[n, t] is negative. parents[n, 0] is not read. None: each token starts from
            the state after the token before.
        scale: factor of q; K ** -0.5 if None.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norm over K first, without rounding.
        use_gate_in_kernel, A_log, dt_bias: g holds the input of the gate; use
            -exp(A_log) * softplus(g + dt_bias), with A_log and dt_bias (0 if None) of shape [HV].
        use_beta_sigmoid_in_kernel: use sigmoid(beta); with allow_neg_eigval 2 * sigmoid(beta).
        cu_seqlens: [N + 1], the bounds of N packed sequences; B must then be 1. None: each batch
            row is a sequence, and N is B.
        null_slot: -1, or 0 if slot 0 of the cache is reserved for padding.
        out: a contiguous tensor like v; o is written to `out`, and `out` is returned.

    A sequence may have at most S tokens. On a CPU, and under QLA_CHECK=1, numbers that are out of
    range or do not fit in int32 raise a ValueError. Otherwise, on a GPU, indices out of range count
    as padding, num_accepted_tokens is clamped, a parent that is not before its token counts as the
    token before, states past S are not saved, and only the low 32 bits of int64 numbers are read.

    With a cache in bf16, a token whose parent is not the token before starts from the rounded
    state; all others start from the state in fp32.

    Returns:
        o [B, T, HV, V] in q's dtype.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: this version cannot run the call.
    """
    arguments = (
        q, k, v, g, beta, initial_state, state_indices, num_accepted_tokens, checkpoints,
        checkpoint_indices, parents, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log,
        dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, null_slot,
        out,
    )  # fmt: skip
    lookup = None if torch.compiler.is_compiling() else VERIFYING.find(*arguments)
    if type(lookup) is tuple:
        return out if out is not None else lookup[0]
    options = Options(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )
    options = checked_flags(VERIFY_OP, options)
    gate = Gate(flag(VERIFY_OP, "use_gate_in_kernel", use_gate_in_kernel), A_log, dt_bias)
    check_tensors(VERIFY_OP, q, k, v, g, beta, None, cu_seqlens)
    check_activations(VERIFY_OP, v, gate, options)
    tables = num_accepted_tokens, checkpoints, checkpoint_indices, parents
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    CALL[options.state_v_first].check(
        VERIFY_OP, q, initial_state, state_indices, *tables, N=N, HV=v.shape[2], V=v.shape[3]
    )
    _check_tables(state_indices, *tables)
    room = state_indices.shape[1:] if checkpoints is None else checkpoints.shape[1:2]
    if cu_seqlens is None and room and q.shape[1] > room[0]:
        got, needs = f"{q.shape[1]} tokens a sequence", f"at most S={room[0]}"
        raise ValueError(need(VERIFY_OP, got, needs, "widen the table, or pass fewer drafts"))
    check_null_slot(VERIFY_OP, null_slot)
    if out is not None:
        expect_out(VERIFY_OP, out, v)
    require(recurrent_refusal(q, k, v, pool=initial_state, op=VERIFY_OP))
    if checkpoints is not None:
        require(refused_states(VERIFY_OP, "the checkpoints of states", checkpoints, q, q.is_cuda))
        require(_refused_rows(checkpoints))
    call = Call(
        q, k, v, g, beta, scale_of(VERIFY_OP, scale, q), None, cu_seqlens, None, *gate.parameters()
    )

    places = initial_state, state_indices, num_accepted_tokens, checkpoints, checkpoint_indices
    given = call, (*places, parents, out, null_slot), options
    results = VERIFYING.record(arguments, _run, *given) if lookup is RECORD else _run(*given)
    return out if out is not None else results[0]


def _run(call: Call, drafts: Any, options: Options) -> tuple[Tensor, ...]:
    """Returns o, or nothing if it was written to `out`."""
    *places, out, null_slot = drafts
    o = call.v.new_empty(call.v.shape) if out is None else out
    gdn_verify(call, Drafts(*(*places, o, null_slot)), options)
    return (o,) if out is None else ()


def _check_tables(
    indices: Tensor,
    accepted: Tensor | None,
    checkpoints: Tensor | None,
    rows: Tensor | None,
    parents: Tensor | None,
) -> None:
    """Raises ValueError unless the tables of a call go together."""
    in_slots = indices.dim() == 2
    if in_slots and checkpoints is not None:
        fix = "pass the slots to start from, [N], or no checkpoints"
        got = "checkpoints and state_indices [N, S]"
        raise ValueError(need(VERIFY_OP, got, "one place for the state after a token", fix))
    if accepted is not None and not in_slots:
        fix = "pass the slots after each token, [N, S]"
        got = "num_accepted_tokens and state_indices [N]"
        raise ValueError(need(VERIFY_OP, got, "a slot for each number", fix))
    if (checkpoints is None) != (rows is None):
        got = f"checkpoint{'s' if rows is None else '_indices'} alone"
        fix = "pass the buffer, and the row of each sequence"
        raise ValueError(need(VERIFY_OP, got, "checkpoints and checkpoint_indices", fix))
    if in_slots and not indices.shape[1]:
        fix = "give each token a slot"
        raise ValueError(need(VERIFY_OP, "state_indices of 0 columns", "[N, S], S > 0", fix))
    if parents is None:
        return
    if checkpoints is None:
        fix = "pass checkpoints, from which children of a token start"
        raise ValueError(need(VERIFY_OP, "parents without checkpoints", "both", fix))
    if parents.shape[1] > checkpoints.shape[1]:
        got, needs = f"{parents.shape[1]} parents a sequence", f"at most S={checkpoints.shape[1]}"
        raise ValueError(need(VERIFY_OP, got, needs, "drop columns, or widen the checkpoints"))


def _refused_rows(checkpoints: Tensor) -> str | None:
    """Returns the reason if entries of all rows do not lie a constant distance apart, or None."""
    rows, steps = checkpoints.shape[:2]
    if rows > 1 and steps > 1 and checkpoints.stride(0) != steps * checkpoints.stride(1):
        got = f"checkpoints have strides {tuple(checkpoints.stride())}"
        needs = "rows end to end: stride(0) = S stride(1)"
        return need(VERIFY_OP, got, needs, "pass a buffer of S entries a row")
    return None
