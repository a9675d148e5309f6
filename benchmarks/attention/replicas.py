"""Every sequence in full, for libraries that cannot share prompts: what their users do."""

from typing import NamedTuple

import torch
from torch import Tensor

from .problem import AttentionWorkload


class Replicas(NamedTuple):
    """Sequences end to end: which packed token each of their tokens is."""

    source: Tensor  # int64 [tokens of all sequences]
    position: Tensor  # int64, in its sequence
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
        first = self.first.view(-1, *[1] * (do.dim() - 1))
        return torch.where(first, do[self.source], 0)


def replicas(workload: AttentionWorkload, device: torch.device, padded: bool = False) -> Replicas:
    """`padded` gives each sequence the longest's length.

    Under a causal mask no token sees what is behind it, and what is behind has no gradient, so
    that padding may be any token: the first.
    """
    source, first, position, lengths = [], [], [], []
    pairs = list(workload.sequences())
    longest = max(len(prompt) + len(response) for prompt, response in pairs)
    before = range(0)
    for prompt, response in pairs:
        length = len(prompt) + len(response)
        behind = longest - length if padded else 0
        source += [torch.arange(r.start, r.stop) for r in (prompt, response)]
        source.append(torch.zeros(behind, dtype=torch.int64))
        first += [torch.full((len(prompt),), prompt != before), torch.ones(len(response)).bool()]
        first.append(torch.zeros(behind, dtype=torch.bool))
        position.append(torch.arange(length + behind))
        lengths.append(length + behind)
        before = prompt
    return Replicas(
        torch.cat(source).to(device),
        torch.cat(position).to(device),
        torch.cat(first).to(device),
        torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32),
        tuple(lengths),
        workload.tokens,
    )
