"""The public function `shared_prefix_attention`: checks a call, then refuses or runs it."""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from qla_kernels.dualkv import ops
from qla_kernels.dualkv.autograd import SharedPrefixAttention, natural_lse
from qla_kernels.dualkv.plan import SharedLayout
from qla_kernels.dualkv.validate import OP, check_contents, check_tensors, refusal
from qla_kernels.runtime.arguments import flag
from qla_kernels.runtime.contents import checks_contents
from qla_kernels.runtime.sm90 import require


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
    """Computes attention over packed sequences that store shared prefixes once; differentiable.

    A response token sees its prompt and, causally, its own response. A prompt token sees its prompt
    causally. For packed token i this is

        o_i = sum_j softmax_j(scale q_i . k_j) v_j    over the j with j <= i < layout.tout[j]

    where tout[j] is one past the last packed token that may see token j.

    Results and gradients equal those of running each sequence alone; the gradient of a shared token
    is the sum over the sequences that contain it. q, k and v have one dtype. On a CPU, q, k and v
    may have any strides, in bf16, fp16, fp32 or fp64. A GPU must be a Hopper, and q, k and v must
    then have bf16 or fp16, D of 64, 128 or 256, a last stride of 1, and other strides that are
    multiples of 16 bytes.

    On a GPU the first call with a layout builds index tables for the kernels on the host. Call
    `layout.prepare` to build them earlier; torch.compile and CUDA graph captures require
    this. Second derivatives, forward-mode tangents and a `scale` that requires a gradient raise
    Unsupported.

    Args:
        q: [T, H, D] packed tokens.
        k, v: [T, Hk, D], H a multiple of Hk; query head h reads key head h // (H / Hk).
        layout: the `layout` of a `SharedBatch`, or SharedLayout.from_lengths(..); on q's device.
        scale: factor of the scores; D ** -0.5 if None.
        deterministic: True makes all gradients bitwise repeatable. On a GPU at D = 128 this is
            slower, because dq is otherwise summed by atomics. None uses the setting of
            torch.use_deterministic_algorithms. Results, dk and dv are always repeatable, and so is
            dq at D = 64, at D = 256 and on the CPU.
        return_lse: also return the log-sum-exp of each row's scores, which is differentiable too.

    Returns:
        o [T, H, D] in q's dtype; with return_lse (o, lse), with lse [H, T] in fp32 (fp64 if q is
        fp64).

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: the arguments fit, but this version cannot run them; see
            `qla_kernels.dualkv.refusal`.
    """
    check_tensors(OP, q, k, v, layout)
    return_lse = flag(OP, "return_lse", return_lse)
    if deterministic is not None:
        deterministic = flag(OP, "deterministic", deterministic)
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
    """Runs `shared_prefix_attention` without checking shapes; returns (o, lse).

    Under QLA_CHECK=1 it still checks the values of layout's tensors, which waits for the GPU.

    Args:
        q: [T - q_shift, H, D]; row i is the query of packed token i + q_shift.
        k, v: [T, Hk, D].
        layout: which of the T packed tokens see each other.
        scale: factor of the scores; D ** -0.5 if None.
        deterministic: whether gradients must be bitwise repeatable; None: as torch is set.
        return_lse: whether to return the log-sum-exp of the scores; otherwise lse is None.
        q_shift: the number of tokens at the start of the batch that have no query.
    """
    if checks_contents():
        check_contents(layout)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    scale = float(scale) if scale is not None else float(q.shape[-1] ** -0.5)
    tables: Sequence[Tensor] = (layout.nodes,)
    if q.is_cuda:
        tables = layout.prepare(q.shape[1], k.shape[1], q_shift, q.shape[2])
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        # autograd takes time
        results = ops.dualkv_fwd.replayed(q, k, v, list(tables), scale, q_shift)
        return results.o, natural_lse(results.lse2) if return_lse else None
    o, lse = SharedPrefixAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, scale, q_shift, deterministic, return_lse, *tables
    )
    return o, lse
