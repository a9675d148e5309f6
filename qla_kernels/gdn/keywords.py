"""FLA's **kwargs, as the public functions take them."""

import warnings
from typing import Any

from qla_kernels.errors import need


def take_layout(op: str, kwargs: dict[str, Any], state_v_first: bool) -> bool:
    """state_v_first, which may come under its old name."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        got = "state_v_first and transpose_state_layout, its old name, are given"
        raise ValueError(need(op, got, "one of them", "drop transpose_state_layout"))
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
