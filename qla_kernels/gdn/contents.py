"""Checks of the values in a call's tensors. On a GPU they make the host wait, so that they run
only under QLA_CHECK=1.
"""

from torch import Tensor

from qla_kernels.gdn.call import Call
from qla_kernels.runtime.contents import check_bounds
from qla_kernels.runtime.errors import need


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
