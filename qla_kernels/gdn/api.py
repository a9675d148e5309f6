"""The public function `chunk_gated_delta_rule`: checks a call and hands it to the operators.

Argument names, order and defaults equal those of FLA 0.6.0, so that either can replace the other.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn import known, ops
from qla_kernels.gdn.autograd import apply, normalised
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.keywords import (
    checked_flags,
    is_invariant,
    keeping,
    refuse_unknown,
    scale_of,
    take_layout,
    warm_bound,
)
from qla_kernels.gdn.sharded.api import sharded, tell
from qla_kernels.gdn.validate import (
    OP,
    Gate,
    check_activations,
    check_tensors,
    refusal,
)
from qla_kernels.runtime.arguments import flag
from qla_kernels.runtime.derivatives import wants_gradients
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.programs import RECORD, Programs
from qla_kernels.runtime.sm90 import expect_tensors, require
from qla_kernels.tile.constants import CHUNK

NO_GATE = Gate(False, None, None)
CALLS = Programs(OP, gradients=True, tokens=range(5))  # q, k, v, g, beta
POSITIONAL = 16  # arguments of the public function that may be given without a name
CHUNK_SIZES = (16, 32, 64)  # FLA's; results do not depend on it, and 64 is always used


class Accepted(NamedTuple):
    """A record: results of the checks of a `chunk_gated_delta_rule` call that records gradients.

    They are saved, so that a later call skips the checks if its tensors have the same dtypes,
    devices, strides and sizes (the number of tokens may differ), and its other arguments are equal.

    Attributes:
        scale: factor of q.
        options: the flags and numbers of the call.
        gated: True if g is the input of the gate (use_gate_in_kernel), False if it is the log of
            the decay.
    """

    scale: float
    options: Options
    gated: bool


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gated delta rule over whole sequences; differentiable once, in every tensor.

    Value head h keeps a state S [K, V] and reads key head h // (HV / H):

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
        o_t = scale S_t^T q_t

    q, k and v share a dtype and may be strided, such as slices of one projection; `refusal` says
    which strides a GPU needs. g, beta and states are bf16, fp16, fp32 or fp64. Each gradient has
    the dtype of its tensor.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV], natural log of each token's decay, at most 0.
        beta: [B, T, HV], step size of each token.
        scale: factor of q; K ** -0.5 if None.
        initial_state: [N, HV, K, V], a state for each sequence; 0 if None. N is B, or the number
            of sequences in cu_seqlens.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norm over K first.
        use_beta_sigmoid_in_kernel: beta holds logits; use sigmoid(beta).
        allow_neg_eigval: with the sigmoid, use 2 * sigmoid(beta).
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64 on q's device; B must be 1. Sequence n has the tokens
            cu_seqlens[n] to cu_seqlens[n + 1], possibly none. Tokens past the last sequence are not
            read, and their results are 0.
        cu_seqlens_cpu: the values of cu_seqlens in a CPU tensor; optional. With them the host knows
            the lengths of sequences when it cuts long ones into segments, which run in parallel on
            a GPU.
        chunk_indices: accepted for compatibility with FLA, and unused.
        cp_context: for sequences that are split over ranks: a context from FLA's build_cp_context
            or `qla_kernels.gdn.build_cp_context`. The tensors then hold this rank's tokens, in the
            contiguous or the zigzag layout. B must be 1; the context's cu_seqlens are used; initial
            and final states are not allowed. Every rank of the group must make the same call and
            the same backward. Gradients of A_log and dt_bias are sums over this rank's tokens.
        use_gate_in_kernel, A_log, dt_bias: keyword only. g holds the input of the gate; use
            -exp(A_log) * softplus(g + dt_bias), with A_log and dt_bias (0 if None) of shape [HV].
        chunk_size: keyword only. 16, 32 and 64 are accepted, and all of them compute with 64.
        exact, warm_log_bound: keyword only. On a GPU, long sequences with few heads are cut into
            segments that run in parallel. Where decay allows it, the start state of a segment is
            computed from only the last tokens before the segment. This omits what the state before
            those tokens contributes, which is less than e^warm_log_bound times that state; the
            default is -12 (6e-6). exact=True means -104 and takes longer: the factor is then 0 in
            fp32, and for states up to 1e7 the omitted part is below the normal numbers of fp32.
            -inf omits nothing. The bound does not change which values are rounded. At K = 256 the
            backward is not cut and omits nothing. QLA_EXACT=1 makes exact=True the default.
        batch_invariant: keyword only. On a GPU, the results and gradients of a token then have the
            same bits whatever else is in the batch, and inference with a `GdnPool` computes the
            same bits of o. Sequences are never cut into segments, so a small batch of long
            sequences takes longer. Gradients of A_log and dt_bias are sums over the batch. Not with
            cp_context. QLA_BATCH_INVARIANT=1 makes True the default.
        enable_fwd_cp_cache: keyword only. Saves the segments and their start states for the
            backward, which otherwise computes both again. This takes 4 * K * (K + V) bytes per
            segment and value head (128 KB for K = V = 128). There are enough segments to fill a GPU
            once or a few times. None, the default, saves segments and start states if the backward
            is predicted to be faster with them, and if they take at most a quarter of the memory
            that the call saves anyway. Ignored with cp_context, at K = 256, and in a compiled
            graph, which cannot know the number of segments.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in fp32 (fp64 where q is
        fp64), or None.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: the arguments fit together, but this version cannot run them; see
            `qla_kernels.gdn.refusal`.
        TypeError: a keyword is unknown.
    """
    if cu_seqlens_cpu is not None and cp_context is None and not torch.compiler.is_compiling():
        cu_seqlens_cpu = known.representative(
            CALLS.native, q, v, cu_seqlens, cu_seqlens_cpu, kwargs
        )
    arguments = (
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, cu_seqlens_cpu,
        chunk_indices, cp_context, *kwargs, *kwargs.values(),
    )  # fmt: skip
    lookup = None if torch.compiler.is_compiling() else CALLS.find(*arguments)
    if type(lookup) is tuple:
        return lookup
    if type(lookup) is Accepted:
        gated = (kwargs["A_log"], kwargs.get("dt_bias")) if lookup.gated else (None, None)
        return _run(
            Call(q, k, v, g, beta, lookup.scale, initial_state, cu_seqlens, cu_seqlens_cpu, *gated),
            lookup.options,
        )
    try:
        bound = warm_bound(OP, kwargs.pop("exact", None), kwargs.pop("warm_log_bound", None))
        keep = keeping(OP, kwargs.pop("enable_fwd_cp_cache", None))
        invariant = is_invariant(OP, kwargs.pop("batch_invariant", None))
        if invariant and cp_context is not None:
            got, needs = "batch_invariant with cp_context", "sequences that lie on one GPU"
            raise Unsupported(need(OP, got, needs, "leave out one of them"))
        state_v_first = take_layout(OP, kwargs, state_v_first)
        gate = _take_gate(kwargs) if kwargs else NO_GATE
        recorded = wants_gradients((q, k, v, g, beta, initial_state, *gate.parameters()))
        may_keep = recorded and cp_context is None and not torch.compiler.is_compiling()
        options = checked_flags(
            OP,
            Options(
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
                allow_neg_eigval=allow_neg_eigval,
                state_v_first=state_v_first,
                output_final_state=output_final_state,
                is_train=recorded,
                auto_cp=not invariant,
                enable_fwd_cp_cache=keep if may_keep else False,
                warm_log_bound=bound,
            ),
        )
        if chunk_indices is not None:  # FLA 0.5.2 has cp_context at this position
            expect_tensors(OP, chunk_indices=chunk_indices)
    except Exception as problem:
        if cp_context is not None:
            tell(problem, cp_context, q)
        raise
    if cp_context is not None:
        return sharded(q, k, v, g, beta, scale, initial_state, cp_context, gate, options), None
    tensors = q, k, v, g, beta, scale, initial_state, cu_seqlens, cu_seqlens_cpu
    call = _checked(*tensors, gate, options)
    if lookup is RECORD and not recorded:
        return CALLS.record(
            arguments, _check_and_run, *tensors, gate, options, usual=lambda: _run(call, options)
        )
    if lookup is RECORD and not any(isinstance(x, Tensor) for x in (scale, *options)):
        accepted = Accepted(call.scale, options, gate.use_gate_in_kernel)
        CALLS.keep(arguments, accepted, _checked, *tensors, gate, options)
    return _run(call, options)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    gate: Gate,
    options: Options,
) -> Call:
    """Returns the tensors as a Call; raises as the public function does."""
    check_tensors(
        OP, q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, options.state_v_first
    )
    check_activations(OP, v, gate, options)
    require(refusal(q, k, v))
    return Call(
        q, k, v, g, beta, scale_of(OP, scale, q), initial_state, cu_seqlens, cu_seqlens_cpu,
        *gate.parameters(),
    )  # fmt: skip


