"""The forward and the backward as two functions without autograd.

Their positional arguments are in the order of FlashQLA 0.1.3.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn import ops
from qla_kernels.gdn.call import Call, Incoming, Options, SavedForward
from qla_kernels.gdn.keywords import checked_flags, keeping, scale_of, warm_bound
from qla_kernels.gdn.validate import (
    Gate,
    check_activations,
    check_tensors,
    refusal,
)
from qla_kernels.runtime.arguments import flag
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.signature import Signature, layouts
from qla_kernels.runtime.sm90 import dtype_name, expect_tensors, require
from qla_kernels.tile.constants import CHUNK

OUT = Signature("v [B, T, HV, V]; out [B, T, HV, V] float?")
BACKWARD = layouts(
    f"v [B, T, HV, V]; A [B, T, HV, {CHUNK}]; do [B, T, HV, V] float; dht [N, HV, {{K, V}}] float?",
    "N K",
)

Cache = tuple[Tensor, ...]  # opaque: `ops.GdnForward` says what is in it


@torch.no_grad()
def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    output_h: bool = False,
    auto_cp: bool = True,
    state_v_first: bool = False,
    enable_fwd_cp_cache: bool | None = False,
    cp_context: Any = None,
    is_train: bool | None = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    exact: bool = False,
    warm_log_bound: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None, Cache | None]:
    """Runs the gated delta rule's forward without autograd; also returns what the backward needs.

    Args:
        q, k: [B, T, H, K], used as passed; the caller normalises them if needed.
        v: [B, T, HV, V].
        g, beta: [B, T, HV], natural log of each token's decay, and step size.
        scale: factor of q; K ** -0.5 if None.
        initial_state: [N, HV, K, V], or [N, HV, V, K] if state_v_first; 0 if None.
        cu_seqlens: [N + 1], the bounds of N packed sequences; B must then be 1. None: each batch
            row is a sequence, and N is B.
        output_final_state: also return the state after each sequence.
        output_h: also return the state before each chunk. On a GPU, packed sequences then need
            cu_seqlens_cpu, because the number of chunks depends on the lengths.
        auto_cp: allow cutting long sequences into segments that run in parallel. With False the
            bits of a result do not depend on the rest of the batch.
        enable_fwd_cp_cache: also return the segments and their start states, for the backward. None
            returns them where `chunk_gated_delta_rule` saves them by default.
        is_train: False returns no g_cum and no A, which is faster. None means True.
        cp_context: must be None.
        cu_seqlens_cpu: the bounds on the CPU; optional.
        use_gate_in_kernel, A_log, dt_bias: g holds the input of the gate; use
            -exp(A_log) * softplus(g + dt_bias), with A_log and dt_bias (0 if None) of shape [HV].
        use_beta_sigmoid_in_kernel: use sigmoid(beta); with allow_neg_eigval 2 * sigmoid(beta).
        exact, warm_log_bound: the start state of a segment may omit contributions that have decayed
            by a factor below e^warm_log_bound. The default is -12 (6e-6). exact=True means -104, at
            which the factor is 0 in fp32.
        out: [B, T, HV, V] of any float dtype; o is copied into `out`, and `out` is returned as o.

    Returns:
        g_cum [B, T, HV]: cumulative sum of the gates within each chunk of 64 tokens, natural log,
        fp32.
        A [B, T, HV, 64]: row t of its chunk's (I + tril(beta decay k k^T, -1))^-1, q's dtype. Do
        not mix g_cum and A of different libraries: FlashQLA's A has no decay, FLA's g is base 2.
        o [B, T, HV, V].
        h [B, chunks, HV, K, V] in q's dtype, or None.
        final_state [N, HV, K, V], or None.
        cp_cache: an argument for chunk_gated_delta_rule_bwd; None without enable_fwd_cp_cache. With
        enable_fwd_cp_cache=True, the tensors of cp_cache have no rows if no segments were saved,
        because no sequence was cut or K = 256.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: this version cannot run the call.
    """
    op = "chunk_gated_delta_rule_fwd"
    options = Options(
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        output_final_state=output_final_state,
        output_h=output_h,
        is_train=True if is_train is None else is_train,
        auto_cp=auto_cp,
        enable_fwd_cp_cache=keeping(op, enable_fwd_cp_cache),
        warm_log_bound=warm_bound(op, exact, warm_log_bound),
    )
    options = checked_flags(op, options)
    bounds, v_first = (cu_seqlens, cu_seqlens_cpu), options.state_v_first
    check_tensors(op, q, k, v, g, beta, initial_state, *bounds, v_first)
    gate = Gate(flag(op, "use_gate_in_kernel", use_gate_in_kernel), A_log, dt_bias)
    check_activations(op, v, gate, options)
    OUT.check(op, v, out)
    _refuse_shards(op, cp_context)
    scale = scale_of(op, scale, q)
    call = Call(q, k, v, g, beta, scale, initial_state, *bounds, *gate.parameters())
    require(
        refusal(
            q, k, v, output_h=options.output_h, cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu, op=op,
        )
    )  # fmt: skip
    results = ops.gdn_fwd(call, options)
    o = results.o if out is None else out.copy_(results.o)
    return (
        results.g_cum,
        results.A,
        o,
        results.h,
        results.final_state,
        tuple(results.cp_cache) or None,
    )


@torch.no_grad()
def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    cp_cache: Cache | None = None,
    cp_context: Any = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    exact: bool = False,
    warm_log_bound: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Runs the backward on the results of `chunk_gated_delta_rule_fwd` and returns the gradients.

    Args:
        q, k, v: those of the forward call.
        g: the g_cum that the forward returned.
        beta: [B, T, HV] after its activation.
        A: the A that the forward returned.
        do: [B, T, HV, V], the gradient of o; any strides.
        dht: [N, HV, K, V], the gradient of the final state; 0 if None.
        scale, initial_state, cu_seqlens, state_v_first, cu_seqlens_cpu: those of the forward call.
        auto_cp: allow cutting long sequences into segments that run in parallel.
        cp_cache: the cp_cache of a forward of the same batch. The backward uses the segments and
            start states of the cache, unless it is faster not to cut. None: the backward computes
            segments and start states itself. At K = 256 sequences are not cut.
        cp_context: must be None.
        exact, warm_log_bound: the start state of a segment may omit contributions that have decayed
            by a factor below e^warm_log_bound. The default is -12 (6e-6). exact=True means -104, at
            which the factor is 0 in fp32.

    Returns:
        dq, dk, dv and dbeta in the dtype of their inputs; dg [B, T, HV] in fp32, the gradient of
        each token's natural-log gate; dh0 [N, HV, K, V] in fp32, or None without an initial state.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: this version cannot run the call.
    """
    op = "chunk_gated_delta_rule_bwd"
    bound = warm_bound(op, exact, warm_log_bound)
    options = Options(state_v_first=state_v_first, auto_cp=auto_cp, warm_log_bound=bound)
    options = checked_flags(op, options)
    bounds, v_first = (cu_seqlens, cu_seqlens_cpu), options.state_v_first
    check_tensors(op, q, k, v, g, beta, initial_state, *bounds, v_first)
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    BACKWARD[v_first].check(op, v, A, do, dht, N=N, K=q.shape[3])
    for name, x, dtype in (("g", g, ops.state_dtype(q)), ("A", A, q.dtype)):
        if x.dtype != dtype:
            got, fix = f"{name} is {dtype_name(x.dtype)}", "pass what the forward returned"
            raise ValueError(need(op, got, dtype_name(dtype), fix))
    _refuse_shards(op, cp_context)
    require(refusal(q, k, v, op=op))
    _check_cache(op, cp_cache or (), q, v, cu_seqlens)
    call = Call(q, k, v, g, beta, scale_of(op, scale, q), initial_state, *bounds)
    saved, incoming = SavedForward(g, A, list(cp_cache or ())), Incoming(do, dht)
    results = ops.gdn_bwd(call, saved, incoming, options)
    return results.dq, results.dk, results.dv, results.dbeta, results.dg, results.dh0


