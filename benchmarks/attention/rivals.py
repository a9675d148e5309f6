"""Attention by flash-attn-4, cuDNN, and FlexAttention with the workload's own mask.

A library that cannot share prompts is given every sequence in full, which is what its users do.
flash-attn-4 is also given the work without the repetition, as three calls and a merge: that is the
rival to beat.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch.nn.functional import pad, scaled_dot_product_attention

from ..harness.adapters import Call, Implementation, Outputs, backward_of
from ..hybrid.layers import whole
from ..hybrid.mixing import Attends
from .ours import ATTENTION_ALONE, Unary, low_level, ours
from .problem import AttentionInputs, AttentionWorkload, Visible, outputs, replicas
from .workloads import DecoderLayer, SharedPrompts

FLEX_BLOCK = 128  # rows and columns of FlexAttention's blocks
LENGTHS = 256  # that a process may compile FlexAttention for; torch gives up after 8
NO_MASK = "it has no such mask"


def by_autograd(
    qkv: Sequence[Tensor], do: Tensor | None, attend: Callable[..., Tensor], once: Unary,
    summed: Unary,
) -> Call:  # fmt: skip
    """A public function, or its backward; `once` and `summed` are those of `low_level`."""
    if do is None:
        return Call.public(lambda: attend(*qkv), lambda raw: outputs(once(raw.detach())))
    return Call.public(backward_of(attend, qkv, do), lambda raw: outputs(*map(summed, raw)))


def _unmasked(workload: AttentionWorkload) -> bool:
    """Causal attention of whole sequences is all that it takes."""
    dense = isinstance(workload, SharedPrompts) or workload.dense
    return dense and workload.direction != "index"


class FlashAttention4(Implementation):
    """Every sequence in full; backward through the function that its autograd calls."""

    name, label = "fa4", "flash-attn-4"
    module, distribution = "flash_attn.cute.interface", "flash-attn-4"

    def inapplicable(self, workload: AttentionWorkload) -> str | None:
        return None if _unmasked(workload) else NO_MASK

    def prepare(self, workload: AttentionWorkload, inputs: Any) -> Call:
        ops = importlib.import_module(self.module)
        full = replicas(workload, inputs[0].device)
        options = _options(workload, True, full.lengths, full.lengths, inputs[0].device)
        attend = partial(ops.flash_attn_varlen_func, return_lse=True, **options)

        def public(*qkv: Tensor) -> Tensor:
            return torch.as_tensor(attend(*qkv)[0])

        if isinstance(workload, DecoderLayer):
            return whole(workload, inputs, lambda _: Attends(public))
        q, k, v = qkv = [x[full.source] for x in inputs[:3]]
        do = None if inputs.do is None else full.upstream(inputs.do)

        def backward(o: Tensor, lse: Tensor) -> Any:
            return ops._flash_attn_bwd(q, k, v, o, do, lse, **options)

        return low_level(qkv, do, partial(attend, *qkv), backward, public, full.once, full.summed)


def _options(
    workload: AttentionWorkload, causal: bool, lengths: Sequence[int], of_keys: Sequence[int],
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Of sequences of queries, and those of the keys that they see."""
    both = (lengths, of_keys)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(device, torch.int32) for x in both)
    return {
        "causal": causal, "softmax_scale": workload.head_dim**-0.5, "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k, "max_seqlen_q": max(lengths), "max_seqlen_k": max(of_keys),
    }  # fmt: skip


