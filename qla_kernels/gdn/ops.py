"""The torch.library operators: their fake implementations, and their CPU and CUDA functions.

    gdn_fwd, gdn_bwd         the gated delta rule, with the activations of g and beta inside
    l2norm_fwd, l2norm_bwd   the normalisation of q and k before it

The arguments of gdn_fwd are the fields of Call and Options; gdn_bwd has those of SavedForward and
Incoming between them. The functions here take these records. CPU tensors go to cpu.py and CUDA
tensors to launch/forward.py. Each of these modules has a function for every operator, with the
operator's name, arguments and results. A module is imported when an operator is first called with
its kind of tensor. Results that were not asked for are None, and no result shares memory with an
argument.

The operators have no autograd formula: api.py applies the Functions of autograd.py. A policy for
selective activation checkpointing names the operator `torch.ops.qla_kernels.gdn_fwd.default`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn import contents
from qla_kernels.gdn.call import Call, Incoming, Options, SavedForward
from qla_kernels.gdn.shapes import key_room
from qla_kernels.gdn.validate import OP
from qla_kernels.runtime.contents import checks_contents
from qla_kernels.runtime.op import define_direct, define_on_records, implementations
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


def checked(run: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Returns `run`, an implementation, preceded by `check` under QLA_CHECK=1."""

    def run_checked(*records: Any) -> Any:
        if checks_contents():
            check(*records)
        return run(*records)

    return run_checked


def _check_contents(call: Call, *_: Any) -> None:
    contents.check_contents(OP, call)


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


HOMES = "qla_kernels.gdn.launch.forward", "qla_kernels.gdn.cpu"  # for CUDA and CPU tensors


gdn_fwd = define_on_records(
    "gdn_fwd",
    (Call, Options),
    GdnForward,
    _fake_gdn_fwd,
    *(checked(run, _check_contents) for run in implementations("gdn_fwd", *HOMES)),
)
gdn_bwd = define_on_records(
    "gdn_bwd",
    (Call, SavedForward, Incoming, Options),
    GdnBackward,
    _fake_gdn_bwd,
    *implementations("gdn_bwd", *HOMES),
)
l2norm_fwd = define_direct("l2norm_fwd", "(Tensor x) -> Tensor", like, *HOMES)
l2norm_bwd = define_direct(
    "l2norm_bwd",
    "(Tensor x, Tensor dy, Tensor? cu_seqlens) -> Tensor",
    lambda x, *_: like(x),
    *HOMES,
)
