"""Raw gates and betas in a thread: numbers of any float dtype, and their activations.

A dtype is passed as its place in DTYPES: one compiled kernel serves every call. Exact to a few
units in fp32's last place, as torch's: kernels that import `SOURCE` do without fast math.
"""

from pathlib import Path
from typing import Any

import tilelang.language as T

DTYPES = ("float32", "bfloat16", "float16", "float64")

SOURCE = Path(__file__).with_suffix(".cuh").read_text()


def fetch(to: Any, row: Any, head: Any, step: Any, count: Any, dtype: Any) -> Any:
    """The first `count` numbers, then zeros: `head` bytes into rows that are `step` bytes apart.

    They are bits until `decode` makes numbers of them: so all of a thread's are under way together.
    """
    size = to.shape[0]
    to, row = T.access_ptr(to[0], "w", size), T.access_ptr(row, "r", 1)
    return T.call_extern("handle", f"qla::fetch<{size}>", to, row, head, step, count, dtype)


def decode(x: Any, dtype: Any) -> Any:
    return T.call_extern("float32", "qla::decode", x, dtype)


def put(row: Any, source: Any, head: Any, step: Any, count: Any, dtype: Any) -> Any:
    """The first `count` numbers: each number `head` of its row, the rows `step` bytes apart."""
    size = source.shape[0]
    row, source = T.access_ptr(row, "w", 1), T.access_ptr(source[0], "r", size)
    return T.call_extern("handle", f"qla::put<{size}>", row, source, head, step, count, dtype)


def softplus(x: Any) -> Any:
    return T.call_extern("float32", "qla::softplus", x)


def sigmoid(x: Any) -> Any:
    return T.call_extern("float32", "qla::sigmoid", x)


def sigmoid_slope(x: Any) -> Any:
    """sigmoid(x) (1 - sigmoid(x))."""
    return T.call_extern("float32", "qla::sigmoid_slope", x)


def rate(A_log: Any) -> Any:
    """-e^A_log, no less than fp32's least number."""
    return T.call_extern("float32", "qla::rate", A_log)
