"""The operators: their signatures, and what runs CPU tensors, which is the reference.

    gdn_fwd, gdn_bwd         the gated delta rule, with the activations of g and beta inside
    l2norm_fwd, l2norm_bwd   the normalisation of q and k before it

The arguments of gdn_fwd are the fields of Call and Options; gdn_bwd has those of SavedForward and
Incoming between them. CUDA tensors go to launch/forward.py, which has functions of the same names.
Results that were not asked for are None, and no result shares memory with an argument.

The operators have no autograd formula: api.py applies the Functions of autograd.py. A policy for
selective activation checkpointing names the operator `torch.ops.qla_kernels.gdn_fwd.default`.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call, Incoming, Options, SavedForward
from qla_kernels.gdn.contents import check_contents
from qla_kernels.gdn.shapes import key_room
from qla_kernels.gdn.validate import OP
from qla_kernels.runtime.contents import check_bounds
from qla_kernels.runtime.cpu import reference
from qla_kernels.runtime.op import op
from qla_kernels.tile.constants import CHUNK


class GdnForward(NamedTuple):
    """Results of gdn_fwd; fp32 is fp64 where q is fp64."""

    o: Tensor  # [B, T, HV, V] in q's dtype
    final_state: Tensor | None  # [N, HV, K, V], or [N, HV, V, K] if state_v_first; fp32
    g_cum: Tensor | None  # [B, T, HV] natural log, cumulated within each chunk; fp32
    A: Tensor | None  # [B, T, HV, 64] gated inverse, in q's dtype
    h: Tensor | None  # [B, chunks, HV, K, V] before each chunk, in q's dtype; or [.., V, K]
    # The fields of launch/segments.py's Segments and Maps, with start states in `left`. The tensors
    # have no rows if no segments were kept; the list is empty if no cache was asked for, or if the
    # choice was the library's and it kept none.
    cp_cache: list[Tensor]

    def flat(self) -> tuple[Tensor | None, ...]:
        """Returns all tensors in one tuple, those of cp_cache last."""
        return *self[:-1], *self.cp_cache

    @staticmethod
    def of_flat(*tensors: Any) -> "GdnForward":
        o, final_state, g_cum, A, h, *cp_cache = tensors
        return GdnForward(o, final_state, g_cum, A, h, cp_cache)


class GdnBackward(NamedTuple):
    """Results of gdn_bwd: each gradient has the shape and dtype of its input, with two exceptions.

    dh0 is fp32, and so is dg if the call has no A_log. fp32 is fp64 where q is fp64.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbeta: Tensor
    dg: Tensor
    dh0: Tensor | None
    dA_log: Tensor | None
    ddt_bias: Tensor | None

    def flat(self) -> tuple[Tensor | None, ...]:
        return self


def state_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype that gates and states have inside: fp32, or fp64 where x is fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def empty_cache(q: Tensor, HV: int, V: int, size: Callable[[], Any] = int) -> list[Tensor]:
    """Returns the tensors of a cp_cache, uninitialised.

    The first dimension of each is `size()`, which is called once per tensor and is 0 by default.
    """
    K = key_room(q.shape[-1]) if q.is_cuda else q.shape[-1]
    tables = [q.new_empty(size(), dtype=torch.int32) for _ in range(5)]
    starts = q.new_empty(size(), HV, V, K, dtype=state_dtype(q))
    M = q.new_empty(size(), HV, 2, K, K, dtype=torch.bfloat16)
    return [*tables, starts, M, q.new_empty(size(), HV, dtype=torch.int32)]


def like(x: Tensor) -> Tensor:
    """Returns an uninitialised contiguous tensor like x; empty_like would keep x's strides."""
    return x.new_empty(x.shape)


def _check_contents(call: Call, *_: Any) -> None:
    check_contents(OP, call)


