"""How the threads of a warp share rows: which pieces a thread has, and its loads.

A row is one head of one token. `row_threads` threads share it: thread i of them has the pieces i
and i + row_threads, each of 8 columns, as far as the row has them. Numbers that a thread does not
have are 0, so that sums over a row and over rows need no guards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.norm.shapes import PIECE, SPANS
from qla_kernels.tile import numbers
from qla_kernels.tile.bounds import clamped
from qla_kernels.tile.constants import LOG2E

SOURCE = numbers.SOURCE + Path(__file__).with_suffix(".cuh").read_text()


class Place(NamedTuple):
    """The rows and pieces of a thread."""

    threads: int  # that share a row
    lane: Any  # of them, this thread's number
    live_rows: Any  # rows from this one on belong to no sequence: they are not read
    num_heads: Any
    num_pieces: Any  # of a row

    def piece(self, span: Any) -> Any:
        return span * self.threads + self.lane

    def has(self, span: Any) -> Any:
        return self.piece(span) < self.num_pieces


def live_rows(end: Any, num_tokens: Any, num_heads: Any, packed: Any) -> Any:
    """Returns the number of rows of tokens before `end` if `packed`, else of all tokens."""
    tokens = T.if_then_else(packed != 0, clamped(end, 0, num_tokens), num_tokens)
    return tokens * num_heads


@T.macro
def load_row(x, r_x, place, row):
    """Loads a thread's pieces of a row of x [tokens, heads, pieces, PIECE]; 0 past the last."""
    # variables, so that they are divided as 32-bit numbers, and once
    token, head = T.alloc_var("int32"), T.alloc_var("int32")
    token = T.truncdiv(row, place.num_heads)
    head = row - token * place.num_heads
    for span in T.unroll(SPANS):
        T.call_extern(
            "handle",
            "qla::load_16_bytes_or_0",
            T.access_ptr(r_x[span, 0], "w", PIECE),
            T.access_ptr(x[token, head, place.piece(span), 0], "r", PIECE),
            (row < place.live_rows) & place.has(span),
        )


@T.macro
def load_weights(weight, r_w, place, dtype):
    """Sets r_w [SPANS, PIECE] to the weights of a thread's columns; `dtype` as in put_number."""
    for span in T.unroll(SPANS):
        for e in T.unroll(PIECE):
            r_w[span, e] = 0
        if place.has(span):
            T.call_extern(
                "handle",
                f"qla::numbers<{PIECE}>",
                T.access_ptr(r_w[span, 0], "w", PIECE),
                T.access_ptr(weight[0], "r", 1),
                place.piece(span) * PIECE,
                dtype,
            )


@T.macro
def put_row(y, r_y, place, row, num_rows):
    """Writes a thread's pieces r_y [SPANS, PIECE] of a row of y [rows, pieces, PIECE]."""
    for span in T.unroll(SPANS):
        if (row < num_rows) & place.has(span):
            for e in T.vectorized(PIECE):
                y[row, place.piece(span), e] = r_y[span, e]


@T.macro
def add_threads(x, below, to):
    """Adds x[0] over threads of a warp whose numbers differ in the bits below .. to - 1."""
    for bit in T.unroll(to - below):
        x[0] += T.shfl_xor(x[0], 1 << (bit + below))


def logistic(x: Any) -> Any:
    return 1 / (1 + T.exp2(-LOG2E * x))