def _check_and_run(*given: Any) -> tuple[Tensor, Tensor | None]:
    """Runs a call whose T differs from that of one that was accepted."""
    return _run(_checked(*given), given[-1])


def _run(call: Call, options: Options) -> tuple[Tensor, Tensor | None]:
    """Computes o and the final state, or None, of a checked call."""
    if options.use_qk_l2norm_in_kernel:
        call = normalised(call, options.is_train)
    if options.is_train:
        return apply(call, options)
    results = ops.gdn_fwd(call, options)  # autograd's wrappers cost as much host time again
    return results.o, results.final_state


chunk_gdn = chunk_gated_delta_rule


def _take_gate(kwargs: dict[str, Any]) -> Gate:
    """Returns the gate, read from the keywords that FLA takes as **kwargs.

    Raises on head_first, on a chunk_size that FLA does not have, and on an unknown keyword.
    """
    if "head_first" in kwargs:
        needs = "[B, T, heads, size] tensors and no flag"
        raise DeprecationWarning(need(OP, "head_first is gone", needs, "transpose the tensors"))
    chunk_size = kwargs.pop("chunk_size", CHUNK)
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(need(OP, f"chunk_size is {chunk_size!r}", "16, 32 or 64", "leave it out"))
    gate = Gate(
        flag(OP, "use_gate_in_kernel", kwargs.pop("use_gate_in_kernel", False)),
        kwargs.pop("A_log", None),
        kwargs.pop("dt_bias", None),
    )
    refuse_unknown(OP, kwargs)
    return gate
