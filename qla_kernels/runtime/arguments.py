"""Checks of arguments that must be flags, integers or numbers.

`flag`, `integer` and `number` return the argument as a bool, int or float, or raise a ValueError
that names it. They do not wait for a GPU.
"""

import operator
import os
from collections.abc import Sequence, Sized
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from qla_kernels.runtime.errors import need
from qla_kernels.runtime.sm90 import alternatives

GATE_ACTIVATIONS = ("silu", "swish", "sigmoid")  # of an output gate
NULL_SLOTS = (-1, 0)  # slots with which engines mark padding


def switched_on(name: str) -> bool:
    """Returns True if the environment variable `name` is set, and neither empty nor 0."""
    return os.environ.get(name, "0") not in ("", "0")


def check_activation(op: str, name: str, x: object, choices: Sequence[str | None]) -> None:
    """Raises ValueError unless x is in `choices`, the activations that a function can apply.

    Args:
        op, name: the function and the argument that the error names.
        x: the argument's value, such as "silu"; None means no activation.
        choices: the accepted values.
    """
    if x not in choices:
        fix = "apply any other one to the result"
        raise ValueError(need(op, f"{name}={x!r}", alternatives(choices), fix))


def check_epsilon(op: str, name: str, x: object) -> None:
    """Raises ValueError unless x, the epsilon of a norm, is a finite float that is not negative.

    `op` and `name` are the function and the argument that the error names.
    """
    if type(x) is not float or not 0 <= x < float("inf"):
        needs, fix = "a float that is not negative", "pass the model's, such as 1e-6"
        raise ValueError(need(op, f"{name} is {x!r}", needs, fix))


def check_null_slot(op: str, null_slot: object) -> None:
    """Raises ValueError unless null_slot is -1 or 0.

    null_slot is the number by which an inference engine marks padding in place of a sequence's slot
    in a pool of states. `op` is the function that the error names.
    """
    if type(null_slot) is not int or null_slot not in NULL_SLOTS:
        needs = "-1, or 0 where slot 0 of the pool is no state either"
        raise ValueError(need(op, f"null_slot is {null_slot!r}", needs, "pass one of them"))


def flag(op: str, name: str, x: Any) -> bool:
    """Returns x as a bool; None means False. Raises ValueError for all but bools, 0, 1 and None.

    `op` and `name` are the function and the argument that the error names.
    """
    if x is True or x is False:
        return x
    if x is None:
        return False
    if isinstance(x, Tensor | Sized) or x not in (0, 1):
        raise ValueError(need(op, described(name, x), "True or False", f"pass bool({name})"))
    return bool(x)


def integer(op: str, name: str, x: Any, fix: str = "") -> int:
    """Returns x as an int, or unchanged if it is a SymInt of torch.compile.

    Raises ValueError unless x is an integer of Python or NumPy, or an integer CPU tensor of one
    element.

    Args:
        op, name: the function and the argument that the error names.
        fix: the end of the error's text, which says what to pass; "pass int(name)" by default.
    """
    if type(x) is int or isinstance(x, torch.SymInt):
        return x  # type: ignore[return-value]
    try:
        if isinstance(x, Tensor) and not x.is_cpu:
            raise TypeError
        return operator.index(x)
    except TypeError:
        text = need(op, described(name, x), "an integer", fix or f"pass int({name})")
        raise ValueError(text) from None


def number(op: str, name: str, x: Any, fix: str = "") -> float:
    """Returns x as a float.

    Raises ValueError unless x is a real number, or a CPU tensor of one element. The tensor must not
    require a gradient, because the float is a constant to autograd.

    Args:
        op, name: the function and the argument that the error names.
        fix: the end of the error's text, which says what to pass; "pass float(name)" by default.
    """
    if type(x) is float:
        return x
    if isinstance(x, Tensor):
        fits = x.is_cpu and x.numel() == 1 and not (x.requires_grad or x.is_complex())
    else:
        fits = isinstance(x, Real | torch.SymFloat | torch.SymInt)
    if not fits:
        raise ValueError(need(op, described(name, x), "a number", fix or f"pass float({name})"))
    return float(x)


def described(name: str, x: object) -> str:
    """Returns a description of the argument `name` with the value x, for error messages.

    For example "n is 'a' of type str", or "x is a float32 tensor of shape (2, 3) on cpu".
    """
    if isinstance(x, Tensor):
        with_grad = " that requires a gradient" if x.requires_grad else ""
        dtype = str(x.dtype).removeprefix("torch.")
        form = f"{'an' if dtype[0] == 'i' else 'a'} {dtype} tensor of shape {tuple(x.shape)}"
        return f"{name} is {form} on {x.device}{with_grad}"
    text = repr(x)
    value = f"{text} " if len(text) <= 40 else ""
    return f"{name} is {value}of type {type(x).__name__}"
