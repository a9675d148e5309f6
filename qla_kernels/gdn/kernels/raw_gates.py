"""Loads, stores and activates raw gates and betas of any float dtype, within a thread.

A dtype is passed as its place in DTYPES, so one compiled kernel serves every call. Activations are
exact to a few units in fp32's last place, as torch's are. For this, kernels that import `SOURCE`
must not use fast math.
"""

from pathlib import Path
from typing import Any

import qla_kernels.tile.language as T

DTYPES = ("float32", "bfloat16", "float16", "float64")

SOURCE = Path(__file__).with_suffix(".cuh").read_text()


def fetch(to: Any, row: Any, head: Any, step: Any, count: Any, dtype: Any) -> Any:
    """Loads `count` numbers to `to`, and zeros behind them.

    The numbers lie `head` bytes from the start of rows that are `step` bytes apart. They stay raw
    bits until `decode` converts them, so that all loads of a thread are in flight together.
    """
    size = to.shape[0]
    to, row = T.access_ptr(to[0], "w", size), T.access_ptr(row, "r", 1)
    return T.call_extern("handle", f"qla::fetch<{size}>", to, row, head, step, count, dtype)


def decode(x: Any, dtype: Any) -> Any:
    return T.call_extern("float32", "qla::decode", x, dtype)


def put(row: Any, source: Any, head: Any, step: Any, count: Any, dtype: Any) -> Any:
    """Stores the first `count` numbers of `source`, each as number `head` of a row.

    Rows lie `step` bytes apart.
    """
    size = source.shape[0]
    row, source = T.access_ptr(row, "w", 1), T.access_ptr(source[0], "r", size)
    return T.call_extern("handle", f"qla::put<{size}>", row, source, head, step, count, dtype)


def softplus(x: Any) -> Any:
    return T.call_extern("float32", "qla::softplus", x)


def sigmoid(x: Any) -> Any:
    return T.call_extern("float32", "qla::sigmoid", x)


def sigmoid_slope(x: Any) -> Any:
    """Returns sigmoid(x) (1 - sigmoid(x))."""
    return T.call_extern("float32", "qla::sigmoid_slope", x)


def rate(A_log: Any) -> Any:
    """Returns -e^A_log, but not less than fp32's least finite number."""
    return T.call_extern("float32", "qla::rate", A_log)
