"""The backward on the GPU: two chains over the chunks, then every chunk's gradients by itself."""

import math

import torch
from torch import Tensor

from qla_kernels import device, jit
from qla_kernels.gdn import activations, segments
from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.kernels import chunk_grads as chunk_grads_kernel
from qla_kernels.gdn.kernels import l2norm as l2norm_kernel
from qla_kernels.gdn.kernels import l2norm_bwd as l2norm_bwd_kernel
from qla_kernels.gdn.launch_chains import chunk_states, dstate_chain
from qla_kernels.gdn.ops import Backward
from qla_kernels.gdn.packing import (
    chunk_table,
    flat_parts,
    flattens,
    hand_on,
    key_first,
    of_part,
    require_aligned,
    sequence_bounds,
    tokens,
)
from qla_kernels.gdn.validate import TMA_ALIGNMENT, dtype_name
from qla_kernels.varlen import CHUNK, ChunkTable


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
) -> Backward:
    require_aligned(q=q, k=k, v=v)
    with device.of(q):
        active = activations.beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval).contiguous()
        h0, end = (None if x is None else x.float() for x in (initial_state, dht))
        dh0 = None if h0 is None else h0.new_empty(h0.shape)
        grads = tuple(x.new_empty(x.shape) for x in (q, k, v, g_cum, g_cum))
        parts = flat_parts(q, k, v)
        do = readable(do.to(v.dtype), flat=len(parts) == 1)
        for b in parts:
            inputs = of_part(b, q, k, v, do, g_cum, active, A)
            _packed(
                inputs,
                key_first(h0, b, state_v_first),
                key_first(end, b, state_v_first),
                scale,
                sequence_bounds(inputs[0], cu_seqlens),
                of_part(b, *grads),
                key_first(dh0, b, state_v_first),
                cu_seqlens_cpu,
                auto_cp,
                warm_log_bound,
                cp_cache,
            )
        return through_activations(
            grads, dh0, beta, g, A_log, dt_bias, cu_seqlens,
            use_beta_sigmoid_in_kernel, allow_neg_eigval,
        )  # fmt: skip


def through_activations(
    grads: tuple[Tensor, ...],
    dh0: Tensor | None,
    beta: Tensor,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
) -> Backward:
    """dq, dk, dv, dg and dbeta of what the kernels read become those of what the caller passed."""
    dq, dk, dv, dg, dbeta = grads
    if use_beta_sigmoid_in_kernel:
        raw = activations.live(beta, cu_seqlens)
        dbeta = activations.beta_backward(raw, allow_neg_eigval, dbeta)
    dA_log = ddt_bias = None
    if g is not None:
        assert A_log is not None, "a raw gate comes with its A_log"
        raw = activations.live(g, cu_seqlens)
        dg, dA_log, ddt_bias = activations.gate_backward(raw, A_log, dt_bias, dg)
    return Backward(dq, dk, dv, dbeta.to(beta.dtype), dg, dh0, dA_log, ddt_bias)


