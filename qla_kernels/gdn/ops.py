"""The torch.library operators: their schemas, fake implementations, and CPU and CUDA functions.

    gdn_fwd, gdn_bwd         the gated delta rule, with the activations of g and beta inside
    l2norm_fwd, l2norm_bwd   the normalisation of q and k before it

CPU tensors go to cpu.py and CUDA tensors to launch/forward.py. Each of these modules has a function
for every operator, with the operator's name, arguments and results. A module is imported when an
operator is first called with its kind of tensor. Results that were not asked for are None, and no
result shares memory with an argument.

The operators have no autograd formula: api.py applies the Functions of autograd.py. A policy for
selective activation checkpointing names the operator `torch.ops.qla_kernels.gdn_fwd.default`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn import contents
from qla_kernels.gdn.validate import OP
from qla_kernels.operators import define, imported_late, skip_dispatcher
from qla_kernels.tile.constants import CHUNK

SCHEMAS = {
    "gdn_fwd": """(
        Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor? initial_state,
        Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, Tensor? A_log, Tensor? dt_bias, *,
        bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first,
        bool output_final_state, bool output_h, bool is_train,
        bool auto_cp, bool enable_fwd_cp_cache, float warm_log_bound
    ) -> (Tensor o, Tensor? final_state, Tensor? g_cum, Tensor? A, Tensor? h, Tensor[] cp_cache)""",
    # g is the raw gate, given together with A_log. Without g, dg is the gradient of the gate itself
    "gdn_bwd": """(
        Tensor q, Tensor k, Tensor v, Tensor g_cum, Tensor beta, Tensor A, Tensor do, Tensor? dht,
        float scale, Tensor? initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu,
        Tensor? g, Tensor? A_log, Tensor? dt_bias, *,
        bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first,
        bool auto_cp, float warm_log_bound, Tensor[] cp_cache, bool output_dh0=True
    ) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, Tensor dg,
          Tensor? dh0, Tensor? dA_log, Tensor? ddt_bias)""",
    "l2norm_fwd": "(Tensor x) -> Tensor",
    "l2norm_bwd": "(Tensor x, Tensor dy, Tensor? cu_seqlens) -> Tensor",
}


class GdnForward(NamedTuple):
    """Results of gdn_fwd; fp32 is fp64 where q is fp64."""

    o: Tensor  # [B, T, HV, V] in q's dtype
    final_state: Tensor | None  # [N, HV, K, V], or [N, HV, V, K] if state_v_first; fp32
    g_cum: Tensor | None  # [B, T, HV] natural log, cumulated within each chunk; fp32
    A: Tensor | None  # [B, T, HV, 64] gated inverse, in q's dtype
    h: Tensor | None  # [B, chunks, HV, K, V] before each chunk, in q's dtype; or [.., V, K]
    # The fields of launch/segments.py's Segments and Maps, with start states in `left`. The tensors
    # have no rows if no segments were kept; the list is empty if no cache was asked for.
    cp_cache: list[Tensor]


class GdnBackward(NamedTuple):
    """Results of gdn_bwd: each gradient has the shape and dtype of its input, with two exceptions.

    dh0 is fp32, and so is dg where no raw gate was given. fp32 is fp64 where q is fp64.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbeta: Tensor
    dg: Tensor
    dh0: Tensor | None
    dA_log: Tensor | None
    ddt_bias: Tensor | None


def state_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype that gates and states have inside: fp32, or fp64 where x is fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def _implementation(module: str, op: str) -> Callable[..., Any]:
    run = imported_late(f"qla_kernels.gdn.{module}", op)
    return _checked(run) if op == "gdn_fwd" else run


def _checked(run: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **flags: Any) -> Any:
        if contents.asked_for():
            _, _, _, g, beta, _, _, cu_seqlens, cu_seqlens_cpu, *_ = args
            contents.check_contents(OP, g, beta, cu_seqlens, cu_seqlens_cpu)
        return run(*args, **flags)

    return checked


def _fake_gdn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *_: Tensor | None,
    state_v_first: bool,
    output_final_state: bool,
    output_h: bool,
    is_train: bool,
    enable_fwd_cp_cache: bool,
    **__: bool | float,
) -> GdnForward:
    B, T, HV, V = v.shape
    K = q.shape[-1]
    state = (HV, V, K) if state_v_first else (HV, K, V)
    wide = state_dtype(q)
    kept = []
    if enable_fwd_cp_cache:  # the number of segments is known only when the operator runs
        kept = empty_cache(q, HV, V, torch.library.get_ctx().new_dynamic_size)
    num_seqs: int | torch.SymInt = B
    num_chunks: int | torch.SymInt = -(-T // CHUNK)
    if cu_seqlens is not None:
        num_seqs = cu_seqlens.shape[0] - 1
        if output_h:  # the number of chunks of a packed batch depends on its lengths
            num_chunks = torch.library.get_ctx().new_dynamic_size()
    return GdnForward(
        o=q.new_empty(v.shape),
        final_state=q.new_empty(num_seqs, *state, dtype=wide) if output_final_state else None,
        g_cum=q.new_empty(g.shape, dtype=wide) if is_train else None,
        A=q.new_empty(B, T, HV, CHUNK) if is_train else None,
        h=q.new_empty(B, num_chunks, *state) if output_h else None,
        cp_cache=kept,
    )


def empty_cache(q: Tensor, HV: int, V: int, size: Callable[[], Any] = int) -> list[Tensor]:
    """Returns the tensors of a cp_cache, uninitialised.

    The first dimension of each is `size()`, which is called once per tensor and is 0 by default.
    """
    K = q.shape[-1]
    tables = [q.new_empty(size(), dtype=torch.int32) for _ in range(5)]
    starts = q.new_empty(size(), HV, V, K, dtype=state_dtype(q))
    M = q.new_empty(size(), HV, 2, K, K, dtype=torch.bfloat16)
    return [*tables, starts, M, q.new_empty(size(), HV, dtype=torch.int32)]


def _fake_gdn_bwd(
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
    output_dh0: bool = True,
    **_: Any,
) -> GdnBackward:
    h0, wide = initial_state if output_dh0 else None, state_dtype(q)
    dg = g_cum.new_empty(g_cum.shape, dtype=wide) if g is None else _like(g)
    return GdnBackward(
        dq=_like(q),
        dk=_like(k),
        dv=_like(v),
        dbeta=_like(beta),
        dg=dg,
        dh0=None if h0 is None else h0.new_empty(h0.shape, dtype=wide),
        dA_log=None if A_log is None else _like(A_log),
        ddt_bias=None if dt_bias is None else _like(dt_bias),
    )


def _fake_l2norm_fwd(x: Tensor) -> Tensor:
    return _like(x)


def _fake_l2norm_bwd(x: Tensor, dy: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return _like(x)


def _like(x: Tensor) -> Tensor:
    """Returns an uninitialised contiguous tensor like x; empty_like would keep x's strides."""
    return x.new_empty(x.shape)


def _defined(op: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    on_cuda, on_cpu = _implementation("launch.forward", op), _implementation("cpu", op)
    operator = define(op, SCHEMAS[op], fake, CUDA=on_cuda, CPU=on_cpu)
    return skip_dispatcher(operator, on_cuda, on_cpu)


# As this package calls them
gdn_fwd = _defined("gdn_fwd", _fake_gdn_fwd)
gdn_bwd = _defined("gdn_bwd", _fake_gdn_bwd)
l2norm_fwd = _defined("l2norm_fwd", _fake_l2norm_fwd)
l2norm_bwd = _defined("l2norm_bwd", _fake_l2norm_bwd)
