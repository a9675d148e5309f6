"""Attention by flash-attn-4, cuDNN and FlexAttention. Ours are in ours_attention.

A library that cannot share prompts is given every sequence in full, which is what its users do.
flash-attn-4 is also given the work without the repetition, as three calls and a merge: that is the
rival to beat.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention import AttentionInputs, AttentionWorkload
from .baselines import Call, Implementation, Outputs
from .ours_attention import ours
from .workloads_attention import SharedPrompts


class Replicas(NamedTuple):
    """Every sequence in full, end to end: which packed token each of their tokens is."""

    source: Tensor  # int64 [tokens of all sequences]
    first: Tensor  # bool: the packed token's first copy
    cu_seqlens: Tensor  # int32 [S + 1]
    lengths: tuple[int, ...]
    tokens: int  # packed

    def once(self, x: Tensor) -> Tensor:
        """Each packed token's row, from its first copy."""
        packed = x.new_empty(self.tokens, *x.shape[1:])
        packed[self.source[self.first]] = x[self.first]
        return packed

    def summed(self, x: Tensor) -> Tensor:
        """Each packed token's row, summed over its copies."""
        packed = x.new_zeros(self.tokens, *x.shape[1:], dtype=torch.float32)
        return packed.index_add_(0, self.source, x.float()).to(x.dtype)

    def upstream(self, do: Tensor) -> Tensor:
        """Only first copies are outputs, so only they have a gradient."""
        return torch.where(self.first[:, None, None], do[self.source], 0)


def replicas(workload: AttentionWorkload, device: torch.device) -> Replicas:
    source, first, lengths = [], [], []
    before = range(0)
    for prompt, response in workload.sequences():
        source += [torch.arange(r.start, r.stop) for r in (prompt, response)]
        first += [torch.full((len(prompt),), prompt != before), torch.ones(len(response)).bool()]
        lengths.append(len(prompt) + len(response))
        before = prompt
    return Replicas(
        torch.cat(source).to(device),
        torch.cat(first).to(device),
        torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32),
        tuple(lengths),
        workload.tokens,
    )


def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def _outputs(*tensors: Tensor) -> Outputs:
    """o, or dq, dk, dv, as the truth has them."""
    names = ("o",) if len(tensors) == 1 else ("dq", "dk", "dv")
    return {name: x[None] for name, x in zip(names, tensors, strict=True)}


def _unmasked(workload: AttentionWorkload) -> bool:
    """Causal attention of whole sequences is all that it takes."""
    if workload.direction == "index":
        return False
    return isinstance(workload, SharedPrompts) or workload.dense


class FlashAttention4(Implementation):
    """Every sequence in full; backward through the function that its autograd calls."""

    name, label = "fa4", "flash-attn-4"
    module, distribution = "flash_attn.cute.interface", "flash-attn-4"

    def inapplicable(self, workload: AttentionWorkload) -> str | None:
        return None if _unmasked(workload) else "it has no such mask"

    def prepare(self, workload: AttentionWorkload, inputs: AttentionInputs) -> Call:
        ops = importlib.import_module(self.module)
        full = replicas(workload, inputs.q.device)
        q, k, v = (x[full.source] for x in (inputs.q, inputs.k, inputs.v))
        spans = _spans(full.cu_seqlens, max(full.lengths), full.cu_seqlens, max(full.lengths))
        options = {"causal": True, "softmax_scale": workload.head_dim**-0.5, **spans}

        def forward() -> Any:
            return ops.flash_attn_varlen_func(q, k, v, return_lse=True, **options)

        if inputs.do is None:
            return Call(forward, lambda raw: _outputs(full.once(raw[0])), lambda: forward)
        o, lse = forward()
        do = full.upstream(inputs.do)
        return Call(
            lambda: ops._flash_attn_bwd(q, k, v, o, do, lse, **options),
            lambda raw: _outputs(*(full.summed(x) for x in raw[:3])),
        )


def _spans(cu_q: Tensor, longest_q: int, cu_k: Tensor, longest_k: int) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k,
        "max_seqlen_q": longest_q, "max_seqlen_k": longest_k,
    }  # fmt: skip


