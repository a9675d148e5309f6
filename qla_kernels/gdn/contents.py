"""Checks of the values in a call's tensors. On a GPU they make the host wait, so that they run
only under QLA_CHECK=1.
"""

from torch import Tensor

from qla_kernels.gdn.call import Call
from qla_kernels.runtime.arguments import check_words
from qla_kernels.runtime.errors import need


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


def check_contents(op: str, call: Call) -> None:
    """Raises ValueError if bounds are wrong, gates or betas are NaN, or gates are positive.

    g is checked for its sign unless it is the input of a gate. Tokens past the last sequence may
    hold anything.
    """
    live = check_bounds(op, call.g.shape[1], call.cu_seqlens, call.cu_seqlens_cpu)
    for name, x in (("g", call.g), ("beta", call.beta)):
        if (wrong := x[:, :live].isnan()).any():
            got = f"{name} is NaN, first at token {_first(wrong)}"
            raise ValueError(need(op, got, "numbers", f"look at what made {name}"))
    if call.A_log is None and (wrong := call.g[:, :live] > 0).any():
        token = _first(wrong)
        largest = float(call.g[:, token].max())
        got = f"g is positive, first {largest:.4g} at token {token}"
        fix = "pass g.log() if g holds the decays themselves"
        raise ValueError(need(op, got, "at most 0, the natural log of a decay", fix))


def _first(wrong: Tensor) -> int:
    """Returns the first token of [B, T, HV] at which something is wrong."""
    return int(wrong.any(-1).any(0).nonzero()[0])
