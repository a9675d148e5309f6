"""`dualkv_varlen`: the argument form of published shared-prompt kernels, for code that used them.

A call has one group, with keys and values of prompt and responses in two tensors. This function
concatenates them, which copies Hk heads of keys and values; code that can change should pack its
batch and call `shared_prefix_attention`.
"""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from qla_kernels.dualkv.api import attend
from qla_kernels.dualkv.plan import SharedLayout
from qla_kernels.dualkv.validate import check_tensors, refusal
from qla_kernels.errors import Unsupported, need
from qla_kernels.sm90 import expect_tensors, require

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
    """Computes attention of N responses of R_i tokens that share one prompt of P; differentiable.

    q comes in one of two forms: the responses' queries alone, q_i = R_i, or with the prompt's
    queries in front of the first response's, q_0 = P + R_0.

    Args:
        q: [sum q_i, H, D].
        k_context, v_context: [P, Hk, D].
        k_decoded, v_decoded: [sum R_i, Hk, D], response after response.
        cu_seqlens_q, cu_seqlens_k_decoded: [N + 1] bounds of the q_i and of the R_i.
        max_seqlen_q, max_seqlen_k_decoded: accepted and ignored.
        context_seqlen: P.
        softmax_scale: factor of the scores; D ** -0.5 if None.
        causal: has to be True.
        layout: SharedLayout.from_lengths([(P, [R_0, ..])]), on q's device. If None, each call
            builds one, and waits for the device to read the bounds if they lie there.

    Returns:
        o [sum q_i, H, D].

    Raises:
        ValueError: the arguments do not fit together, or do not fit `layout`.
        Unsupported: causal=False, queries of another form, or arguments that
            `qla_kernels.dualkv.refusal` names.
    """
    parts = {"k_context": k_context, "v_context": v_context}
    parts |= {"k_decoded": k_decoded, "v_decoded": v_decoded}
    _check_parts(q, parts, layout)
    if not causal:
        fix = "run responses that see their own future through another kernel"
        raise Unsupported(need(OP, "causal=False", "True", fix))
    if len(k_context) != context_seqlen:
        got = f"k_context has shape {tuple(k_context.shape)}"
        needs, fix = f"[{context_seqlen}, Hk, D]", "pass context_seqlen=k_context.shape[0]"
        raise ValueError(need(OP, got, needs, fix))
    expect_tensors(OP, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_decoded=cu_seqlens_k_decoded)
    if layout is None or _on_the_host(cu_seqlens_q, cu_seqlens_k_decoded):
        queries = _lengths("cu_seqlens_q", cu_seqlens_q)
        responses = _lengths("cu_seqlens_k_decoded", cu_seqlens_k_decoded)
        _check_queries(queries, responses, context_seqlen)
        for name, x, lengths in (("q", q, queries), ("k_decoded", k_decoded, responses)):
            if len(x) != sum(lengths):
                fix = "pass the tokens of the sequences of cu_seqlens, and no others"
                raise ValueError(need(OP, f"{len(x)} tokens of {name}", str(sum(lengths)), fix))
        if layout is None:
            layout = SharedLayout.from_lengths([(context_seqlen, responses)], device=q.device)
        elif layout.nodes.tolist() != _nodes(context_seqlen, responses):
            fix = f"pass SharedLayout.from_lengths([({context_seqlen}, {responses})])"
            needs = f"responses of {responses} on a prompt of {context_seqlen}, as in cu_seqlens"
            raise ValueError(need(OP, "a layout of other lengths", needs, fix))
    elif not torch.compiler.is_compiling():  # untraceable
        _check_prompt(layout, context_seqlen)
    k, v = torch.cat([k_context, k_decoded]), torch.cat([v_context, v_decoded])
    q_shift = context_seqlen if len(q) == len(k) - context_seqlen else 0
    check_tensors(OP, q, k, v, layout, q_shift)
    require(refusal(q, k, v, scale=softmax_scale, op=OP))
    o, _ = attend(q, k, v, layout, softmax_scale, None, False, q_shift)
    return o


def _check_prompt(layout: SharedLayout, prompt: int) -> None:
    """Raises ValueError if the layout's first node is not a prompt of this length that all see.

    Used where the bounds are not read. The layout's nodes are on the host, so nothing waits.
    """
    if prompt and layout.nodes[:1].tolist() != [[0, prompt, layout.num_tokens]]:
        fix = f"pass SharedLayout.from_lengths([({prompt}, responses)])"
        needs = f"one prompt of {prompt} tokens, which all others see"
        raise ValueError(need(OP, "a layout of other lengths", needs, fix))


def _nodes(prompt: int, responses: list[int]) -> list[list[int]]:
    """Returns the rows [first, end, tout] of `layout.nodes` for one group."""
    ends = [0, *accumulate([prompt, *responses])]
    found = [[a, b, b] for a, b in pairwise(ends) if a < b]
    if prompt:
        found[0][2] = ends[-1]
    return found


def _check_parts(q: Tensor, parts: dict[str, Tensor], layout: SharedLayout | None) -> None:
    """Raises ValueError if layout, q, keys and values cannot be concatenated and used together."""
    if not isinstance(layout, SharedLayout | None):
        got, fix = f"layout is {type(layout).__name__}", "pass SharedLayout.from_lengths(...)"
        raise ValueError(need(OP, got, "a SharedLayout or None", fix))
    expect_tensors(OP, q=q, **parts)
    like = parts["k_context"]
    for name, x in parts.items():
        other = parts["k" + name[1:]]
        if x.dim() != 3 or x.shape[1:] != like.shape[1:] or len(x) != len(other):
            got, needs = f"{name} has shape {tuple(x.shape)}", "[tokens, Hk, D], k's and v's alike"
            fix = f"pass keys and values of the same tokens; k_context has {tuple(like.shape)}"
            raise ValueError(need(OP, got, needs, fix))
        if (x.dtype, x.device) != (q.dtype, q.device):
            got, needs = f"{name} is {x.dtype} on {x.device}", f"{q.dtype} on {q.device}, as q"
            raise ValueError(need(OP, got, needs, f"pass {name}.to(q)"))


def _on_the_host(*bounds: Tensor) -> bool:
    return all(x.is_cpu for x in bounds) and not torch.compiler.is_compiling()


def _lengths(name: str, bounds: Tensor) -> list[int]:
    """Reads bounds and returns the sequence lengths; ValueError if not ascending from 0."""
    found: list[int] = bounds.tolist() if bounds.dim() == 1 else []
    lengths = [b - a for a, b in pairwise(found)]
    if not found or found[0] != 0 or min(lengths, default=0) < 0:
        got = f"{name} = {bounds.tolist()}"
        needs, fix = "[N + 1] bounds from 0 on, ascending", "pass sums of the lengths"
        raise ValueError(need(OP, got, needs, fix))
    return lengths


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
