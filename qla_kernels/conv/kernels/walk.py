"""How a warp walks a run of tokens: the nodes in it, and the rows before a node's or run's first.

A run is cut at the ends of nodes; `Segment` has the macros' common numbers of one piece. Bounds and
halos may have any contents, because the host never reads a caller's: numbers read from them are
clamped, and a run's tokens are written by its own warp alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.conv.kernels.pieces import load_piece, load_section, store_piece
from qla_kernels.conv.shapes import PIECE
from qla_kernels.tile.bounds import clamped
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.numbers import numbers


class Nodes(NamedTuple):
    """Where nodes begin and end, and what lies before them."""

    bounds: Any  # [nodes + 1], not read if `length` is positive
    halo: Any  # [nodes, W - 1]
    length: Any  # tokens of each node of a dense batch, or 0
    num_nodes: Any
    in_tree: Any  # 0: halo is not read, and nothing is before a node


class Sections(NamedTuple):
    """A gradient whose channels lie in three tensors, and the place of a thread's piece in them."""

    tensors: tuple[Any, Any, Any]  # [tokens, pieces of it, PIECE]
    which: Any  # tensor that has the piece
    piece: Any  # number of the piece there


class Pool(NamedTuple):
    """Slots of the last W - 1 tokens of sequences, the oldest first, and the slots of nodes."""

    rows: Any  # [slots, channels, W - 1]
    starts: Any  # [nodes] the slot with the tokens before a node's first
    ends: Any  # [nodes] the slot for the node's last tokens
    offsets: Any  # [nodes] tokens after which the last ones are kept as well; 0: never
    kept: Any  # [nodes] the slot for these
    keeps: Any  # 0: offsets and kept are not read
    null_slot: Any  # slots up to this one are none
    step: Any  # elements between channels of a slot
    adjacent: Any  # 1: PIECE channels can be read at a time


def move_channels(function, to, from_, step, adjacent):
    """Copies a thread's channels of one number of a row; `step` is in elements."""
    to, from_ = T.access_ptr(to, "w", PIECE), T.access_ptr(from_, "r", PIECE)
    return T.call_extern("handle", f"qla::{function}_channels", to, from_, step, adjacent)


def bound(nodes: Nodes, n: Any, num_tokens: Any) -> Any:
    """Returns the first token of node n; the number of tokens in sequences for n = num_nodes."""
    read = clamped(nodes.bounds[n], 0, num_tokens)
    return T.if_then_else(nodes.length > 0, n * nodes.length, read)


@T.macro
def find_node(nodes, token, num_tokens, node: T.Ref):
    """Sets node to the last one that begins at or before `token`."""
    high, middle = T.alloc_var("int32"), T.alloc_var("int32")
    node = 0
    high = nodes.num_nodes
    if nodes.length > 0:
        node = T.truncdiv(token, nodes.length)
        high = 0
    while node + 1 < high:
        middle = (node + high) // 2
        if bound(nodes, middle, num_tokens) <= token:
            node = middle
        else:
            high = middle


@T.macro
def load_weights(weight, bias, r_w, r_b, channel, weight_dtype, bias_dtype, has_bias):
    """Sets r_w to the weights [PIECE * W] of a thread's channels and r_b to their biases, or 0."""
    numbers(r_w, weight[0], channel * (r_w.shape[0] // PIECE), weight_dtype)
    T.clear(r_b)
    if has_bias != 0:
        numbers(r_b, bias[0], channel, bias_dtype)


@T.macro
def load_window(x, nodes, r_line, r_row, node, begin, first, piece, num_tokens, pool=None):
    """Sets the first W - 1 rows of r_line to those before token `first` of a node, 0 where none.

    With a Pool, rows before a node's first token are those of its slot.
    """
    reach = nodes.halo.shape[1] if pool is None else pool.rows.shape[2]
    source = T.alloc_var("int32")
    for i in T.unroll(reach):
        source = first - reach + i
        if source < begin:
            source = -1
            if nodes.in_tree != 0:
                source = nodes.halo[node, first - begin + i]
        for e in T.unroll(PIECE):
            r_line[i, e] = 0
        if (source >= 0) & (source < num_tokens):
            load_piece(r_row[i, 0], x, source, piece)
            for e in T.unroll(PIECE):
                r_line[i, e] = r_row[i, e]
    if pool is not None:
        if first == begin:
            load_slot(pool, r_row, node, 0, piece)
            for i in T.unroll(reach):
                for e in T.unroll(PIECE):
                    r_line[i, e] = r_row[i, e]


@T.macro
def load_slot(pool, r_row, node, first, piece):
    """Sets rows of r_row to those of a node's slot from place `first` on, as far as there are any.

    Rows of a node without a slot to start from are 0.
    """
    count = pool.rows.shape[2]
    slot = T.alloc_var("int32")
    slot = pool.starts[node]
    for i in T.unroll(count):
        if i + first < count:
            for e in T.unroll(PIECE):
                r_row[i, e] = 0
            if (slot > pool.null_slot) & (slot < pool.rows.shape[0]):
                move_channels(
                    "load",
                    r_row[i, 0],
                    pool.rows[slot, piece * PIECE, i + first],
                    pool.step,
                    pool.adjacent,
                )


@T.macro
def load_rows(x, r_row, token, last, piece):
    """Loads the rows of tokens from `token` on, as load_row does."""
    for u in T.unroll(r_row.shape[0]):
        load_row(x, r_row, u, token + u, last, piece)


@T.macro
def load_row(x, r_row, u, token, last, piece):
    """Loads row u of r_row: that of `token`, or of `last` if that comes before.

    x is a tensor, or Sections, which have the thread's piece. Loads need no branch, so that a
    thread can issue those of the next tokens before it computes.
    """
    row = T.alloc_var("int32")  # so that the address is a product of 32-bit numbers
    row = T.min(token, last)
    if isinstance(x, Sections):
        load_section(r_row[u, 0], x, row)
    else:
        load_piece(r_row[u, 0], x, row, piece)


@T.macro
def put_row(y, r_y, token, piece):
    """Stores a thread's piece of a row."""
    row = T.alloc_var("int32")  # as in load_row
    row = token
    store_piece(y, r_y[0], row, piece)


@T.macro
def clear_rows(y, first, end, piece):
    """Writes 0 to rows first .. end - 1."""
    r_zero = T.alloc_local((PIECE,), y.dtype)
    T.clear(r_zero)
    for t in rolled(first, end):
        store_piece(y, r_zero[0], t, piece)


@T.macro
def load_next(x, r_row, token, last, piece):
    """Moves the rows of r_row one place forward, and loads that of `token` behind them."""
    count = r_row.shape[0]
    for u in T.unroll(count - 1):
        for e in T.vectorized(PIECE):
            r_row[u, e] = r_row[u + 1, e]
    load_row(x, r_row, count - 1, token, last, piece)


@T.macro
def move_line(r_line, reach, count):
    """Makes the last `reach` rows before place `count` the first rows of r_line."""
    for i in T.unroll(reach):
        for e in T.unroll(PIECE):
            r_line[i, e] = r_line[count + i, e]


def convolved(r_line, r_w, r_b, u, e):
    """Returns z of a thread's channel e at place u behind the window of r_line."""
    width = int(r_w.shape[0]) // PIECE
    z = r_b[e]
    for j in range(width):
        z = z + r_w[e * width + j] * r_line[u + j, e]
    return z
