"""What the public functions take by keyword: FLA's **kwargs, and our own."""

import warnings
from typing import Any

import torch

from qla_kernels.errors import need
from qla_kernels.gdn.plan import EXACT_LOG_BOUND, WARM_LOG_BOUND

# To Dynamo a global float is an input of a dynamic graph, which it compiles twice; an int is not.
_WHOLE_BOUND, _WHOLE_EXACT_BOUND = int(WARM_LOG_BOUND), int(EXACT_LOG_BOUND)
_WHOLE = _WHOLE_BOUND == WARM_LOG_BOUND and _WHOLE_EXACT_BOUND == EXACT_LOG_BOUND
assert _WHOLE, "say how else Dynamo is to take them for constants"


def take_layout(op: str, kwargs: dict[str, Any], state_v_first: bool) -> bool:
    """state_v_first, which may come under its old name."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        got = "state_v_first and transpose_state_layout, its old name, are given"
        raise ValueError(need(op, got, "one of them", "drop transpose_state_layout"))
    if not torch.compiler.is_compiling():  # Dynamo does not trace it
        warnings.warn(
            "`transpose_state_layout` is deprecated and renamed to `state_v_first`.",
            DeprecationWarning,
            stacklevel=4,  # the line that called the public function, which took its keywords
        )
    layout: bool = kwargs.pop("transpose_state_layout")
    return layout


def refuse_unknown(op: str, kwargs: dict[str, Any]) -> None:
    """A keyword that FLA would ignore in silence is an error."""
    if kwargs:
        got = f"unknown keyword {', '.join(sorted(kwargs))}"
        raise TypeError(need(op, got, "the names of FLA 0.6.0", "remove or correct it"))


def warm_bound(op: str, exact: bool, warm_log_bound: float | None) -> float:
    """What segments may leave out of the state before them, natural log; -inf for nothing."""
    if warm_log_bound is None:
        return float(_WHOLE_EXACT_BOUND if exact else _WHOLE_BOUND)
    if exact:
        fix = "pass one of them"
        raise ValueError(
            need(op, "exact and warm_log_bound", "exact=True to leave out nothing", fix)
        )
    if not warm_log_bound < 0:
        needs = "less than 0, the log of a part of the state"
        fix = f"leave it out for {WARM_LOG_BOUND}, or pass exact=True"
        raise ValueError(need(op, f"warm_log_bound is {warm_log_bound}", needs, fix))
    return float(warm_log_bound)
