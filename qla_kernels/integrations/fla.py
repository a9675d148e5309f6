"""A backend for flash-linear-attention (FLA), which then runs its gated delta rule on our kernels.

    from qla_kernels import integrations
    integrations.fla.register()
    print(integrations.fla.status())  # whether FLA asks our backend, and how many calls it ran

    torchrun --nproc-per-node 8 -m qla_kernels.integrations.fla train.py --options-of-train

The second form registers the backend and then runs an unchanged program.

The backend serves `fla.ops.gated_delta_rule.chunk_gated_delta_rule`. At each call FLA asks its
backends in the order of their priorities, the lowest first: FlashQLA has 3; ours has 2, or 4 with
`prefer=False`. Our backend declines calls that this version cannot run, and FLA then runs them
itself. It also declines malformed calls, so that FLA raises its own error. FLA_QLA_KERNELS=0
switches the backend off. FLA logs once which backend runs a function and why others declined.
"""

import argparse
import atexit
import functools
import importlib
import logging
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn import chunk_gated_delta_rule, refusal
from qla_kernels.gdn.api import CHUNK_SIZES
from qla_kernels.gdn.call import Options
from qla_kernels.gdn.validate import OP, Gate, check_activations, check_tensors
from qla_kernels.integrations.layout import readable
from qla_kernels.runtime import device
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.sm90 import CAPABILITY, refused_device

OPERATION = "gated_delta_rule"
NAME, RELEASES = "qla_kernels.integrations.fla", "0.5.2 or later"
SWITCH = "FLA_QLA_KERNELS"
PREFERRED, PRIORITY = 2, 4  # FlashQLA has 3; FLA asks the lowest first

log = logging.getLogger("qla_kernels")

_asked: Any = None  # our latest backend in FLA's registry; FLA skips our earlier ones


class Status(NamedTuple):
    """A record: whether FLA (flash-linear-attention) uses this package's backend, and for what.

    At each call of its gated delta rule, FLA asks the backends that are registered with it. A
    backend runs the call, or declines it, and FLA then runs the call itself. str(status) is a
    sentence with all of this.

    Attributes:
        registered: True after `register`, until `unregister`.
        off: environment variables that switch this package's backend off although it is registered,
            such as "FLA_QLA_KERNELS=0"; empty if FLA asks it.
        priority: the order in which FLA asks its backends, the lowest number first; None if this
            package's is not registered.
        taken: number of calls since `register` that the backend ran.
        declined: number of calls since `register` that the backend declined.
        reason: why it declined the last of these; None if it declined none.
    """

    registered: bool
    off: tuple[str, ...]
    priority: int | None
    taken: int
    declined: int
    reason: str | None

    def __str__(self) -> str:
        if not self.registered:
            why = "register() was not called in this process, or unregister() was"
            return f"fla does not ask qla_kernels: {why}"
        if self.off:
            return f"fla does not ask qla_kernels: {' and '.join(self.off)}"
        counts = f"{self.taken} calls taken, {self.declined} declined"
        because = "" if self.reason is None else f", the last because of {self.reason!r}"
        return f"fla asks qla_kernels, with priority {self.priority}: {counts}{because}"


def register(prefer: bool = True) -> bool:
    """Registers this package's gated delta rule as a backend of FLA (flash-linear-attention).

    FLA then runs its `chunk_gated_delta_rule` on this package's kernels, where these can run a
    call. Replaces an earlier registration. Logs a warning if no visible GPU runs the kernels,
    because the backend then declines all calls with CUDA tensors.

    Args:
        prefer: True makes FLA ask this backend before FlashQLA, False after FlashQLA.

    Returns:
        True if FLA will ask this backend. If not, a warning names the environment variable that
        switches it off.

    Raises:
        Unsupported: FLA cannot be imported, or is too old to have backends.
    """
    global _asked
    base, add = _registry()
    _asked = _backend(base, PREFERRED if prefer else PRIORITY)
    add(_asked)
    now = status()
    log.log(logging.WARNING if now.off else logging.INFO, "%s", now)
    if not now.off and (reason := _no_hopper()) is not None:
        log.warning("%s", reason)
    return not now.off


def unregister() -> bool:
    """Undoes `register`: FLA no longer uses this package's backend.

    Returns whether it was registered.
    """
    global _asked
    before, _asked = _asked, None
    return before is not None


def status() -> Status:
    """Returns whether FLA uses this package's backend, and how many calls it ran and declined."""
    if (ours := _asked) is None:
        return Status(False, (), None, 0, 0, None)
    off = []
    theirs = sys.modules.get(ours.__base__.__module__)
    if getattr(theirs, "_DISPATCH_DISABLED", False):  # read when imported
        off.append("FLA_DISABLE_BACKEND_DISPATCH=1")
    if os.environ.get(SWITCH) == "0":
        off.append(f"{SWITCH}=0")
    counts = ours.num_taken, ours.num_declined, ours.last_reason
    return Status(True, tuple(off), ours.priority, *counts)


