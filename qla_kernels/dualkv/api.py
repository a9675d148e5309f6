"""The public function: a call is checked, then refused or handed to the operators."""

import os
from typing import Literal, overload

import torch
from torch import Tensor

from qla_kernels.dualkv import ops
from qla_kernels.dualkv.autograd import SharedPrefixAttention, natural
from qla_kernels.dualkv.plan import SharedLayout
from qla_kernels.dualkv.validate import OP, check_contents, check_tensors, refusal
from qla_kernels.sm90 import require


@overload
def shared_prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SharedLayout,
    *,
    scale: float | None = None,
    deterministic: bool | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def shared_prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SharedLayout,
    *,
    scale: float | None = None,
    deterministic: bool | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def shared_prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SharedLayout,
    *,
    scale: float | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed sequences whose shared beginnings are stored once, differentiable.

    A response sees its prompt and, causally, itself; a prompt sees itself:

        o_q = sum_k softmax_k(scale q_q . k_k) v_k    over the k with k <= q < layout.tout[k]

    Results and gradients are those of every sequence run alone, where the gradients of a shared
    token are summed over its sequences. q, k and v have one dtype. CPU tensors may have any strides
    and float dtype. On a GPU, a Hopper, they are bf16 or fp16 with D 64 or 128, a last stride of 1
    and the others of whole 16 bytes.

    The first call with a layout builds the tables that its kernels work off, on the host;
    `layout.prepare` does that ahead of time, as torch.compile and captures of CUDA graphs want.
    No gradient is differentiable in turn, nothing carries forward-mode tangents, and `scale` gets
    no gradient: asking for these raises Unsupported.

    Args:
        q: [T, H, D] packed tokens.
        k, v: [T, Hk, D], H a multiple of Hk; query head h reads key head h // (H / Hk).
        layout: of a packed batch (`batch.layout`), or SharedLayout.from_lengths; on q's device.
        scale: D ** -0.5 if None.
        deterministic: whether all gradients must repeat bit for bit, at a cost: at D = 128 dq is
            otherwise added up by atomics. If None, what torch.use_deterministic_algorithms says.
            Results, dk and dv always repeat, and so do dq at D = 64 and that of CPU tensors.
        return_lse: also return the log of the sum of exponentials, natural, differentiable too.

    Returns:
        o [T, H, D] in q's dtype; with return_lse also lse [H, T] in fp32 (fp64 for fp64).

    Raises:
        ValueError: arguments do not fit together.
        Unsupported: they do, but this version cannot run them; see `qla_kernels.dualkv.refusal`.
    """
    check_tensors(OP, q, k, v, layout)
    require(refusal(q, k, v, scale=scale))
    o, lse = attend(q, k, v, layout, scale, deterministic, return_lse)
    return o if lse is None else (o, lse)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SharedLayout,
    scale: float | None,
    deterministic: bool | None,
    return_lse: bool,
    q_shift: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """A call that has been checked; lse is None unless asked for."""
    if os.environ.get("QLA_CHECK", "0") not in ("", "0"):
        check_contents(OP, layout)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    scale = float(scale) if scale is not None else float(q.shape[-1] ** -0.5)
    tables = layout.prepare(q.shape[1], k.shape[1], q_shift) if q.is_cuda else (layout.nodes,)
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        done = ops.Forward(*ops.dualkv_fwd(q, k, v, tables, scale, q_shift))  # autograd takes time
        return done.o, natural(done.lse2) if return_lse else None
    o, lse = SharedPrefixAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, scale, q_shift, bool(deterministic), bool(return_lse), *tables
    )
    return o, lse
