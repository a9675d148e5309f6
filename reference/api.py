"""The operations under the names and arguments of `qla_kernels`: what its results should be.

Nothing is validated here. Arguments that only steer kernels (segments, caches, tables on the host)
are accepted and change nothing; autograd goes through torch's own operators.
"""

from typing import Any

from torch import Tensor

from . import gdn


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
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    exact: bool = False,
    warm_log_bound: float | None = None,
    enable_fwd_cp_cache: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule with the activations around it: o, and the final states if asked for."""
    if use_qk_l2norm_in_kernel:
        q, k = gdn.l2norm(q), gdn.l2norm(k)
    _, _, o, _, final_state, _ = chunk_gated_delta_rule_fwd(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        cu_seqlens,
        output_final_state,
        state_v_first=state_v_first,
        cp_context=cp_context,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    return o, final_state


chunk_gdn = chunk_gated_delta_rule


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
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None, None]:
    """g_cum, A, o, h, final_state and an empty cache; what was not asked for is None."""
    if cp_context is not None:
        raise NotImplementedError("the reference knows no shards: cp_context has to be None")
    if use_gate_in_kernel:
        if A_log is None:
            raise ValueError("use_gate_in_kernel needs A_log")
        g = gdn.gate(g, A_log, dt_bias)
    if use_beta_sigmoid_in_kernel:
        beta = gdn.beta_sigmoid(beta, allow_neg_eigval)
    h0 = _swapped(initial_state, state_v_first)
    done = gdn.chunked(q, k, v, g, beta, scale, h0, cu_seqlens)
    is_train = is_train is None or is_train
    return (
        done.g_cum if is_train else None,
        done.A if is_train else None,
        done.o if out is None else out.copy_(done.o),
        _swapped(done.h, state_v_first) if output_h else None,
        _swapped(done.final_state, state_v_first) if output_final_state else None,
        None,
    )


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
    cp_cache: Any = None,
    cp_context: Any = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    exact: bool = False,
    warm_log_bound: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, dbeta, dg, dh0 from what the forward saw and returned; g is its g_cum."""
    if cp_context is not None:
        raise NotImplementedError("the reference knows no shards: cp_context has to be None")
    dht, h0 = _swapped(dht, state_v_first), _swapped(initial_state, state_v_first)
    grads = gdn.chunked_backward(q, k, v, g, beta, A, do, dht, scale, h0, cu_seqlens)
    return (*grads[:5], _swapped(grads.dh0, state_v_first))


def _swapped(state: Tensor | None, state_v_first: bool) -> Tensor | None:
    """A caller's [.., V, K] as the [.., K, V] of the formulas, or back."""
    return state.mT if state is not None and state_v_first else state