@torch.no_grad()
def l2norm_bwd(x: Tensor, dy: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The gradient of x [B, T, H, K] of l2norm_fwd; tokens of no sequence get 0."""
    B, T, H, _ = x.shape
    dx = x.new_empty(x.shape)
    if dx.numel():
        pieces = (-1, l2norm_kernel.SPAN)
        # the last bound's low word, where there is one
        end = dx.view(-1)[:2] if cu_seqlens is None else cu_seqlens[-1:]
        with device.of(x):
            jit.compile(l2norm_bwd_kernel, l2norm_bwd_kernel.Variant(dtype_name(x.dtype)))(
                torch.unflatten(x, -1, pieces),
                torch.unflatten(readable(dy.to(x.dtype)), -1, pieces),
                dx.view(B * T * H, *pieces),
                end.view(torch.int32)[:1],
                int(cu_seqlens is not None),
            )
    return dx


def chunk_grads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    h: Tensor,
    dS: Tensor,
    table: ChunkTable,
    scale: float,
    out: tuple[Tensor, ...],
) -> None:
    """The gradients of all chunks, from the states around each.

    Args:
        q, k, v, do: [B, T, heads, size]; any strides that flatten to tokens, with unit last stride.
        g_cum, beta: [B, T, HV] fp32, g_cum in natural log, of kkt_solve.
        A: [B, T, HV, 64] of kkt_solve.
        h, dS: [capacity of the table, HV, V, K] of chunk_states and dstate_chain.
        out: dq, dk [B, T, H, K], dv [B, T, HV, V] in q's dtype, dg, dbeta [B, T, HV] fp32: written;
            tokens of no sequence with zeros.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]

    def grouped(x: Tensor) -> Tensor:
        return torch.unflatten(x, 1, (H, HV // H))

    dq, dk, dv, dg, dbeta = out
    variant = chunk_grads_kernel.Variant(dtype_name(q.dtype), K, V)
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
        table.chunks,
        table.num_chunks,
        dq.view(B * T, H, K),
        dk.view(B * T, H, K),
        grouped(dv.view(B * T, HV, V)),
        grouped(dg.view(B * T, HV)),
        grouped(dbeta.view(B * T, HV)),
        scale,
        min(device.sm_count(q.device), table.chunks.shape[0] * H),  # CTAs that stay and walk
    )


def _packed(
    inputs: tuple[Tensor, ...],
    h0: Tensor | None,
    dht: Tensor | None,
    scale: float,
    bounds: Tensor,
    out: tuple[Tensor, ...],
    dh0: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    auto_cp: bool,
    warm_log_bound: float,
    cp_cache: list[Tensor],
) -> None:
    """One set of launches; tensors of tokens flatten, states are [N, HV, K, V]."""
    q, k, v, do, g_cum, beta, A = inputs
    B, T = q.shape[:2]
    if not out[2].numel() or len(bounds) == 1:  # no token, or none that a sequence owns
        for x in out:
            x.zero_()
        hand_on(dht, dh0)
        return
    bounds, around = bounds.int(), (h0, dht, dh0)
    kept = segments.of_cache(cp_cache)
    most = None
    if auto_cp and kept is None:
        sequences = segments.chunks_of(len(bounds) - 1, B * T, cu_seqlens_cpu)
        HV, V = v.shape[2:]
        sms, exact = device.sm_count(q.device), warm_log_bound == -math.inf
        most = gdn_plan.backward(sequences, HV, k.shape[-1], V, sms, exact)
    if kept is not None:
        done = _chains_in_segments(inputs, *around, scale, *kept, warm_log_bound)
    elif most is not None:
        cut = segments.cut(g_cum, bounds, most)
        done = _chains_in_segments(inputs, *around, scale, cut, None, warm_log_bound)
    else:
        done = chains(inputs, *around, scale, bounds)
    h, dS, table = done
    chunk_grads(q, k, v, do, g_cum, beta, A, h, dS, table, scale, out)


def chains(
    inputs: tuple[Tensor, ...],
    h0: Tensor | None,
    dht: Tensor | None,
    dh0: Tensor | None,
    scale: float,
    bounds: Tensor,
) -> tuple[Tensor, Tensor, ChunkTable]:
    """The states before and the gradients after each chunk, and where the chunks lie."""
    q, k, v, do, g_cum, beta, A = inputs
    table = chunk_table(q.shape[0] * q.shape[1], bounds)
    first = table.first_chunk
    h = k.new_empty(len(table.chunks), *v.shape[2:], k.shape[-1])  # before the fork: see there
    # Neither chain needs the other, and where sequences and heads are few, each leaves SMs idle.
    with device.fork(q) as aside:
        with aside:
            chunk_states(k, v, g_cum, beta, A, h0, bounds, first, out=h)
        dS = dstate_chain(q, k, do, g_cum, beta, A, dht, scale, bounds, first, dh0)
    return h, dS, table


def _chains_in_segments(
    inputs: tuple[Tensor, ...],
    h0: Tensor | None,
    dht: Tensor | None,
    dh0: Tensor | None,
    scale: float,
    cut: segments.Segments,
    kept: segments.Maps | None,
    warm_log_bound: float,
) -> tuple[Tensor, Tensor, ChunkTable]:
    """The same: chunks of segments are those of their sequences, in the same order.

    kept: of the forward, whose `left` holds start states by now.
    """
    q, k, v, do, g_cum, beta, A = inputs
    found = kept or segments.maps(k, v, g_cum, beta, A, h0, cut, warm_log_bound)
    starts = found.left.mT
    with device.fork(q) as aside:
        if kept is None:
            with aside:
                segments.start_states(found, h0, cut)  # in memory that `found` has
        ends = segments.end_gradients(
            q, k, do, g_cum, beta, A, dht, scale, found, cut, warm_log_bound
        )
    before = None if dh0 is None else torch.empty_like(found.left).mT  # of every segment
    done = chains(inputs, starts, ends, before, scale, cut.bounds)
    if dh0 is not None and before is not None:
        dh0.copy_(before[cut.first_segment[:-1]])
    return done


def readable(x: Tensor, flat: bool = False) -> Tensor:
    """x [B, T, heads, size] in whole 16 bytes: a gradient comes in whatever strides it has."""
    step = TMA_ALIGNMENT // x.element_size()
    strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    in_whole_pieces = (
        x.stride(-1) == 1
        and all(s > 0 and s % step == 0 for s in strides)
        and x.data_ptr() % TMA_ALIGNMENT == 0
        and (not flat or flattens(x))
    )
    return x if in_whole_pieces else x.contiguous()
