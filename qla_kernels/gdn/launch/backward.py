"""The backward on the GPU: two chains over the chunks, then the gradients of each chunk alone."""

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call, Incoming, Options, SavedForward
from qla_kernels.gdn.kernels import chunk_grads as chunk_grads_kernel
from qla_kernels.gdn.kernels import l2norm as l2norm_kernel
from qla_kernels.gdn.kernels import l2norm_bwd as l2norm_bwd_kernel
from qla_kernels.gdn.launch import activations, parts
from qla_kernels.gdn.launch.chains import ds_rows_in_dv
from qla_kernels.gdn.launch.states import BackwardBatch, ChainStates, ValueStates, states_around
from qla_kernels.gdn.launch.tensors import (
    flat_parts,
    flattens,
    key_first,
    num_live_tokens,
    of_part,
    parts_in_reach,
    put_states,
    room_for,
    sequence_bounds,
    tokens,
    with_room,
)
from qla_kernels.gdn.launch.wide_backward import wide_grads
from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.gdn.shapes import key_room
from qla_kernels.gdn.validate import OP
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.sm90 import dtype_name, readable, require_aligned
from qla_kernels.tile.constants import CHUNK


@torch.no_grad()
def gdn_bwd(call: Call, saved: SavedForward, incoming: Incoming, options: Options) -> GdnBackward:
    """Runs the operator gdn_bwd on CUDA tensors."""
    q, k, v, *_ = call
    require_aligned(OP, q=q, k=k, v=v)
    with device.of(q):
        launches = flat_parts(q, k, v) or [slice(0, 0)]
        x, dh0 = _inputs(call, saved, incoming, options, flat=len(launches) == 1)
        whole = x.dh0
        x = x._replace(dh0=room_for(whole))
        dv, others = v.new_empty(v.shape), None
        known = call.cu_seqlens is None or call.cu_seqlens_cpu is not None
        for rows in launches:
            part, (dv_b,) = x.of_part(rows), of_part(rows, dv)
            lengths = call.cu_seqlens_cpu
            states = states_around(part, dv_b, options, lengths, saved.cp_cache, known)
            if others is None:  # allocated only now, when temporaries of states_around are free
                others = tuple(t.new_empty(t.shape) for t in (q, k, x.g_cum, x.g_cum))
            dq_b, dk_b, *gates_b = of_part(rows, *others)
            out = dq_b, dk_b, dv_b, *gates_b
            if states is None:
                for t in out:
                    t.zero_()
            else:
                gradients_of_chunks(part, states, out)
            del states  # frees them before the next part allocates its own
        put_states(whole, x.dh0)
        assert others is not None, "there is a part, if an empty one"
        dq, dk, dg, dbeta = others
        raw = call.raw_g, call.beta, call.A_log, call.dt_bias
        dg, dbeta, *parameters = activations.backward(
            *raw, dg, dbeta, options.beta_range, call.cu_seqlens
        )
    return GdnBackward(dq, dk, dv, dbeta, dg, dh0, *parameters)


def _inputs(
    call: Call, saved: SavedForward, incoming: Incoming, options: Options, flat: bool
) -> tuple[BackwardBatch, Tensor | None]:
    """Returns the inputs as kernels read them, and room for dh0 in the caller's layout, or None.

    flat: the tokens of all tensors must lie a constant distance apart.
    """
    h0, dht = (None if x is None else x.float() for x in (call.initial_state, incoming.dht))
    dh0 = h0.new_empty(h0.shape) if h0 is not None and incoming.output_dh0 else None
    h0, dht, to = (key_first(x, options.state_v_first) for x in (h0, dht, dh0))
    do = (flat_readable if flat else readable)(incoming.do.to(call.v.dtype))
    g_cum, A = saved.g_cum.contiguous(), saved.A.contiguous()  # as the forward made them
    beta = activations.activate_beta(call.beta, options.beta_range)
    bounds = sequence_bounds(call.q, call.cu_seqlens)
    inputs = call.q, call.k, call.v, do, g_cum, beta, A
    return BackwardBatch(*inputs, call.scale, bounds, with_room(h0), with_room(dht), to), dh0


