"""The operators on CPU tensors: they run the reference.

Autocast is off inside, so that every product has the precision of the caller's tensors.
"""

import torch
from torch import Tensor

from qla_kernels.cpu import reference
from qla_kernels.gdn.contents import check_bounds
from qla_kernels.gdn.ops import GdnBackward, GdnForward, empty_cache
from qla_kernels.gdn.validate import OP
from qla_kernels.tile.constants import CHUNK


@torch.no_grad()
def gdn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    *,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    output_final_state: bool,
    output_h: bool,
    is_train: bool,
    auto_cp: bool,
    enable_fwd_cp_cache: bool,
    warm_log_bound: float,
) -> GdnForward:
    gdn = reference().gdn
    check_bounds(OP, q.shape[1], cu_seqlens, cu_seqlens_cpu)  # always: no device to wait for
    if A_log is not None:
        g = gdn.gate(g, A_log, dt_bias)
    if use_beta_sigmoid_in_kernel:
        beta = gdn.beta_sigmoid(beta, allow_neg_eigval)
    h0 = _swapped(initial_state, state_v_first)
    with torch.autocast("cpu", enabled=False):
        out = gdn.chunked(q, k, v, g, beta, scale, h0, cu_seqlens, CHUNK)
    return GdnForward(
        o=out.o.clone(),  # out.o is a view; autograd forbids in-place changes of one among results
        final_state=_swapped(out.final_state, state_v_first) if output_final_state else None,
        g_cum=out.g_cum if is_train else None,
        A=out.A if is_train else None,
        h=_swapped(out.h, state_v_first) if output_h else None,
        cp_cache=empty_cache(q, *v.shape[2:]) if enable_fwd_cp_cache else [],
    )


@torch.no_grad()
def gdn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    do: Tensor,
    dht: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    *,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    auto_cp: bool,
    warm_log_bound: float,
    cp_cache: list[Tensor],
    output_dh0: bool = True,
) -> GdnBackward:
    gdn = reference().gdn
    check_bounds(OP, q.shape[1], cu_seqlens, cu_seqlens_cpu)
    active = gdn.beta_sigmoid(beta, allow_neg_eigval) if use_beta_sigmoid_in_kernel else beta
    dht, h0 = _swapped(dht, state_v_first), _swapped(initial_state, state_v_first)
    with torch.autocast("cpu", enabled=False):
        grads = gdn.chunked_backward(
            q, k, v, g_cum, active, A, do, dht, scale, h0, cu_seqlens, CHUNK
        )
    dbeta, dg, dA_log, ddt_bias = grads.dbeta, grads.dg, None, None
    if use_beta_sigmoid_in_kernel:
        dbeta = gdn.beta_sigmoid_backward(_live(beta, cu_seqlens), dbeta, allow_neg_eigval)
    if g is not None:
        dg, dA_log, ddt_bias = gdn.gate_backward(_live(g, cu_seqlens), A_log, dt_bias, dg)
    dh0 = _swapped(grads.dh0, state_v_first) if output_dh0 else None
    return GdnBackward(grads.dq, grads.dk, grads.dv, dbeta, dg, dh0, dA_log, ddt_bias)


@torch.no_grad()
def l2norm_fwd(x: Tensor) -> Tensor:
    y: Tensor = reference().gdn.l2norm(x)
    return y.contiguous()


@torch.no_grad()
def l2norm_bwd(x: Tensor, dy: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    dx: Tensor = reference().gdn.l2norm_backward(_live(x, cu_seqlens), dy)
    return dx.contiguous()


def _swapped(state: Tensor | None, state_v_first: bool) -> Tensor | None:
    """Returns a caller's state in the reference's layout [.., K, V], or the reverse.

    Swaps the last two dimensions if state_v_first; otherwise, and for None, returns the argument.
    """
    return state.mT.contiguous() if state is not None and state_v_first else state


def _live(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns x with 0 for tokens of no sequence.

    Such tokens may hold NaN, and their gradient of 0 times NaN would be NaN.
    """
    if cu_seqlens is None:
        return x
    dead = torch.arange(x.shape[1], device=x.device) >= cu_seqlens[-1]
    return x.masked_fill(dead.reshape(1, -1, *[1] * (x.dim() - 2)), 0)
