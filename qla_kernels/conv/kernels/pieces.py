"""Loads and stores a thread's channels of a token, its piece; and act(z) / z."""

from pathlib import Path
from typing import Any

import qla_kernels.tile.language as T
from qla_kernels.conv.shapes import PIECE
from qla_kernels.tile import numbers

SOURCE = numbers.SOURCE + Path(__file__).with_suffix(".cuh").read_text()


def load_piece(to: Any, x: Any, row: Any, piece: Any) -> Any:
    """Loads the PIECE numbers of 16 bits of x[row, piece]; the compiler would load each by itself.

    It cannot know that rows are multiples of 8 bytes apart. The memory must not change while the
    kernel runs.
    """
    to, from_ = T.access_ptr(to, "w", PIECE), T.access_ptr(x[0, 0, 0], "r", PIECE)
    return T.call_extern("handle", "qla::load_piece", to, from_, row, x.strides[0], piece)


def load_section(to: Any, sections: Any, row: Any) -> Any:
    """Loads PIECE numbers of `row` of the tensor of `sections` that has this thread's channels."""
    to = T.access_ptr(to, "w", PIECE)
    from_ = [T.access_ptr(x[0, 0, 0], "r", PIECE) for x in sections.tensors]
    steps = [x.strides[0] for x in sections.tensors]
    return T.call_extern(
        "handle", "qla::load_section", to, *from_, sections.which, row, *steps, sections.piece
    )


def store_piece(y: Any, from_: Any, row: Any, piece: Any) -> Any:
    """Stores PIECE numbers as y[row, piece], of a contiguous y."""
    to, from_ = T.access_ptr(y[0, 0, 0], "w", PIECE), T.access_ptr(from_, "r", PIECE)
    return T.call_extern("handle", "qla::store_piece", to, from_, row, y.shape[1] * PIECE, piece)


def factor(z: Any, least: Any) -> Any:
    """Returns act(z) / z: the logistic function of z if `least` is 0, and 1 if it is 1.

    A branch or a select at each use would keep the compiler from mixing the code of several rows.
    """
    return T.call_extern("float32", "qla::factor", z, least)