def _check_cache(
    op: str, cp_cache: Sequence[Tensor], q: Tensor, v: Tensor, cu_seqlens: Tensor | None
) -> None:
    """Raises ValueError if the shapes in cp_cache cannot come from a forward of this batch.

    Accepts an empty cache and one whose tensors have no rows. Checks nothing while compiling.
    """
    if not len(cp_cache) or torch.compiler.is_compiling():  # sizes may be data
        return
    expect_tensors(op, **{f"cp_cache[{n}]": x for n, x in enumerate(cp_cache)})
    (B, T, HV, V), K = v.shape, q.shape[-1]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows = len(cp_cache[0])
    most, extra = B * T // CHUNK, rows - 1 - N  # sequences of one segment, and cuts
    fits = not rows or extra == 0 or (0 < extra <= most and most // (most // extra) == extra)
    slots = max(rows - 1, 0)
    tables = (rows,), (rows,), (rows,), (N + 1,) if rows else (0,), (HV,) if rows else (0,)
    want = [*tables, (slots, HV, V, K), (slots, HV, 2, K, K), (slots, HV)]
    if not fits or [tuple(x.shape) for x in cp_cache] != want or cp_cache[0].device != q.device:
        got = f"cp_cache of {len(cp_cache)} tensors, of {rows} places for segments"
        needs = f"that of a forward of {N} sequences in {B * T} tokens, HV={HV}, K={K}, V={V}"
        raise ValueError(need(op, got, needs, "pass what this batch's forward returned, or None"))


def _refuse_shards(op: str, cp_context: object) -> None:
    if cp_context is not None:
        needs = "None: a backward alone does not know the state that came from other ranks"
        raise Unsupported(need(op, "got cp_context", needs, "call chunk_gated_delta_rule"))
