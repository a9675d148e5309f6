"""PyTorch's FlexAttention, compiled, with the workload's own mask."""

import importlib
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch.nn.functional import pad

from ..harness.adapters import Call, Implementation
from .ours import ATTENTION_ALONE
from .problem import AttentionInputs, AttentionWorkload, Visible, outputs

BLOCK = 128  # rows and columns of its blocks
LENGTHS = 256  # that a process may compile it for; torch gives up after 8


class FlexAttention(Implementation):
    """The block mask is made before, as a model makes it once for all layers.

    Compiled for each length by itself, as it is fastest: left to itself, torch would do so for the
    first row alone, and time all others with lengths that its kernels do not know. A graph break
    is an error: it would go on without its kernels otherwise.
    """

    name, label = "flex", "FlexAttention"
    module, distribution = "torch.nn.attention.flex_attention", "torch"
    by_length = True
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
        q, k, v = (_heads_first(x) for x in inputs[:3])

        def forward() -> Any:
            return attend(q, k, v, block_mask=mask, enable_gqa=True)

        if inputs.do is None:
            return Call(forward, lambda raw: outputs(_tokens_first(raw)), lambda: forward)
        leaves, do = [x.requires_grad_() for x in (q, k, v)], _heads_first(inputs.do)
        o = forward()

        def backward() -> Any:
            return torch.autograd.grad(o, leaves, do, retain_graph=True)

        return Call(backward, lambda raw: outputs(*map(_tokens_first, raw)), lambda: backward)


def _heads_first(x: Tensor) -> Tensor:
    """[1, H, T, D] of [T, H, D]."""
    return x.transpose(0, 1)[None].contiguous()


def _tokens_first(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def block_mask(flex: Any, visible: Visible, tokens: int, device: torch.device) -> Any:
    """create_block_mask's result, a strip of queries at a time: 128K tokens have 17 GB of mask."""
    token = torch.arange(tokens, device=device)
    strips = []
    for start in range(0, tokens, BLOCK):
        seen = visible(token[start : start + BLOCK, None], token[None])
        whole = pad(seen, (0, -tokens % BLOCK, 0, BLOCK - len(seen)))
        strips.append(torch.unflatten(whole, 1, (-1, BLOCK)).sum((0, 2)))
    pairs = torch.stack(strips)[None, None]  # [1, 1, blocks, blocks]
    full = pairs == BLOCK**2
    return flex.BlockMask.from_kv_blocks(
        *_listed((pairs > 0) & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda batch, head, query, key: visible(query, key),
        seq_lengths=(tokens, tokens),
    )


def _listed(active: Tensor) -> tuple[Tensor, Tensor]:
    """How many columns of each row are active, and which: those first, in order."""
    columns = torch.argsort(active.int(), dim=-1, descending=True, stable=True)
    return active.sum(-1, dtype=torch.int32), columns.int()
