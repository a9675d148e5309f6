"""The operators on CPU tensors: they run the reference.

Autocast is off inside, so that every product has the precision of the caller's tensors.
"""

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call, Incoming, Options, SavedForward
from qla_kernels.gdn.ops import GdnBackward, GdnForward, empty_cache
from qla_kernels.gdn.validate import OP
from qla_kernels.runtime.contents import check_bounds
from qla_kernels.runtime.cpu import reference
from qla_kernels.tile.constants import CHUNK


@torch.no_grad()
def gdn_fwd(call: Call, options: Options) -> GdnForward:
    q, k, v, _, _, scale, h0, cu_seqlens, cu_seqlens_cpu, *_ = call
    gdn, v_first = reference().gdn, options.state_v_first
    check_bounds(OP, q.shape[1], cu_seqlens, cu_seqlens_cpu)  # always: no device to wait for
    g, beta = activated(call, options)
    h0 = swapped(h0, v_first)
    with torch.autocast("cpu", enabled=False):
        out = gdn.chunked(q, k, v, g, beta, scale, h0, cu_seqlens, CHUNK)
    return GdnForward(
        o=out.o.clone(),  # out.o is a view; autograd forbids in-place changes of one among results
        final_state=swapped(out.final_state, v_first) if options.output_final_state else None,
        g_cum=out.g_cum if options.is_train else None,
        A=out.A if options.is_train else None,
        h=swapped(out.h, v_first) if options.output_h else None,
        cp_cache=empty_cache(q, *v.shape[2:]) if options.enable_fwd_cp_cache else [],
    )


@torch.no_grad()
def gdn_bwd(call: Call, saved: SavedForward, incoming: Incoming, options: Options) -> GdnBackward:
    q, k, v, _, _, scale, h0, cu_seqlens, cu_seqlens_cpu, *_ = call
    gdn, v_first = reference().gdn, options.state_v_first
    check_bounds(OP, q.shape[1], cu_seqlens, cu_seqlens_cpu)
    _, beta = activated(call, options)
    dht, h0 = swapped(incoming.dht, v_first), swapped(h0, v_first)
    with torch.autocast("cpu", enabled=False):
        grads = gdn.chunked_backward(
            q, k, v, saved.g_cum, beta, saved.A, incoming.do, dht, scale, h0, cu_seqlens, CHUNK
        )
    dbeta, dg, dA_log, ddt_bias = raw_gradients(call, options, grads.dbeta, grads.dg)
    dh0 = swapped(grads.dh0, v_first) if incoming.output_dh0 else None
    return GdnBackward(grads.dq, grads.dk, grads.dv, dbeta, dg, dh0, dA_log, ddt_bias)


def activated(call: Call, options: Options) -> tuple[Tensor, Tensor]:
    """Returns g and beta with their activations."""
    gdn, g, beta = reference().gdn, call.g, call.beta
    if call.A_log is not None:
        g = gdn.gate(g, call.A_log, call.dt_bias)
    if options.use_beta_sigmoid_in_kernel:
        beta = gdn.beta_sigmoid(beta, options.allow_neg_eigval)
    return g, beta


def raw_gradients(
    call: Call, options: Options, dbeta: Tensor, dg: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of the caller's beta and g, of A_log and of dt_bias.

    dbeta and dg are those of the activated tensors.
    """
    gdn, (dA_log, ddt_bias) = reference().gdn, (None, None)
    if options.use_beta_sigmoid_in_kernel:
        beta = _live(call.beta, call.cu_seqlens)
        dbeta = gdn.beta_sigmoid_backward(beta, dbeta, options.allow_neg_eigval)
    if call.A_log is not None:
        g = _live(call.g, call.cu_seqlens)
        dg, dA_log, ddt_bias = gdn.gate_backward(g, call.A_log, call.dt_bias, dg)
    return dbeta, dg, dA_log, ddt_bias


@torch.no_grad()
def l2norm_fwd(x: Tensor) -> Tensor:
    y: Tensor = reference().gdn.l2norm(x)
    return y.contiguous()


@torch.no_grad()
def l2norm_bwd(x: Tensor, dy: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    dx: Tensor = reference().gdn.l2norm_backward(_live(x, cu_seqlens), dy)
    return dx.contiguous()


def swapped(state: Tensor | None, state_v_first: bool) -> Tensor | None:
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
