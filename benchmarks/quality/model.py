"""A small language model whose attention is exact or sparse, of sequences on one device.

Half of the channels in front of attention are those of the token before. So a key can say which
token came before it, and one layer can look up what followed a token. Without this a model learns
it much later, by two layers, and the experiment is not about that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qla_kernels.sparse_ring import VerticalSlash, sparse_attention

BASE = 5e5  # of the rotation


@dataclass(frozen=True)
class Sizes:
    vocabulary: int
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64


@dataclass(frozen=True)
class Attention:
    """Exact if there is no pattern; `on_index` is called with (layer, q, k, index)."""

    pattern: VerticalSlash | None = None
    on_index: Callable[..., None] | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns o [B, T, H, D]; q, k and v have their tokens in dimension 1, too."""
        if self.pattern is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return o.transpose(1, 2)
        o, index = sparse_attention(q, k, v, pattern=self.pattern, return_index=True)
        if self.on_index is not None:
            self.on_index(layer, q.detach(), k.detach(), index)
        return o  # type: ignore[no-any-return]


def rotated(x: Tensor) -> Tensor:
    """Returns x [B, T, H, D] with rotary embedding, in its dtype; computed in fp32."""
    T, half = x.shape[1], x.shape[-1] // 2
    frequency = BASE ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = torch.arange(T, device=x.device)[:, None, None] * frequency
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def with_token_before(x: Tensor) -> Tensor:
    """Returns x [B, T, C] with the second half of its channels from the token before."""
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    half = x.shape[-1] // 2
    return torch.cat([x[..., :half], before[..., half:]], -1)


class Layer(nn.Module):
    def __init__(self, size: Sizes, number: int) -> None:
        super().__init__()
        self.size, self.number = size, number
        rows = (size.heads + 2 * size.kv_heads) * size.head_dim
        self.before_attention, self.before_mlp = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, rows, bias=False)
        self.out = nn.Linear(size.heads * size.head_dim, size.width, bias=False)
        self.up = nn.Linear(size.width, 6 * size.width, bias=False)  # and its gate
        self.down = nn.Linear(3 * size.width, size.width, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        size = self.size
        heads = self.qkv(with_token_before(self.before_attention(x)))
        heads = heads.unflatten(-1, (-1, size.head_dim))
        q, k, v = heads.split([size.heads, size.kv_heads, size.kv_heads], 2)
        q, k = rotated(q), rotated(k)
        x = x + self.out(attention(self.number, q, k, v.contiguous()).flatten(2))
        gate, up = self.up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, size: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(size, n) for n in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, attention: Attention) -> tuple[Any, ...]:
        """Returns the row, the loss and the correctness of each label, [labels] each."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, attention)
        row, column = (labels >= 0).nonzero(as_tuple=True)
        logits = self.head(self.norm(x[row, column])).float()
        want = labels[row, column]
        loss = F.cross_entropy(logits, want, reduction="none")
        return (row, column), loss, logits.detach().argmax(-1) == want
