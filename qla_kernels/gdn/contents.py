"""Checks of the values in a call's tensors. On a GPU they make the host wait, so that they run
only under QLA_CHECK=1.
"""

import os

from torch import Tensor

from qla_kernels.errors import need


def asked_for() -> bool:
    return os.environ.get("QLA_CHECK", "0") not in ("", "0")


def check_bounds(
    op: str, num_tokens: int, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None = None
) -> int:
    """Returns the number of tokens that belong to a sequence.

    Raises ValueError if cu_seqlens does not start at 0, falls, ends past num_tokens, or differs
    from cu_seqlens_cpu.
    """
    if cu_seqlens is None:
        return num_tokens
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] > num_tokens or ends != sorted(ends):
        needs = f"to start at 0, never fall, and end at or before T={num_tokens}"
        raise ValueError(need(op, f"cu_seqlens {ends}", needs, "rebuild it from the lengths"))
    if cu_seqlens_cpu is not None and cu_seqlens_cpu.tolist() != ends:
        got = f"cu_seqlens_cpu {cu_seqlens_cpu.tolist()} and cu_seqlens {ends}"
        raise ValueError(need(op, got, "equal values", "copy one from the other"))
    return int(ends[-1])


def check_contents(
    op: str,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None = None,
) -> None:
    live = check_bounds(op, g.shape[1], cu_seqlens, cu_seqlens_cpu)
    for name, x in (("g", g), ("beta", beta)):
        if x[:, :live].isnan().any():  # tokens past the last sequence may hold anything
            token = int(x[:, :live].isnan().nonzero()[0, 1])
            got = f"{name} is NaN, first at token {token}"
            raise ValueError(need(op, got, "numbers", f"look at what made {name}"))
