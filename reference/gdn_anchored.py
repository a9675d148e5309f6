"""A sequence of the gated delta rule that grows, as an anchor and a tail.

The anchor is the state after some of the sequence's whole chunks, the tail is the tokens since, as
they came in. Appended tokens get the rows that the chunked form gives them:

    O = the last rows of chunked(tail and new tokens, from the anchor)

A row of a chunk depends on no later token: gamma_i is a sum over j <= i; row i of L, P, and so of
A = (I + L)^-1, W and V', has rows j <= i of k, v and beta in it alone. So the rows do not depend on
how the tokens arrived, if each operation on a row is done in the same order every time. Whole
chunks of the tail move into the anchor; those with tokens that may be taken back do not.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .gdn_chunked import chunked


class Anchored(NamedTuple):
    """A sequence between two calls."""

    anchor: Tensor  # [HV, K, V]
    k: Tensor  # [r, H, K]
    v: Tensor  # [r, HV, V]
    g: Tensor  # [r, HV]
    beta: Tensor  # [r, HV]


def appended(
    before: Anchored,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    drafts: bool = False,
    chunk_size: int = 64,
    operand_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Anchored]:
    """Returns o [T, HV, V] of the new tokens [T, ..], and the sequence with them.

    With `drafts` only chunks that were whole before go into the anchor, so that `rejected` can take
    back the new tokens.
    """
    kept = len(before.k)
    tail = [torch.cat([old, new]) for old, new in zip(before[1:], (k, v, g, beta), strict=True)]
    queries = torch.cat([torch.zeros_like(before.k), q])
    whole = (kept if drafts else kept + len(k)) // chunk_size * chunk_size

    def run(rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (t[None, rows] for t in (queries, *tail))
        done = chunked(q, k, v, g, beta, scale, state[None], None, chunk_size, operand_dtype)
        return done.o[0], done.final_state[0]

    first, anchor = run(slice(whole), before.anchor)
    rest, _ = run(slice(whole, None), anchor)
    return torch.cat([first, rest])[kept:], Anchored(anchor, *(t[whole:] for t in tail))


def rejected(x: Anchored, num_tokens: int) -> Anchored:
    """Takes back the last tokens of `appended` with drafts."""
    left = len(x.k) - num_tokens
    return Anchored(x.anchor, *(t[:left] for t in x[1:]))