@torch.no_grad()
def l2norm_bwd(x: Tensor, dy: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns the gradient of x [B, T, H, K] of l2norm_fwd; 0 for tokens of no sequence."""
    dx = x.new_empty(x.shape)
    if dx.numel():
        pieces = (-1, l2norm_kernel.PIECE)
        with device.of(x):
            dy = readable(dy.to(x.dtype))
            for part in parts_in_reach(x, dy):
                x_b, dy_b, dx_b = of_part(part, x, dy, dx)
                variant = l2norm_bwd_kernel.Variant(dtype_name(x.dtype), wide=x.shape[3] > 128)
                jit.compile(l2norm_bwd_kernel, variant)(
                    torch.unflatten(x_b, -1, pieces),
                    torch.unflatten(dy_b, -1, pieces),
                    dx_b.view(-1, x.shape[3] // l2norm_kernel.PIECE, l2norm_kernel.PIECE),
                    num_live_tokens(cu_seqlens, dx),
                    int(cu_seqlens is not None),
                )
    return dx


def gradients_of_chunks(
    x: BackwardBatch, states: ChainStates | ValueStates, out: tuple[Tensor, ...]
) -> None:
    """Writes the gradients of every chunk of a batch, by the kernel that reads these states.

    Args:
        out: as for `chunk_grads`; for wide_grads dv is complete but for padding.
    """
    if isinstance(states, ValueStates):
        wide_grads(x, states, out)
    else:
        chunk_grads(states, out)


def chunk_grads(states: ChainStates, out: tuple[Tensor, ...]) -> None:
    """Writes the gradients of every chunk, from the states before and after it.

    Args:
        states: the batch and results of the chains. A part of dS may lie in the dv of `out`; it is
            read before dv is written.
        out: dq, dk [B, T, H, K], dv [B, T, HV, V] in q's dtype, dg, dbeta [B, T, HV] fp32; written,
            with 0 for tokens of no sequence.
    """
    x, h, dS, table, held = states
    q, k, v, do, g_cum, beta, A, scale, *_ = x
    B, T, H, K = q.shape
    HV, V = v.shape[2:]

    def grouped(x: Tensor) -> Tensor:
        return torch.unflatten(x, 1, (H, HV // H))

    dq, dk, dv, *of_gates = out
    dv, in_parts = dv.view(v.shape), of_gates[0].shape[2] < HV
    dg, dbeta = (t.new_empty(B, T, HV) for t in of_gates) if in_parts else of_gates
    _, tails, owner = ds_rows_in_dv(held, dS, dv, table.first_chunk)
    variant = chunk_grads_kernel.Variant(dtype_name(q.dtype), key_room(K), V)
    jit.compile(chunk_grads_kernel, variant)(
        tokens(q),
        tokens(k),
        grouped(tokens(v)),
        grouped(tokens(do)),
        grouped(g_cum.view(B * T, HV)),
        grouped(beta.view(B * T, HV)),
        grouped(A.view(B * T, HV, CHUNK)),
        grouped(h),
        grouped(dS),
        grouped(tails),
        owner,
        table.chunks,
        table.num_chunks,
        dq.view(B * T, H, K),
        dk.view(B * T, H, K),
        grouped(dv.view(B * T, HV, V)),
        grouped(dg.view(B * T, HV)),
        grouped(dbeta.view(B * T, HV)),
        scale,
        min(device.sm_count(q.device), table.chunks.shape[0] * H),  # persistent CTAs
        int(held is not None),
    )
    if in_parts:
        parts.part_sums(dg, dbeta, *of_gates)


def flat_readable(x: Tensor) -> Tensor:
    """Returns x [B, T, ..] as `sm90.readable` does, with tokens a constant distance apart."""
    x = readable(x)
    return x if flattens(x) else x.contiguous()
