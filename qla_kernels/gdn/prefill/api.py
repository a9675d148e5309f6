"""The public function for prefill from and into a pool of states."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn import ops
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.decode.validate import (
    RECORDED,
    expect_out,
)
from qla_kernels.gdn.keywords import checked_flags, is_invariant, scale_of, warm_bound
from qla_kernels.gdn.prefill.ops import PREFILL_OP, Prefill, gdn_prefill
from qla_kernels.gdn.shapes import POOL_KEYS
from qla_kernels.gdn.validate import (
    Gate,
    check_activations,
    check_tensors,
    refusal,
)
from qla_kernels.runtime.arguments import check_null_slot, flag, integer
from qla_kernels.runtime.derivatives import wants_gradients
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.programs import RECORD, Programs
from qla_kernels.runtime.signature import layouts
from qla_kernels.runtime.sm90 import dtype_name, require
from qla_kernels.tile.constants import CHUNK

PREFILLS = Programs(PREFILL_OP, gradients=True)
CALL = layouts(
    "q [B, T, H, K]; initial_state [slots, HV, {K, V}] float; state_indices [N] int;"
    "start_indices [N] int?; checkpoints [entries, HV, {K, V}] float?;"
    "checkpoint_starts [N] int?; first_checkpoints [N] int?",
    "N HV V",
)


def prefill_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    state_indices: Tensor,
    *,
    start_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    checkpoints: Tensor | None = None,
    checkpoint_every: int | None = None,
    checkpoint_starts: Tensor | None = None,
    first_checkpoints: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    null_slot: int = -1,
    out: Tensor | None = None,
    auto_cp: bool | None = None,
    exact: bool | None = None,
    warm_log_bound: float | None = None,
) -> Tensor:
    """Computes the gated delta rule over prompts, from and into states in a cache, for serving.

    The same function as `chunk_gated_delta_rule`, but each sequence starts from the state in a slot
    of the cache, and its final state overwrites a slot. The kernel reads and writes states in the
    cache's dtype, layout and strides, and computes in fp32. Not differentiable: a call while
    gradients are recorded raises Unsupported.

    Args:
        q, k: [B, T, H, K], on a GPU in bf16.
        v: [B, T, HV, V] in q's dtype.
        g, beta: [B, T, HV], natural log of each token's decay, and step size.
        initial_state: the cache [slots, HV, K, V], or [slots, HV, V, K] if state_v_first; any
            strides, on a GPU in fp32 or bf16.
        state_indices: [N] int32 or int64. The final state of sequence n overwrites slot
            state_indices[n]. Two sequences must not share a slot. If the index is at most
            null_slot, o is written, but the final state is not. An index past the cache raises
            ValueError on a CPU and under QLA_CHECK=1; otherwise a GPU does not write that state.
            The same checks reject int64 values that do not fit in int32; otherwise a GPU reads
            their low 32 bits.
        start_indices: [N]: sequence n starts from the state in slot start_indices[n]; None means
            state_indices. A sequence whose start index is at most null_slot starts from a state of
            0. Several sequences may start from the same slot, but no sequence may start from a slot
            that another sequence overwrites.
        cu_seqlens: [N + 1], the bounds of N packed sequences; B must then be 1. None: each batch
            row is a sequence, and N is B.
        cu_seqlens_cpu: the same bounds on the CPU; optional. With them the host knows the lengths
            of sequences when it cuts long ones into segments (see auto_cp).
        checkpoints: [entries, HV, K, V], or [.., V, K] if state_v_first; any strides, on a GPU in
            fp32 or bf16. The call writes intermediate states to this tensor, one state per entry.
        checkpoint_every: write the state of a sequence after every checkpoint_every tokens, a
            multiple of 64. Tokens are counted from the first token of this call. If a prompt is
            split over several calls, let each call begin at a multiple of checkpoint_every.
        checkpoint_starts: [N] or [N + 1]: the first checkpoint of sequence n goes to entry
            checkpoint_starts[n], and its later checkpoints go to the entries after it. A last
            number of [N + 1], as in cumulative counts, is not read. None: sequence n starts at
            entry n, which suits one checkpoint per sequence; with more, sequences would write to
            the same entries. Such collisions, and entries outside `checkpoints`, raise ValueError
            on a CPU and under QLA_CHECK=1; otherwise a GPU does not write states outside.
        first_checkpoints: [N]: the first checkpoint of sequence n is the state after
            64 * first_checkpoints[n] tokens. Without checkpoint_every, sequence n has no other
            checkpoint. A negative number means no checkpoint. None: the first checkpoint is the
            state after checkpoint_every tokens.
        scale: factor of q; K ** -0.5 if None.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norm over K first.
        use_gate_in_kernel, A_log, dt_bias: g holds the input of the gate; use
            -exp(A_log) * softplus(g + dt_bias), with A_log and dt_bias (0 if None) of shape [HV].
        use_beta_sigmoid_in_kernel: use sigmoid(beta); with allow_neg_eigval 2 * sigmoid(beta).
        null_slot: -1, or 0 if slot 0 of the cache is reserved for padding.
        out: a contiguous tensor like v; o is written to `out`, and `out` is returned.
        auto_cp: allow cutting long sequences into segments that run in parallel. With False the
            bits of a result do not depend on the rest of the batch. None: False under
            QLA_BATCH_INVARIANT=1, else True.
        exact, warm_log_bound: the start state of a segment may omit contributions that have decayed
            by a factor below e^warm_log_bound. The default is -12 (6e-6). exact=True means -104, at
            which the factor is 0 in fp32; it takes longer. QLA_EXACT=1 makes exact=True the
            default. exact=True and warm_log_bound together raise ValueError.

    Returns:
        o [B, T, HV, V] in q's dtype.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: this version cannot run the call.
    """
    arguments = (
        q, k, v, g, beta, initial_state, state_indices, start_indices, cu_seqlens, cu_seqlens_cpu,
        checkpoints, checkpoint_every, checkpoint_starts, first_checkpoints, scale,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, state_v_first, null_slot, out, auto_cp, exact, warm_log_bound,
    )  # fmt: skip
    lookup = None if torch.compiler.is_compiling() else PREFILLS.find(*arguments)
    if type(lookup) is tuple:
        return out if out is not None else lookup[0]
    options = Options(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        auto_cp=not is_invariant(PREFILL_OP, None) if auto_cp is None else auto_cp,
        warm_log_bound=warm_bound(PREFILL_OP, exact, warm_log_bound),
    )
    options = checked_flags(PREFILL_OP, options)
    gate = Gate(flag(PREFILL_OP, "use_gate_in_kernel", use_gate_in_kernel), A_log, dt_bias)
    check_tensors(PREFILL_OP, q, k, v, g, beta, None, cu_seqlens, cu_seqlens_cpu)
    check_activations(PREFILL_OP, v, gate, options)
    pool, N = initial_state, q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    starts = checkpoint_starts
    if isinstance(starts, Tensor) and starts.shape == (N + 1,):
        starts = starts[1:]
    CALL[options.state_v_first].check(
        PREFILL_OP, q, pool, state_indices, start_indices, checkpoints, starts, first_checkpoints,
        N=N, HV=v.shape[2], V=v.shape[3],
    )  # fmt: skip
    tables = checkpoint_starts, first_checkpoints
    every = _expect_checkpoints(checkpoints, checkpoint_every, *tables)
    check_null_slot(PREFILL_OP, null_slot)
    if out is not None:
        expect_out(PREFILL_OP, out, v)
    require(prefill_refusal(q, k, v, pool=pool, checkpoints=checkpoints))
    scale = scale_of(PREFILL_OP, scale, q)
    parameters = gate.parameters()
    if wants_gradients((q, k, v, g, beta, *parameters, pool, checkpoints, out)):
        raise Unsupported(need(PREFILL_OP, *RECORDED))

    call = Call(q, k, v, g, beta, scale, None, cu_seqlens, cu_seqlens_cpu, *parameters)
    places = pool, state_indices, start_indices, checkpoints, *tables
    given = call, (*places, out, every, null_slot), options
    results = PREFILLS.record(arguments, _run, *given) if lookup is RECORD else _run(*given)
    return out if out is not None else results[0]


def _run(call: Call, prefill: Any, options: Options) -> tuple[Tensor, ...]:
    """Returns o, or nothing if it was written to `out`."""
    *places, out, every, null_slot = prefill
    o = call.v.new_empty(call.v.shape) if out is None else out
    if options.use_qk_l2norm_in_kernel:
        call = call._replace(q=ops.l2norm_fwd(call.q), k=ops.l2norm_fwd(call.k))
    gdn_prefill(call, Prefill(*(*places, o, every, null_slot)), options)
    return (o,) if out is None else ()


def _expect_checkpoints(
    checkpoints: Tensor | None,
    checkpoint_every: int | None,
    starts: Tensor | None,
    first: Tensor | None,
) -> int:
    """Checks the arguments for checkpoints; returns checkpoint_every, or 0 for None."""
    every = 0 if checkpoint_every is None else checkpoint_every
    every = integer(PREFILL_OP, "checkpoint_every", every)
    if every < 0 or every % CHUNK or checkpoint_every == 0:
        got, needs = f"checkpoint_every is {checkpoint_every}", f"a multiple of {CHUNK}"
        raise ValueError(need(PREFILL_OP, got, needs, "take one that divides yours"))
    if checkpoints is None:
        if every or starts is not None or first is not None:
            got, needs = "checkpoints are asked for without `checkpoints`", "the tensor to write to"
            raise ValueError(need(PREFILL_OP, got, needs, "allocate an entry for each"))
        return 0
    if not every and first is None:
        needs = "checkpoint_every or first_checkpoints"
        fix = "say after which tokens, or drop it"
        raise ValueError(need(PREFILL_OP, "checkpoints alone", needs, fix))
    return every


def prefill_refusal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pool: Tensor,
    checkpoints: Tensor | None = None,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Returns why this version cannot run `prefill_gated_delta_rule`, or None if it can.

    The reason is an error text: what was passed, what is needed instead, and a remedy.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        pool: the state cache, which the call takes as initial_state.
        checkpoints: the tensor for intermediate states, or None.
        capability: None answers for the device of the tensors; (9, 0) as if they were on a GPU of
            this compute capability.
    """
    if reason := refusal(q, k, v, capability=capability, op=PREFILL_OP):
        return reason
    on_gpu = q.is_cuda or capability is not None
    if on_gpu and checkpoints is not None and q.shape[-1] != POOL_KEYS:
        got, fix = f"checkpoints with head dimension K={q.shape[-1]}", "leave them out"
        return need(PREFILL_OP, got, f"K={POOL_KEYS} to save intermediate states", fix)
    if on_gpu and q.dtype != torch.bfloat16:
        got, needs = f"q, k and v are {dtype_name(q.dtype)}", "bfloat16 with a pool"
        return need(PREFILL_OP, got, needs, "cast them, or use chunk_gated_delta_rule")
    for what, x in (("the pool of states", pool), ("checkpoints", checkpoints)):
        if x is None:
            continue
        if any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True)):
            got, needs = f"states of {what} share memory", "a place for each: they are overwritten"
            return need(PREFILL_OP, got, needs, "pass it .contiguous()")
        if on_gpu and x.dtype not in (torch.float32, torch.bfloat16):
            got = f"{what} is {dtype_name(x.dtype)}"
            return need(PREFILL_OP, got, "float32 or bfloat16", "keep it in float32")
    return None
