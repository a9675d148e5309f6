"""The sequences to train on, and each rank's part of them.

A sequence is one document: attention does not stop at a separator inside it, because a row of a
ring's call is one sequence. The numbers of the sequences of a step follow from the number of the
step, so a run that resumes needs nothing but that number.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from long_context.loss import IGNORED
from qla_kernels.sparse_ring.layouts import Layout


class Shard(NamedTuple):
    """A rank's part of a sequence, and the length of the sequence before the padding."""

    tokens: Tensor  # int64 [1, L]
    labels: Tensor  # int64 [1, L], the next tokens; IGNORED at the end and in the padding
    positions: Tensor  # int64 [1, L], in the whole sequence
    seqlen: int


class Synthetic:
    """Sequences whose last three quarters repeat the first one, with noise.

    Small tokens are frequent, which a model learns in a few steps. To learn more it has to look a
    quarter of the sequence back.
    """

    def __init__(self, length: int, vocabulary: int, noise: float = 0.05) -> None:
        self._length, self._vocabulary, self._noise = length, vocabulary, noise

    def __getitem__(self, number: int) -> Tensor:
        """Returns the tokens of sequence `number`, int64 [length]."""
        draw = torch.Generator().manual_seed(number)
        tokens = self._drawn(-(-self._length // 4), draw).repeat(4)[: self._length]
        other = self._drawn(self._length, draw)
        return torch.where(torch.rand(self._length, generator=draw) < self._noise, other, tokens)

    def _drawn(self, num: int, draw: torch.Generator) -> Tensor:
        return (torch.rand(num, generator=draw) ** 3 * self._vocabulary).long()


class Documents:
    """Documents of a file of tokens: of `bounds`, cut to `length`, or of `length` tokens each.

    `tokens` is a file of numpy.save with one dimension, and `bounds` one with the first token of
    each document and, last, the number of tokens. Documents of fewer than two tokens are left out.
    """

    def __init__(self, tokens: Path, bounds: Path | None, length: int, vocabulary: int) -> None:
        self._file, self._vocabulary = tokens, vocabulary
        self._tokens = np.load(tokens, mmap_mode="r")
        if self._tokens.ndim != 1:
            shape = list(self._tokens.shape)
            raise SystemExit(f"{tokens} has the shape {shape}; need one dimension; save it flat")
        if bounds is None:
            start = np.arange(0, len(self._tokens) - length + 1, length)
            self._spans = np.stack([start, start + length], 1)
        else:
            edges = np.load(bounds).astype(np.int64)
            _check_bounds(bounds, edges, len(self._tokens))
            ends = np.minimum(edges[1:], edges[:-1] + length)
            self._spans = np.stack([edges[:-1], ends], 1)[ends - edges[:-1] >= 2]
        if len(self._spans) == 0:
            least = length if bounds is None else 2
            fix = "pass a smaller --length" if bounds is None else "see --bounds"
            raise SystemExit(
                f"{tokens} with {len(self._tokens)} tokens has no sequence of {least}: {fix}"
            )

    def __getitem__(self, number: int) -> Tensor:
        """Returns the tokens of sequence `number`, int64; after the last one the first follows."""
        start, end = self._spans[number % len(self._spans)]
        tokens = torch.from_numpy(self._tokens[start:end].astype(np.int64))
        if len(wrong := ((tokens < 0) | (tokens >= self._vocabulary)).nonzero()):
            at = int(wrong[0])
            got = f"{self._file}: token {start + at} is {int(tokens[at])}"
            raise SystemExit(f"{got}; need 0 to {self._vocabulary - 1}, the model's vocabulary")
        return tokens


def _check_bounds(file: Path, edges: np.ndarray, num_tokens: int) -> None:
    """Ends the program unless bounds are the first token of each document and then `num_tokens`."""
    if edges.ndim != 1 or len(edges) == 0 or edges[0] != 0:
        raise SystemExit(f"{file}: bounds are {edges.flatten()[:3]} ..; need 0 first")
    if len(falls := np.flatnonzero(np.diff(edges) < 0)):
        got = f"{edges[falls[0]]} is followed by {edges[falls[0] + 1]}"
        raise SystemExit(f"{file}: {got}; need bounds in ascending order")
    if edges[-1] != num_tokens:
        fix = f"append {num_tokens}" if edges[-1] < num_tokens else "they are of other tokens"
        raise SystemExit(f"{file}: bounds end at {edges[-1]}, tokens at {num_tokens}; {fix}")


@dataclass(frozen=True)
class Dealer:
    """Gives each rank its part of the sequence that its ring trains on in a step."""

    source: Synthetic | Documents
    layout: Layout
    rank: int  # within the ring
    data_rank: int  # the ring's number
    rings: int
    device: torch.device

    def shard(self, step: int) -> Shard:
        """Returns this rank's tokens, labels and positions of a step.

        Labels are shifted in the whole sequence, before they are dealt to ranks: at the end of each
        stripe the next token is in another shard.
        """
        tokens = self.source[step * self.rings + self.data_rank]
        seqlen = len(tokens)
        T = self.layout.pad_len(seqlen)
        whole = torch.zeros(1, T, dtype=torch.int64)
        labels = torch.full_like(whole, IGNORED)
        whole[0, :seqlen] = tokens
        labels[0, : seqlen - 1] = tokens[1:]
        mine = (self.layout.shard(x, 1, self.rank) for x in (whole, labels))
        positions = self.layout.positions(T, self.rank)[None]
        return Shard(*(x.to(self.device) for x in (*mine, positions)), seqlen)
