"""A backend for flash-linear-attention: runs `fla.ops.gated_delta_rule.chunk_gated_delta_rule`.

    from qla_kernels import integrations
    integrations.fla.register()

At each call FLA asks its backends in the order of their priorities: FlashQLA has 3, ours 4, or 2
with `prefer=True`. Our backend declines calls that this version cannot run, with the reason, and
FLA then runs them itself. It also declines malformed calls, so that FLA raises its own error;
with a `cp_context` ours is raised instead, on every rank. FLA_QLA_KERNELS=0 switches the backend
off. FLA logs once which backend runs a function and why others declined.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from qla_kernels.errors import Unsupported, need
from qla_kernels.gdn import chunk_gated_delta_rule, refusal
from qla_kernels.gdn.api import CHUNK_SIZES
from qla_kernels.gdn.call import Options
from qla_kernels.gdn.validate import OP, Gate, check_activations, check_tensors
from qla_kernels.integrations.layout import readable

OPERATION = "gated_delta_rule"
NAME, RELEASES = "qla_kernels.integrations.fla", "0.5.2 or later"
SWITCH = "FLA_QLA_KERNELS"
PRIORITY, PREFERRED = 4, 2  # FlashQLA's is 3; the lowest is asked first

log = logging.getLogger("qla_kernels")


def register(prefer: bool = False) -> bool:
    """Offers our gated delta rule to FLA, before FlashQLA if `prefer`; replaces an earlier call.

    Returns:
        True if FLA will ask our backend. If not, a warning names the variable that switched it off.

    Raises:
        Unsupported: FLA cannot be imported, or is too old to have backends.
    """
    base, add = _registry()
    add(_backend(base, PREFERRED if prefer else PRIORITY))
    off = []
    if getattr(sys.modules[base.__module__], "_DISPATCH_DISABLED", False):  # read when imported
        off.append("FLA_DISABLE_BACKEND_DISPATCH=1")
    if os.environ.get(SWITCH) == "0":
        off.append(f"{SWITCH}=0")
    if off:
        log.warning("fla will not ask qla_kernels: %s", " and ".join(off))
    return not off


def declined(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = CHUNK_SIZES[-1],
    **others: Any,
) -> str | None:
    """Returns why our backend declines a call of FLA's function, or None if it runs the call.

    The call may be malformed. A malformed call with a cp_context returns None: our function then
    raises the error on all ranks.
    """
    if chunk_indices is not None and not isinstance(chunk_indices, Tensor):
        others["cp_context"] = (
            chunk_indices  # FLA 0.5.2 passes cp_context by position, in this place
        )
    if others:
        names = ", ".join(sorted(others))
        return need(OP, f"got {names}", "keywords that both know", "left to FLA")
    if cp_context is not None and getattr(cp_context, "group", None) is None:
        # our function would use all ranks of the job as its group, or raise for missing tables
        return need(OP, "cp_context without a group", "one: FLA runs it as none", "left to FLA")
    if chunk_size not in CHUNK_SIZES:
        return need(OP, f"chunk_size is {chunk_size!r}", "16, 32 or 64", "left to FLA")
    gate = Gate(use_gate_in_kernel, A_log, dt_bias)
    options = Options(
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval
    )
    try:
        check_tensors(
            OP, q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, state_v_first
        )
        check_activations(OP, v, gate, options)
    except ValueError as error:
        # The other ranks have accepted the call: our function raises the error on all ranks.
        return str(error) if cp_context is None else None
    lying = [x if x.stride(-1) == 1 else x.new_empty(x.shape) for x in (q, k, v)]  # as `readable`
    return refusal(*lying, cp_context=cp_context)


def _registry() -> tuple[type, Callable[[type], object]]:
    """Returns FLA's base class of backends, and the function that registers a derived class.

    Raises Unsupported if FLA cannot be imported or has no backends.
    """
    try:
        importlib.import_module(f"fla.ops.{OPERATION}")  # afterwards its callers find its backends
    except ImportError as error:
        got = f"fla cannot be imported ({error})"
        fix = "pip install flash-linear-attention"
        raise Unsupported(need(NAME, got, RELEASES, fix)) from error
    try:
        backends: Any = importlib.import_module("fla.backends")  # 0.6
    except ModuleNotFoundError:
        return _older_registry()
    return backends.BaseBackend, backends.register(OPERATION)


def _older_registry() -> tuple[type, Callable[[type], object]]:
    """Returns, for FLA 0.5.2, the base class of backends and a function that registers a backend.

    The function takes a class derived from the base class, and registers an instance of it. Raises
    Unsupported for earlier releases, in which chunk_gated_delta_rule asks no backends.
    """
    try:
        base: type = importlib.import_module("fla.ops.backends").BaseBackend
        registry: Any = importlib.import_module(f"fla.ops.{OPERATION}.backends").gdr_registry
    except (ImportError, AttributeError) as error:
        release = getattr(sys.modules["fla"], "__version__", "of an unknown release")
        got, fix = f"fla {release}, which asks no backends", "pip install -U flash-linear-attention"
        raise Unsupported(need(NAME, got, RELEASES, fix)) from error
    return base, lambda backend: registry.register(backend())


def _backend(base: type, order: int) -> type:
    class QlaKernels(base):  # type: ignore[misc]
        backend_type = "qla_kernels"
        package_name = "qla_kernels"
        env_var = SWITCH
        priority = order

        def chunk_gated_delta_rule_verifier(
            self, *args: Any, **kwargs: Any
        ) -> tuple[bool, str | None]:
            reason = declined(*args, **kwargs)
            return reason is None, reason

        def chunk_gated_delta_rule(
            self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor | None]:
            return chunk_gated_delta_rule(*readable(q, k, v), *args, **kwargs)

    return QlaKernels