def _fake_gdn_fwd(call: Call, options: Options) -> GdnForward:
    q = call.q
    B, T, HV, V = call.v.shape
    state = HV, *options.state_size(q.shape[-1], V)
    wide = state_dtype(q)
    unknown: Callable[[], Any] = lambda: torch.library.get_ctx().new_dynamic_size()  # noqa: E731
    num_chunks: int | torch.SymInt = -(-T // CHUNK)
    if call.cu_seqlens is not None and options.output_h:  # depends on the lengths
        num_chunks = unknown()
    final_state = g_cum = A = None
    if options.output_final_state:
        final_state = q.new_empty(call.num_sequences, *state, dtype=wide)
    if options.is_train:
        g_cum, A = q.new_empty(call.g.shape, dtype=wide), q.new_empty(B, T, HV, CHUNK)
    return GdnForward(
        o=q.new_empty(call.v.shape),
        final_state=final_state,
        g_cum=g_cum,
        A=A,
        h=q.new_empty(B, num_chunks, *state) if options.output_h else None,
        # the number of segments, and without a flag if there are any, is known only when the
        # operator runs
        cp_cache=empty_cache(q, HV, V, unknown) if options.enable_fwd_cp_cache else [],
    )


def _fake_gdn_bwd(
    call: Call, saved: SavedForward, incoming: Incoming, options: Options
) -> GdnBackward:
    h0 = call.initial_state if incoming.output_dh0 else None
    dh0 = None if h0 is None else h0.new_empty(h0.shape, dtype=state_dtype(call.q))
    return empty_gradients(call, saved.g_cum, dh0)


def empty_gradients(call: Call, g_cum: Tensor, dh0: Tensor | None) -> GdnBackward:
    """Returns the results of a backward, uninitialised."""
    return GdnBackward(
        dq=like(call.q),
        dk=like(call.k),
        dv=like(call.v),
        dbeta=like(call.beta),
        dg=like(g_cum if call.A_log is None else call.g),
        dh0=dh0,
        dA_log=None if call.A_log is None else like(call.A_log),
        ddt_bias=None if call.dt_bias is None else like(call.dt_bias),
    )


LAUNCHES = "qla_kernels.gdn.launch.forward"


@op(LAUNCHES, _fake_gdn_fwd, _check_contents)
def gdn_fwd(call: Call, options: Options) -> GdnForward:
    q, k, v, _, _, scale, h0, cu_seqlens, cu_seqlens_cpu, *_ = call
    gdn, v_first = reference().gdn, options.state_v_first
    check_bounds(OP, q.shape[1], cu_seqlens, cu_seqlens_cpu)  # always: no device to wait for
    g, beta = activated(call, options)
    h0 = swapped(h0, v_first)
    out = gdn.chunked(q, k, v, g, beta, scale, h0, cu_seqlens, CHUNK)
    return GdnForward(
        o=out.o.clone(),  # out.o is a view; autograd forbids in-place changes of one among results
        final_state=swapped(out.final_state, v_first) if options.output_final_state else None,
        g_cum=out.g_cum if options.is_train else None,
        A=out.A if options.is_train else None,
        h=swapped(out.h, v_first) if options.output_h else None,
        cp_cache=empty_cache(q, *v.shape[2:]) if options.enable_fwd_cp_cache else [],
    )


@op(LAUNCHES, _fake_gdn_bwd)
def gdn_bwd(call: Call, saved: SavedForward, incoming: Incoming, options: Options) -> GdnBackward:
    q, k, v, _, _, scale, h0, cu_seqlens, cu_seqlens_cpu, *_ = call
    gdn, v_first = reference().gdn, options.state_v_first
    check_bounds(OP, q.shape[1], cu_seqlens, cu_seqlens_cpu)
    _, beta = activated(call, options)
    dht, h0 = swapped(incoming.dht, v_first), swapped(h0, v_first)
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


@op(LAUNCHES)
def l2norm_fwd(x: Tensor) -> Annotated[Tensor, "like x"]:
    y: Tensor = reference().gdn.l2norm(x)
    return y.contiguous()


@op(LAUNCHES)
def l2norm_bwd(x: Tensor, dy: Tensor, cu_seqlens: Tensor | None) -> Annotated[Tensor, "like x"]:
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
