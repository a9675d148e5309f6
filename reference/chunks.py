"""Chunks: which token of a packed batch sits in which row of which tile.

Chunks restart at every sequence. They are numbered by their index within the sequence ("step")
first and by sequence second, longest sequence first. Two things follow, and they are why a
recurrence over chunks needs no scatter: the chunks of one step are a slice of every [NC, ...]
tensor, and the sequences still running at a step are a prefix of those at the step before.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Chunks(NamedTuple):
    rows: Tensor  # [NC, C] flat index of the row's token; past the end, of the chunk's last token
    valid: Tensor  # [NC, C] False past the end of the sequence
    sequence: Tensor  # [NC]
    step: Tensor  # [NC] index of the chunk within its sequence
    longest_first: Tensor  # [N] sequences in the order of a step's slice
    counts: list[int]  # counts[i] = sequences that have a chunk i

    def tiles(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, ...] -> [NC, C, ...]; rows past the end are 0 whatever memory holds there."""
        tile = x.flatten(0, 1)[self.rows].to(dtype)
        valid = self.valid.reshape(self.valid.shape + (1,) * (tile.ndim - 2))
        return torch.where(valid, tile, torch.zeros((), dtype=dtype, device=x.device))

    def tiles_held(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, ...] -> [NC, C, ...]; rows past the end hold the chunk's last value."""
        return x.flatten(0, 1)[self.rows].to(dtype)

    def tokens(self, tile: Tensor, batch: int, num_tokens: int) -> Tensor:
        """[NC, C, ...] -> [B, T, ...]; tokens of no sequence are 0."""
        flat = tile.new_zeros(batch * num_tokens, *tile.shape[2:])
        flat = flat.index_copy(0, self.rows[self.valid], tile[self.valid])
        return flat.reshape(batch, num_tokens, *tile.shape[2:])

    def steps(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Per step, the slice of each [NC, ...] tensor that the step works on."""
        return list(zip(*(torch.split(x, self.counts) for x in tensors), strict=True))

    def in_sequence_order(self, x: Tensor) -> Tensor:
        """[NC, ...] numbered by step -> numbered by sequence, then step."""
        return x[torch.argsort(self.sequence * len(self.counts) + self.step)]


def sequence_spans(batch: int, num_tokens: int, cu_seqlens: Tensor | None) -> Tensor:
    """First and one-past-last flat token of each sequence, [N, 2] on the CPU."""
    if cu_seqlens is None:
        ends = torch.arange(1, batch + 1, device="cpu") * num_tokens
        return torch.stack([ends - num_tokens, ends], 1)
    bounds = cu_seqlens.detach().long().cpu()
    return torch.stack([bounds[:-1], bounds[1:]], 1)


def cut(spans: Tensor, chunk_size: int, device: torch.device) -> Chunks:
    """Chunks of `chunk_size` tokens over each span; a span's last chunk may be partial."""
    (starts, ends), here = spans.unbind(1), spans.device
    lengths = (ends - starts + chunk_size - 1) // chunk_size  # [N] in chunks
    longest_first = torch.argsort(lengths, descending=True, stable=True)
    counts = [int((lengths > i).sum()) for i in range(max(lengths.tolist(), default=0))]
    sequence = torch.cat([longest_first[:n] for n in (0, *counts)])
    repeats = torch.tensor(counts, dtype=torch.long, device=here)
    step = torch.arange(len(counts), device=here).repeat_interleave(repeats)
    rows = (starts[sequence] + step * chunk_size)[:, None] + torch.arange(chunk_size, device=here)
    last = ends[sequence][:, None] - 1
    return Chunks(
        rows=rows.minimum(last).to(device),
        valid=(rows <= last).to(device),
        sequence=sequence.to(device),
        step=step.to(device),
        longest_first=longest_first.to(device),
        counts=counts,
    )