def _no_hopper() -> str | None:
    """Returns a warning if no visible GPU runs our kernels, or None if one does.

    FLA asks torch for GPUs when it is imported, so this call initialises nothing.
    """
    capabilities = device.capabilities()
    if CAPABILITY in capabilities:
        return None
    reason = "no GPU is visible", "a Hopper GPU", "calls with CUDA tensors stay FLA's"
    if capabilities:
        fix = "leave such calls to FLA"
        reason = refused_device(capabilities[0], torch.bfloat16, fix) or reason
    return need(NAME, *reason)


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
    """Returns why this FLA backend declines a call of `chunk_gated_delta_rule`, or None.

    None means that the backend runs the call; FLA itself runs a call that is declined. The
    arguments are those of FLA's function of this name; `others` are keywords that it does not have,
    which are declined, with a warning once. A malformed call is declined, so that FLA raises its
    own error. If it has a cp_context, for sequences that are split over ranks, it is not declined,
    because this package's function then raises the error on all ranks.
    """
    if others:
        _warn_of_keywords(*sorted(others))
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
    copied = [x if x.stride(-1) == 1 else x.new_empty(x.shape) for x in (q, k, v)]  # as `readable`
    return refusal(*copied, cp_context=cp_context)


@functools.cache  # once, and not for every call
def _warn_of_keywords(*names: str) -> None:
    fix = "correct or leave out: FLA runs such calls, and ignores most keywords of others"
    log.warning("%s", need(OP, f"got {', '.join(names)}", "keywords that both know", fix))


def _registry() -> tuple[type, Callable[[type], object]]:
    """Returns FLA's base class of backends, and the function that registers a derived class.

    Raises Unsupported if FLA cannot be imported or has no backends.
    """
    try:
        importlib.import_module(f"fla.ops.{OPERATION}")  # makes FLA's functions look for backends
    except Exception as error:  # any: a release of Triton may reject one of FLA's kernels
        got = f"fla cannot be imported ({str(error) or type(error).__name__})"
        absent = getattr(error, "name", None)  # such as triton, which FLA does not require
        fix = "pip install -U flash-linear-attention"
        # the name is "fla" also if another folder of this name was imported
        if absent is None or absent.partition(".")[0] == "fla":
            raise Unsupported(need(NAME, got, RELEASES, fix)) from error
        raise Unsupported(need(NAME, got, absent, f"pip install {absent}")) from error
    try:
        backends: Any = importlib.import_module("fla.backends")  # since FLA 0.6
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
        num_taken, num_declined, last_reason = 0, 0, None

        @classmethod
        def is_available(cls) -> bool:
            """Returns False after `unregister`: FLA's registries have no way to remove us."""
            return cls is _asked

        def chunk_gated_delta_rule_verifier(
            self, *args: Any, **kwargs: Any
        ) -> tuple[bool, str | None]:
            reason = declined(*args, **kwargs)
            if reason is not None:
                QlaKernels.num_declined += 1
                QlaKernels.last_reason = reason
            return reason is None, reason

        def chunk_gated_delta_rule(
            self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor | None]:
            QlaKernels.num_taken += 1
            return chunk_gated_delta_rule(*readable(q, k, v), *args, **kwargs)

    return QlaKernels


def main(arguments: Sequence[str]) -> None:
    """Command line: registers this package's backend in FLA, then runs a Python program.

    `arguments` are options, then the program and its arguments, as after `python -m
    qla_kernels.integrations.fla`. The program is a file, or with -m a module. If FLA cannot be
    used, the process exits with status 2.
    """
    parser = argparse.ArgumentParser(
        "python -m qla_kernels.integrations.fla",
        description="Offer our gated delta rule to FLA, then run a program that uses FLA.",
        epilog=f"environment: QLA_LOG=info prints at the end how many calls we took; {SWITCH}=0 "
        "leaves all calls to FLA",
    )
    how = argparse.BooleanOptionalAction
    parser.add_argument("--prefer", action=how, default=True, help="before FlashQLA")
    parser.add_argument("-m", action="store_true", dest="module", help="PROGRAM is a module")
    parser.add_argument("program", metavar="PROGRAM", help="such as train.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    try:
        register(options.prefer)
    except Unsupported as error:  # nothing is wrong with the command
        parser.exit(2, f"{parser.prog}: {error}\n")
    atexit.register(lambda: log.info("%s", status()))
    sys.argv = [options.program, *options.arguments]
    if options.module:
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(options.program).resolve().parent)
        runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    # this file runs as another module, whose counts `status` would not see
    importlib.import_module("qla_kernels.integrations.fla").main(sys.argv[1:])
