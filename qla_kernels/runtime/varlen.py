"""Tables of chunks, built on the device from cu_seqlens or for a dense batch.

The host reads no value back. A table has room for the largest number of chunks that its shapes
allow; `num_chunks` holds their number, and kernels stop there. Chunks restart at each sequence, and
the last chunk of a sequence may hold fewer than 64 tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.tile.constants import CHUNK


class ChunkTable(NamedTuple):
    chunks: Tensor  # [capacity, 2] int32: first token, tokens (1..64); 0, 0 past num_chunks
    num_chunks: Tensor  # [1] int32
    first_chunk: Tensor  # [N + 1] int32: sequence n owns chunks first_chunk[n] to first_chunk[n+1]


def capacity(num_tokens: int, num_sequences: int, chunk: int = CHUNK) -> int:
    """Returns the most chunks that `num_tokens` tokens in `num_sequences` sequences can make.

    Every sequence adds at most one partial chunk, and every chunk holds at least one token.
    """
    return min(num_tokens, num_tokens // chunk + num_sequences)


def chunk_table(
    num_tokens: int,
    cu_seqlens: Tensor | None = None,
    batch: int = 1,
    device: torch.device | str | None = None,
    chunk: int = CHUNK,
) -> ChunkTable:
    """Returns the table of chunks of packed sequences, or of `batch` rows of `num_tokens` tokens.

    Args:
        num_tokens: tokens of one batch row.
        cu_seqlens: [N + 1] sequence boundaries, int32 or int64, on the device; None for dense rows.
        batch: rows of a dense batch; tokens are numbered through all rows.
        device: device of the table for dense rows; otherwise it is that of cu_seqlens.
        chunk: tokens per chunk.
    """
    if cu_seqlens is None:
        cu_seqlens = torch.arange(batch + 1, device=device) * num_tokens
        room = batch * -(-num_tokens // chunk)
    else:
        room = capacity(num_tokens, cu_seqlens.numel() - 1, chunk)
    bounds = cu_seqlens.long()
    first = torch.zeros_like(bounds)
    torch.cumsum((bounds.diff() + chunk - 1) // chunk, 0, out=first[1:])

    i = torch.arange(room, device=bounds.device)
    owner = torch.searchsorted(first, i, right=True) - 1  # the last sequence with first <= i
    owner = owner.clamp(max=max(bounds.numel() - 2, 0))
    tok0 = bounds[owner] + (i - first[owner]) * chunk
    rows = (bounds[(owner + 1).clamp(max=bounds.numel() - 1)] - tok0).clamp(0, chunk)
    used = i < first[-1]
    chunks = torch.stack([tok0 * used, rows * used], 1).int()
    return ChunkTable(chunks, first[-1:].int(), first.int())
