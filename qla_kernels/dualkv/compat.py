"""`dualkv_varlen`: the signature of published shared-prompt kernels, for code that calls them.

A call has one group, with keys and values of prompt and responses in separate tensors. The function
copies keys and values to concatenate them; new code should pack a batch and call
`shared_prefix_attention`.
"""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from qla_kernels.dualkv.api import attend
from qla_kernels.dualkv.plan import SharedLayout
from qla_kernels.dualkv.tokens import is_whole, on_host
from qla_kernels.dualkv.validate import check_tensors, refusal
from qla_kernels.runtime.arguments import flag, integer
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.sm90 import expect_tensors, require

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
    """Computes attention of N responses that share one prompt; differentiable.

    The prompt has P tokens, and response i has R_i tokens. q has the queries of all responses, one
    response after another, so that response i has q_i = R_i queries. Optionally the queries of the
    prompt come before those of the first response; then q_0 = P + R_0.

    Args:
        q: [sum q_i, H, D].
        k_context, v_context: [P, Hk, D].
        k_decoded, v_decoded: [sum R_i, Hk, D], response after response.
        cu_seqlens_q, cu_seqlens_k_decoded: [N + 1], cumulative sums, from 0, of q_i and of R_i.
        max_seqlen_q, max_seqlen_k_decoded: ignored; must not require a gradient.
        context_seqlen: P.
        softmax_scale: factor of the scores; D ** -0.5 if None.
        causal: must be True.
        layout: SharedLayout.from_lengths([(P, [R_0, ..])]), on q's device. If None, each call
            builds a layout; if the bounds are on a GPU, the call waits for the GPU to read the
            bounds.

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
    if not flag(OP, "causal", causal):
        fix = "use another kernel for responses that see their own later tokens"
        raise Unsupported(need(OP, "causal=False", "causal=True", fix))
    _check_constant("max_seqlen_q", max_seqlen_q)
    _check_constant("max_seqlen_k_decoded", max_seqlen_k_decoded)
    context_seqlen = integer(OP, "context_seqlen", context_seqlen)
    if len(k_context) != context_seqlen:
        got = f"k_context has shape {tuple(k_context.shape)}"
        needs, fix = f"[{context_seqlen}, Hk, D]", "pass context_seqlen=k_context.shape[0]"
        raise ValueError(need(OP, got, needs, fix))
    _check_bounds("cu_seqlens_q", cu_seqlens_q)
    _check_bounds("cu_seqlens_k_decoded", cu_seqlens_k_decoded)
    if layout is None or _on_the_host(cu_seqlens_q, cu_seqlens_k_decoded):
        queries = _lengths("cu_seqlens_q", cu_seqlens_q)
        responses = _lengths("cu_seqlens_k_decoded", cu_seqlens_k_decoded)
        _check_queries(queries, responses, context_seqlen)
        for name, x, lengths in (("q", q, queries), ("k_decoded", k_decoded, responses)):
            if len(x) != sum(lengths):
                got, needs = f"{name} has {len(x)} tokens", f"{sum(lengths)}, as the bounds say"
                fix = "pass the tokens of the sequences of cu_seqlens, and no others"
                raise ValueError(need(OP, got, needs, fix))
        if layout is None:
            layout = SharedLayout.from_lengths([(context_seqlen, responses)], device=q.device)
        elif layout.nodes.tolist() != _nodes(context_seqlen, responses):
            fix = f"pass SharedLayout.from_lengths([({context_seqlen}, {responses})])"
            needs = f"responses of {responses} on a prompt of {context_seqlen}, as in cu_seqlens"
            raise ValueError(need(OP, "layout has other lengths", needs, fix))
    elif not torch.compiler.is_compiling():  # which cannot trace this
        _check_prompt(layout, context_seqlen)
    k, v = torch.cat([k_context, k_decoded]), torch.cat([v_context, v_decoded])
    q_shift = context_seqlen if len(q) == len(k) - context_seqlen else 0
    check_tensors(OP, q, k, v, layout, q_shift)
    require(refusal(q, k, v, scale=softmax_scale, op=OP))
    o, _ = attend(q, k, v, layout, softmax_scale, None, False, q_shift)
    return o


def _check_prompt(layout: SharedLayout, prompt: int) -> None:
    """Raises ValueError unless the layout's first node is a prompt of this length that all see.

    That is, all later tokens of the layout. Used if the caller's cumulative lengths are on a GPU
    and are not read. The layout's nodes are on the host, so the host waits for nothing.
    """
    if prompt and layout.nodes[:1].tolist() != [[0, prompt, layout.num_tokens]]:
        fix = f"pass SharedLayout.from_lengths([({prompt}, responses)])"
        needs = f"one prompt of {prompt} tokens, which all others see"
        raise ValueError(need(OP, "layout has other lengths", needs, fix))


def _nodes(prompt: int, responses: list[int]) -> list[list[int]]:
    """Returns the rows [first, end, tout] of `layout.nodes` for one group."""
    ends = [0, *accumulate([prompt, *responses])]
    rows = [[a, b, b] for a, b in pairwise(ends) if a < b]
    if prompt:
        rows[0][2] = ends[-1]
    return rows


def _check_parts(q: Tensor, parts: dict[str, Tensor], layout: SharedLayout | None) -> None:
    """Raises ValueError if layout, q, keys and values cannot be concatenated and used together."""
    if not isinstance(layout, SharedLayout | None):
        got = f"layout is of type {type(layout).__name__}"
        fix = "pass SharedLayout.from_lengths(...), or leave it out"
        raise ValueError(need(OP, got, "a SharedLayout or None", fix))
    expect_tensors(OP, q=q, **parts)
    if q.dim() != 3:
        fix = "pass the packed queries, without a batch dimension"
        raise ValueError(need(OP, f"q has shape {tuple(q.shape)}", "[tokens, H, D]", fix))
    like = parts["k_context"]
    for name, x in parts.items():
        other = parts["k" + name[1:]]
        if x.dim() != 3 or x.shape[1:] != like.shape[1:] or len(x) != len(other):
            got = f"{name} has shape {tuple(x.shape)}"
            needs = f"[tokens, Hk, D] with Hk and D of k_context, {tuple(like.shape)}"
            fix = "pass keys and values of the same tokens and heads"
            raise ValueError(need(OP, got, needs, fix))
        if (x.dtype, x.device) != (q.dtype, q.device):
            got, needs = f"{name} is {x.dtype} on {x.device}", f"{q.dtype} on {q.device}, as q"
            raise ValueError(need(OP, got, needs, f"pass {name}.to(q)"))


def _check_constant(name: str, x: object) -> None:
    """Raises ValueError for a tensor that requires a gradient, because it would get none."""
    if isinstance(x, Tensor) and x.requires_grad:
        got = f"{name} requires a gradient, and would get none"
        raise ValueError(need(OP, got, "a constant", f"pass int({name})"))


def _check_bounds(name: str, bounds: Tensor) -> None:
    """Raises ValueError unless bounds is a tensor of integers."""
    expect_tensors(OP, **{name: bounds})
    if not is_whole(bounds):
        got, fix = f"{name} is {bounds.dtype}", f"pass {name}.int()"
        raise ValueError(need(OP, got, "int32 or int64", fix))


def _on_the_host(*bounds: Tensor) -> bool:
    """Returns whether the bounds can be read without a wait: they are on the CPU, not traced."""
    return all(x.is_cpu for x in bounds) and not torch.compiler.is_compiling()


def _lengths(name: str, bounds: Tensor) -> list[int]:
    """Reads bounds and returns the sequence lengths; ValueError if not ascending from 0."""
    values = on_host(OP, name, bounds).tolist()
    lengths = [b - a for a, b in pairwise(values)] if bounds.dim() == 1 else []
    if bounds.dim() != 1 or not values or values[0] != 0 or min(lengths, default=0) < 0:
        needs = "[N + 1] bounds that begin with 0 and never fall"
        fix = "pass 0 and the cumulated lengths"
        raise ValueError(need(OP, f"{name} is {values}", needs, fix))
    return lengths


def _check_queries(queries: list[int], responses: list[int], prompt: int) -> None:
    """Raises unless the queries' lengths are in one of the two forms of `dualkv_varlen`.

    ValueError for another number of sequences, Unsupported for other lengths.
    """
    if len(queries) != len(responses):
        got = (
            f"cu_seqlens_q has {len(queries)} sequences, cu_seqlens_k_decoded has {len(responses)}"
        )
        raise ValueError(need(OP, got, "as many in both", "pass [N + 1] bounds of N responses"))
    merged = [prompt * (i == 0) + r for i, r in enumerate(responses)]
    if queries not in (responses, merged):
        got = f"sequences have {queries} queries, responses {responses} keys, the prompt {prompt}"
        needs = f"{responses} queries, or {merged} with the prompt's queries once"
        fix = "drop the prompt's queries from all sequences but the first"
        raise Unsupported(need(OP, got, needs, fix))
