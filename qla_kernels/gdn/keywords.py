"""Checks of arguments that are not tensors: options, the scale, and FLA's **kwargs."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn.call import Options
from qla_kernels.gdn.plan import EXACT_LOG_BOUND, WARM_LOG_BOUND
from qla_kernels.runtime.arguments import flag, number, switched_on
from qla_kernels.runtime.errors import need

# Dynamo makes a global float an input of a dynamic graph and compiles it twice; an int stays a
# constant.
_WHOLE_BOUND, _WHOLE_EXACT_BOUND = int(WARM_LOG_BOUND), int(EXACT_LOG_BOUND)
_WHOLE = _WHOLE_BOUND == WARM_LOG_BOUND and _WHOLE_EXACT_BOUND == EXACT_LOG_BOUND
assert _WHOLE, "say how else Dynamo is to take them for constants"

# Defaults of these keywords, which models and engines do not pass. Read once, so that a process has
# one arithmetic.
EXACT_BY_DEFAULT = switched_on("QLA_EXACT")
INVARIANT_BY_DEFAULT = switched_on("QLA_BATCH_INVARIANT")

_BOOLS = frozenset([bool])


def take_layout(op: str, kwargs: dict[str, Any], state_v_first: bool) -> bool:
    """Returns state_v_first, or the value that the caller passed under its deprecated name.

    The deprecated name is transpose_state_layout; it is removed from kwargs with a warning. Raises
    ValueError if kwargs has it and state_v_first is True; the error names `op`.
    """
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        got = "state_v_first and transpose_state_layout, its old name, are given"
        raise ValueError(need(op, got, "one of them", "drop transpose_state_layout"))
    if not torch.compiler.is_compiling():  # Dynamo does not trace it
        warnings.warn(
            "`transpose_state_layout` is deprecated and renamed to `state_v_first`.",
            DeprecationWarning,
            stacklevel=3,  # the line that called the public function
        )
    layout: bool = kwargs.pop("transpose_state_layout")
    return layout


# Keywords of the copies of FLA in vLLM and SGLang, and what to pass instead
OF_ENGINES = {
    "ssm_state_indices": "pass state_indices to fused_recurrent_gated_delta_rule",
    "initial_state_indices": "pass state_indices to fused_recurrent_gated_delta_rule",
    "inplace_final_state": "drop it: with state_indices states are updated in place",
    "num_accepted_tokens": "pass it to verify_gated_delta_rule",
    "head_first": "drop it: heads come after tokens",
}


def refuse_unknown(op: str, kwargs: dict[str, Any]) -> None:
    """Raises TypeError if kwargs is not empty. FLA would ignore unknown keywords silently.

    `op` is the function that the error names; kwargs has the keywords that it does not know.
    """
    if kwargs:
        names = sorted(kwargs)
        fixes = [f"{name}: {OF_ENGINES[name]}" for name in names if name in OF_ENGINES]
        got, fix = f"unknown keyword {', '.join(names)}", "; ".join(fixes) or "remove or correct it"
        raise TypeError(need(op, got, "the names of FLA 0.6.0", fix))


def warm_bound(op: str, exact: Any, warm_log_bound: Any) -> float:
    """Returns warm_log_bound of `chunk_gated_delta_rule`, or its default if the caller passed none.

    Long sequences are cut into segments that run in parallel. The start state of a segment is
    computed from the last tokens before it, and may omit contributions that have decayed by a
    factor below e^warm_log_bound. The default is -12, and -104 (0 in fp32) with exact=True or under
    QLA_EXACT=1; -inf omits nothing.

    Args:
        op: the name of the function, for the error.
        exact: a flag, or None if not passed.
        warm_log_bound: a number below 0, or None if not passed.

    Raises:
        ValueError: both exact=True and warm_log_bound, or warm_log_bound is not below 0.
    """
    if exact is None:
        exact = EXACT_BY_DEFAULT and warm_log_bound is None
    exact = flag(op, "exact", exact)
    if warm_log_bound is None:
        return float(_WHOLE_EXACT_BOUND if exact else _WHOLE_BOUND)
    if exact:
        fix = "pass one of them"
        raise ValueError(
            need(op, "exact and warm_log_bound", "exact=True to leave out nothing", fix)
        )
    bound = number(op, "warm_log_bound", warm_log_bound)
    if not bound < 0:
        needs = "less than 0, the log of a part of the state"
        fix = f"leave it out for {WARM_LOG_BOUND}, or pass exact=True"
        raise ValueError(need(op, f"warm_log_bound is {bound}", needs, fix))
    return bound


def keeping(op: str, enable_fwd_cp_cache: Any) -> bool | None:
    """Checks the argument enable_fwd_cp_cache of `chunk_gated_delta_rule`; returns a bool or None.

    Long sequences are cut into segments that run in parallel. True saves the segments and their
    start states for the backward, False computes them again, and None saves them if the backward is
    predicted to be faster. Raises ValueError, which names `op`, for any other value.
    """
    if enable_fwd_cp_cache is None:
        return None
    return flag(op, "enable_fwd_cp_cache", enable_fwd_cp_cache)


def is_invariant(op: str, batch_invariant: Any) -> bool:
    """Returns the argument batch_invariant of a call as a bool.

    Results of a batch-invariant call do not depend on what else is in the batch. None means True
    under QLA_BATCH_INVARIANT=1, and else False. Raises ValueError, which names `op`, for a value
    that is not a flag.
    """
    if batch_invariant is None:
        return INVARIANT_BY_DEFAULT
    return flag(op, "batch_invariant", batch_invariant)


def scale_of(op: str, scale: Any, q: Tensor) -> float:
    if scale is None:
        return float(q.shape[-1] ** -0.5)
    needs_grad = isinstance(scale, Tensor) and scale.requires_grad
    if needs_grad and not torch.is_grad_enabled():
        scale, needs_grad = scale.detach(), False
    x = number(op, "scale", scale, "multiply q by it" if needs_grad else "")
    if not (torch.compiler.is_compiling() or math.isfinite(x)):
        raise ValueError(need(op, f"scale is {x}", "a finite number", "leave it out for K ** -0.5"))
    return x


def checked_flags(op: str, options: Options) -> Options:
    """Returns the options with every flag as a bool, for example True for 1.

    Raises ValueError if a value is not True, False, 0, 1 or None; the error names `op`. Does not
    check enable_fwd_cp_cache and warm_log_bound.
    """
    *flags, keep, bound = options
    if _BOOLS.issuperset(map(type, flags)):
        return options
    named = zip(Options._fields, flags, strict=False)
    return Options._make([*(flag(op, name, x) for name, x in named), keep, bound])