class FlashAttention4Shared(Implementation):
    """Prompts causally, responses on their prompt, responses causally; then the last two merged.

    Each backward gets the merged output and log-sum-exp, so that its probabilities are the final
    ones, and the gradients that meet in a prompt or in a response are added.
    """

    name, label = "fa4_shared", "flash-attn-4, 3 calls"
    module, distribution = "flash_attn.cute.interface", "flash-attn-4"
    merges = True  # in the time; else the calls are timed alone, which nobody can use as they are

    def inapplicable(self, workload: AttentionWorkload) -> str | None:
        if not isinstance(workload, SharedPrompts):
            return NO_MASK
        if isinstance(workload, DecoderLayer):
            return ATTENTION_ALONE
        return None if any(r for _, r in workload.groups) else "nothing is shared"

    def prepare(self, workload: SharedPrompts, inputs: AttentionInputs) -> Call:
        ops, device = importlib.import_module(self.module), inputs.q.device
        pairs = list(workload.sequences())
        prompts = list(dict.fromkeys(prompt for prompt, _ in pairs))
        responses = [response for _, response in pairs]
        in_prompt, in_response = (
            torch.cat([torch.arange(x.start, x.stop) for x in ranges]).to(device)
            for ranges in (prompts, responses)
        )
        p, r = ([x[at] for x in inputs[:3]] for at in (in_prompt, in_response))
        of_prompt, of_response = list(map(len, prompts)), list(map(len, responses))
        of_group = [sum(lengths) for _, lengths in workload.groups]  # all queries of one prompt
        options = partial(_options, workload, device=device)
        calls = [
            (p, options(True, of_prompt, of_prompt)),
            ([r[0], *p[1:]], options(False, of_group, of_prompt)),
            (r, options(True, of_response, of_response)),
        ]
        merged = torch.compile(merge, fullgraph=True) if inputs.q.is_cuda else merge

        def forward() -> Any:
            attend = ops.flash_attn_varlen_func
            return [attend(*qkv, return_lse=True, **options) for qkv, options in calls]

        def joined(parts: Any) -> Any:
            return parts[0], merged(parts[1], parts[2])

        def packed(*tensors: Any) -> Outputs:
            """Of each tensor the rows of prompts and those of responses, where they were."""
            qkv = inputs.q, inputs.k, inputs.v
            found = [torch.empty_like(x) for x in qkv[: len(tensors)]]
            for x, (prompt, response) in zip(found, tensors, strict=True):
                x[in_prompt], x[in_response] = prompt, response
            return outputs(*found)

        if inputs.do is None:
            return self._call(forward, joined, lambda raw: packed((raw[0][0], raw[1][0])))
        of_prompts, of_responses = joined(forward())
        do_prompt, do_response = inputs.do[in_prompt], inputs.do[in_response]
        upstream = (*of_prompts, do_prompt), *[(*of_responses, do_response)] * 2

        def backward() -> Any:
            return [
                ops._flash_attn_bwd(*qkv, o, do, lse, **options)
                for (qkv, options), (o, lse, do) in zip(calls, upstream, strict=True)
            ]

        def added(parts: Any) -> Any:
            a, b, c = (part[:3] for part in parts)
            return (a[0], b[0] + c[0]), (a[1] + b[1], c[1]), (a[2] + b[2], c[2])

        return self._call(backward, added, lambda raw: packed(*raw))

    def _call(self, parts: Callable[[], Any], together: Any, collect: Any) -> Call:
        """No public function does this: an eager call is the same calls without a graph."""
        if self.merges:
            return Call.public(lambda: together(parts()), collect)
        return Call(parts, lambda raw: collect(together(raw)))


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(o, lse) over two disjoint sets of keys; o [T, H, D], lse [H, T], natural log."""
    lse = torch.logaddexp(a[1], b[1])
    weights = ((part[1] - lse).exp().T[..., None] for part in (a, b))
    o = sum(weight * part[0] for weight, part in zip(weights, (a, b), strict=True))
    return torch.as_tensor(o).to(a[0].dtype), lse


class CudnnAttention(Implementation):
    """PyTorch's scaled_dot_product_attention on its cuDNN backend; every sequence in full.

    It has no packed sequences: they are padded to the longest. A layer is not, because its products
    would take the padding as well.
    """

    name, label, module, distribution = "cudnn", "cuDNN", "torch", "torch"

    def version(self) -> str:
        return str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]

    def inapplicable(self, workload: AttentionWorkload) -> str | None:
        if not _unmasked(workload):
            return NO_MASK
        lengths = {len(prompt) + len(response) for prompt, response in workload.sequences()}
        packed = isinstance(workload, DecoderLayer) and len(lengths) > 1
        return "it has no packed sequences" if packed else None

    def prepare(self, workload: AttentionWorkload, inputs: Any) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        full = replicas(workload, inputs[0].device, padded=True)
        batch = len(full.lengths)

        def attend(*packed: Tensor) -> Tensor:
            q, k, v = (torch.unflatten(x, 0, (batch, -1)).transpose(1, 2) for x in packed)
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return o.transpose(1, 2).flatten(0, 1)

        if isinstance(workload, DecoderLayer):
            return whole(workload, inputs, lambda _: Attends(attend))
        # with gradients, so that a forward keeps its log-sum-exp as everyone's does
        qkv = [x[full.source].requires_grad_() for x in inputs[:3]]
        do = None if inputs.do is None else full.upstream(inputs.do)
        return by_autograd(qkv, do, attend, full.once, full.summed)


class FlexAttention(Implementation):
    """The block mask is made before, as a model makes it once for all layers.

    Compiled for each length by itself, as it is fastest: left to itself, torch would do so for the
    first row alone, and time all others with lengths that its kernels do not know. A graph break
    is an error: it would go on without its kernels otherwise.
    """

    name, label = "flex", "FlexAttention"
    module, distribution = "torch.nn.attention.flex_attention", "torch"
    compiled = True
    lacks: ClassVar = {"layer": ATTENTION_ALONE, "index": "it is given its lines"}

    def prepare(self, workload: AttentionWorkload, inputs: AttentionInputs) -> Call:
        flex = importlib.import_module(self.module)
        attend = flex.flex_attention
        if self.compiled:
            # a backward that runs again must not have overwritten what it was given
            functorch_config.donated_buffer = False
            dynamo_config.recompile_limit = LENGTHS
            attend = torch.compile(attend, fullgraph=True, dynamic=False)
        mask = block_mask(flex, inputs.visible, workload.tokens, inputs.q.device)
        qkv = [_heads_first(x) for x in inputs[:3]]
        do = None if inputs.do is None else _heads_first(inputs.do)
        call = partial(attend, block_mask=mask, enable_gqa=True)
        return by_autograd(qkv, do, call, _tokens_first, _tokens_first)


def _heads_first(x: Tensor) -> Tensor:
    """[1, H, T, D] of [T, H, D]."""
    return x.transpose(0, 1)[None].contiguous()


def _tokens_first(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def block_mask(flex: Any, visible: Visible, tokens: int, device: torch.device) -> Any:
    """create_block_mask's result, a strip of queries at a time: 128K tokens have 17 GB of mask."""
    token = torch.arange(tokens, device=device)
    strips = []
    for start in range(0, tokens, FLEX_BLOCK):
        seen = visible(token[start : start + FLEX_BLOCK, None], token[None])
        whole = pad(seen, (0, -tokens % FLEX_BLOCK, 0, FLEX_BLOCK - len(seen)))
        strips.append(torch.unflatten(whole, 1, (-1, FLEX_BLOCK)).sum((0, 2)))
    pairs = torch.stack(strips)[None, None]  # [1, 1, blocks, blocks]
    full = pairs == FLEX_BLOCK**2
    return flex.BlockMask.from_kv_blocks(
        *_listed((pairs > 0) & ~full), *_listed(full), BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=lambda batch, head, query, key: visible(query, key), seq_lengths=(tokens, tokens),
    )  # fmt: skip


def _listed(active: Tensor) -> tuple[Tensor, Tensor]:
    """How many columns of each row are active, and which: those first, in order."""
    columns = torch.argsort(active.int(), dim=-1, descending=True, stable=True)
    return active.sum(-1, dtype=torch.int32), columns.int()


def known(family: str) -> list[Implementation]:
    calls = {"name": "fa4_calls", "label": "flash-attn-4, 3 calls, not merged"}
    apart = FlashAttention4Shared(merges=False, on_request=True, **calls)
    shared = [FlashAttention4Shared(), apart] if family == "dualkv" else []
    return [*ours(family), FlashAttention4(), *shared, CudnnAttention(), FlexAttention()]
