"""Checks of the values that tensors hold. On a GPU they make the host wait: QLA_CHECK=1 alone."""

import torch
from torch import Tensor

from qla_kernels.runtime.arguments import switched_on
from qla_kernels.runtime.errors import need


def checks_contents() -> bool:
    """Returns True under QLA_CHECK=1: calls then also check the values that GPU tensors hold."""
    return switched_on("QLA_CHECK")


def check_words(op: str, name: str, x: Tensor) -> None:
    """Raises ValueError unless all numbers of x fit in int32.

    Kernels read only the low 32 bits of int64 numbers. Synchronizes if x is on a GPU. `op` and
    `name` are the function and the argument that the error names.
    """
    fits = torch.iinfo(torch.int32)
    if (wrong := (x < fits.min) | (x > fits.max)).any():
        got, needs = f"{name} has {int(x[wrong][0])}", "numbers that fit in int32"
        raise ValueError(need(op, got, needs, f"look at what made {name}"))


def are_read(x: Tensor) -> bool:
    """Returns whether a call checks the values of x.

    It does on the CPU, and on a GPU under QLA_CHECK=1, but not while torch.compile traces.
    """
    return not torch.compiler.is_compiling() and (x.is_cpu or checks_contents())


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


def check_places(
    op: str, name: str, indices: Tensor, count: int, null: int, apart: bool = True
) -> None:
    """Raises ValueError unless indices above `null` are below `count`, and different if `apart`.

    No index may be beyond int32.
    """
    check_words(op, name, indices)
    used = indices[indices > null].tolist()
    padding = f"{'at most 0' if null == 0 else 'negative'} for padding"
    fix = "give each sequence a place of its own"
    if max(used, default=-1) >= count:
        got = f"{name} {indices.tolist()}, where {max(used)} is past the {count} places"
        raise ValueError(need(op, got, f"numbers below {count}, or {padding}", fix))
    if apart and len(set(used)) < len(used):
        twice = next(x for x in used if used.count(x) > 1)
        got = f"{name} {indices.tolist()}, where {twice} is there twice"
        raise ValueError(need(op, got, f"different ones, or {padding}", fix))