class FlashAttention4Shared(Implementation):
    """Prompts causally, responses on their prompt, responses causally; then the last two merged.

    Each backward gets the merged output and log-sum-exp, so that its probabilities are the final
    ones, and the gradients that meet in a prompt or in a response are added.
    """

    name, label = "fa4_shared", "flash-attn-4, 3 calls"
    module, distribution = "flash_attn.cute.interface", "flash-attn-4"

    def inapplicable(self, workload: AttentionWorkload) -> str | None:
        if not isinstance(workload, SharedPrompts):
            return "it has no such mask"
        return None if any(r for _, r in workload.groups) else "nothing is shared"

    def prepare(self, workload: SharedPrompts, inputs: AttentionInputs) -> Call:
        ops = importlib.import_module(self.module)
        device, scale = inputs.q.device, workload.head_dim**-0.5
        pairs = list(workload.sequences())
        prompts = list(dict.fromkeys(prompt for prompt, _ in pairs))
        in_prompt = torch.cat([torch.arange(p.start, p.stop) for p in prompts]).to(device)
        in_response = torch.cat([torch.arange(r.start, r.stop) for _, r in pairs]).to(device)
        prompt_lengths = tuple(len(p) for p in prompts)
        response_lengths = tuple(len(r) for _, r in pairs)
        group_lengths = tuple(sum(r) for _, r in workload.groups)  # all queries of one prompt
        cu_prompts, cu_responses, cu_groups = (
            _bounds(x, device) for x in (prompt_lengths, response_lengths, group_lengths)
        )
        own_prompt = _spans(cu_prompts, max(prompt_lengths), cu_prompts, max(prompt_lengths))
        on_prompt = _spans(cu_groups, max(group_lengths), cu_prompts, max(prompt_lengths))
        own = _spans(cu_responses, max(response_lengths), cu_responses, max(response_lengths))
        calls = ((own_prompt, True), (on_prompt, False), (own, True))
        p = [x[in_prompt] for x in (inputs.q, inputs.k, inputs.v)]
        r = [x[in_response] for x in (inputs.q, inputs.k, inputs.v)]
        operands = (p, [r[0], p[1], p[2]], r)

        def forward() -> Any:
            parts = [
                ops.flash_attn_varlen_func(
                    *qkv, return_lse=True, causal=causal, softmax_scale=scale, **spans
                )
                for qkv, (spans, causal) in zip(operands, calls, strict=True)
            ]
            return parts[0], merge(parts[1], parts[2])

        def collect(raw: Any) -> Outputs:
            o = torch.empty_like(inputs.q)
            o[in_prompt], o[in_response] = raw[0][0], raw[1][0]
            return _outputs(o)

        if inputs.do is None:
            return Call(forward, collect, lambda: forward)
        of_prompt, of_response = forward()
        do_prompt, do_response = inputs.do[in_prompt], inputs.do[in_response]
        results = (
            (*of_prompt, do_prompt), (*of_response, do_response), (*of_response, do_response),
        )  # fmt: skip

        def backward() -> Any:
            a, b, c = (
                ops._flash_attn_bwd(*qkv, o, do, lse, causal=causal, softmax_scale=scale, **spans)[
                    :3
                ]
                for qkv, (spans, causal), (o, lse, do) in zip(operands, calls, results, strict=True)
            )
            return (a[0], b[0] + c[0]), (a[1] + b[1], c[1]), (a[2] + b[2], c[2])

        def collect_gradients(raw: Any) -> Outputs:
            packed = [torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.v)]
            for x, (prompt, response) in zip(packed, raw, strict=True):
                x[in_prompt], x[in_response] = prompt, response
            return _outputs(*packed)

        return Call(backward, collect_gradients)


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(o, lse) over two disjoint sets of keys; o [T, H, D], lse [H, T], natural log."""
    lse = torch.logaddexp(a[1], b[1])
    weights = ((part[1] - lse).exp().T[..., None] for part in (a, b))
    o = sum(weight * part[0] for weight, part in zip(weights, (a, b), strict=True))
    return torch.as_tensor(o).to(a[0].dtype), lse


class CudnnAttention(Implementation):
    """PyTorch's scaled_dot_product_attention on its cuDNN backend; equal lengths only."""

    name, label = "cudnn", "cuDNN"
    module, distribution = "torch", "torch"

    def version(self) -> str:
        return str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]

    def inapplicable(self, workload: AttentionWorkload) -> str | None:
        if not _unmasked(workload):
            return "it has no such mask"
        lengths = {len(prompt) + len(response) for prompt, response in workload.sequences()}
        return None if len(lengths) == 1 else "it has no packed sequences"

    def prepare(self, workload: AttentionWorkload, inputs: AttentionInputs) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        full = replicas(workload, inputs.q.device)
        batch = len(full.lengths)

        def batched(x: Tensor) -> Tensor:
            return x.view(batch, -1, *x.shape[1:]).transpose(1, 2).contiguous()

        def packed(x: Tensor) -> Tensor:
            return x.transpose(1, 2).flatten(0, 1)

        q, k, v = (batched(x[full.source]).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))

        def forward() -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True
                )

        if inputs.do is None:
            return Call(forward, lambda raw: _outputs(full.once(packed(raw))), lambda: forward)
        do = batched(full.upstream(inputs.do))
        return _gradients(forward(), (q, k, v), do, lambda x: full.summed(packed(x)))


class FlexAttention(Implementation):
    """torch's compiled FlexAttention with the workload's own mask; the block mask made before."""

    name, label = "flex", "FlexAttention"
    module, distribution = "torch.nn.attention.flex_attention", "torch"
    tunes = True
    compiled = True

    def inapplicable(self, workload: AttentionWorkload) -> str | None:
        return "it is given its lines" if workload.direction == "index" else None

    def prepare(self, workload: AttentionWorkload, inputs: AttentionInputs) -> Call:
        flex = importlib.import_module(self.module)
        visible, tokens = inputs.visible, workload.tokens

        def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return visible(query, key)

        build = torch.compile(flex.create_block_mask) if self.compiled else flex.create_block_mask
        attend = torch.compile(flex.flex_attention) if self.compiled else flex.flex_attention
        blocks = build(mask, None, None, tokens, tokens, device=inputs.q.device)
        q, k, v = (
            x.transpose(0, 1)[None].contiguous().requires_grad_(inputs.do is not None)
            for x in (inputs.q, inputs.k, inputs.v)
        )

        def forward() -> Any:
            return attend(q, k, v, block_mask=blocks, enable_gqa=True)

        def packed(x: Tensor) -> Tensor:
            return x[0].transpose(0, 1)

        if inputs.do is None:
            return Call(forward, lambda raw: _outputs(packed(raw)), lambda: forward)
        return _gradients(forward(), (q, k, v), inputs.do.transpose(0, 1)[None], packed)


def _gradients(
    o: Tensor, leaves: tuple[Tensor, ...], do: Tensor, packed: Callable[[Tensor], Tensor]
) -> Call:
    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, leaves, do, retain_graph=True)

    return Call(run, lambda raw: _outputs(*(packed(x) for x in raw)))


def known(family: str) -> list[Implementation]:
    shared = [FlashAttention4Shared()] if family == "dualkv" else []
    return [*ours(family), FlashAttention4(), *shared, CudnnAttention(), FlexAttention()]
