"""The argument form of published shared-prompt kernels, for code that moves over from them.

One group a call, its keys and values in two tensors. They are laid end to end here, which copies Hk
heads of them; code that can change should pack its batch and call `shared_prefix_attention`.
"""

import torch
from torch import Tensor

from qla_kernels.dualkv.api import attend
from qla_kernels.dualkv.plan import SharedLayout
from qla_kernels.dualkv.validate import check_tensors, refusal, require
from qla_kernels.errors import Unsupported, need

OP = "dualkv_varlen"


def dualkv_varlen(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_decoded: Tensor,
    v_decoded: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k_decoded: Tensor,
    max_seqlen_q: int,
    context_seqlen: int,
    max_seqlen_k_decoded: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    layout: SharedLayout | None = None,
) -> Tensor:
    """N responses of R_i tokens on one prompt of P, differentiable.

    Queries come in one of two forms: those of responses alone, q_i = R_i, or with the prompt's
    before the first response's, q_0 = P + R_0.

    Args:
        q: [sum q_i, H, D].
        k_context, v_context: [P, Hk, D].
        k_decoded, v_decoded: [sum R_i, Hk, D], response after response.
        cu_seqlens_q, cu_seqlens_k_decoded: [N + 1] bounds of the q_i and of the R_i.
        max_seqlen_q, max_seqlen_k_decoded: accepted, unused.
        context_seqlen: P.
        causal: True.
        layout: SharedLayout.from_lengths([(P, [R_0, ..])]), on q's device. If None, it is made at
            each call, and the bounds are read from the device, which waits for it.

    Returns:
        o [sum q_i, H, D].
    """
    if not causal:
        fix = "run responses that see their own future through another kernel"
        raise Unsupported(need(OP, "causal=False", "True", fix))
    if len(k_context) != context_seqlen or k_context.shape != v_context.shape:
        got = f"k_context {tuple(k_context.shape)} and v_context {tuple(v_context.shape)}"
        needs, fix = f"[{context_seqlen}, Hk, D]", "pass context_seqlen=k_context.shape[0]"
        raise ValueError(need(OP, got, needs, fix))
    if layout is None:
        responses = cu_seqlens_k_decoded.diff().tolist()
        _check_queries(cu_seqlens_q.diff().tolist(), responses, context_seqlen)
        layout = SharedLayout.from_lengths([(context_seqlen, responses)], device=q.device)
    elif not torch.compiler.is_compiling():  # untraceable
        _check_prompt(layout, context_seqlen)
    k, v = torch.cat([k_context, k_decoded]), torch.cat([v_context, v_decoded])
    q_shift = context_seqlen if len(q) == len(k) - context_seqlen else 0
    check_tensors(OP, q, k, v, layout, q_shift)
    require(refusal(q, k, v, scale=softmax_scale, op=OP))
    o, _ = attend(q, k, v, layout, softmax_scale, None, False, q_shift)
    return o


def _check_prompt(layout: SharedLayout, prompt: int) -> None:
    """The first node lies on the host. Bounds may lie on a device, and are not read."""
    if prompt and layout.nodes[:1].tolist() != [[0, prompt, layout.num_tokens]]:
        fix = f"pass SharedLayout.from_lengths([({prompt}, responses)])"
        needs = f"one prompt of {prompt} tokens, which all others see"
        raise ValueError(need(OP, "a layout of other lengths", needs, fix))


def _check_queries(queries: list[int], responses: list[int], prompt: int) -> None:
    if len(queries) != len(responses):
        got = f"{len(queries)} sequences in cu_seqlens_q, {len(responses)} in cu_seqlens_k_decoded"
        raise ValueError(need(OP, got, "the same sequences", "pass bounds of both, [N + 1]"))
    merged = [prompt * (i == 0) + r for i, r in enumerate(responses)]
    if queries not in (responses, merged):
        got = f"queries {queries} of responses {responses} on a prompt of {prompt}"
        needs = f"{responses}, or {merged} with the prompt's queries once"
        fix = "drop the prompt's queries from all sequences but the first"
        raise Unsupported(need(OP, got, needs, fix))
