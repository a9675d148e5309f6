"""EmulatedKernel: a TileLang kernel's generated sm_90a code, called with CPU tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from qla_kernels.lab.emulator import process
from qla_kernels.lab.emulator.build import build
from qla_kernels.lab.emulator.errors import EmulationError
from qla_kernels.lab.emulator.lowering import lower
from qla_kernels.lab.emulator.process import Argument
from qla_kernels.runtime.errors import need

SCHEDULES = ("seeded", "random", "late", "eager")


class EmulatedKernel:
    """A kernel, lowered and compiled once (both are kept on disk); each call is one launch.

    `prim_func` is a PrimFunc of TileLang, such as `f.get_tir(..)` of a tilelang.jit function;
    `pass_configs` are those that tilelang.compile would take. `share_named_barriers` allows two
    sets of warps to use one named barrier, if the kernel orders them by other means.

    `kernel(*arguments, seed=n)` takes the PrimFunc's arguments, outputs included: CPU tensors,
    which may be views, numbers and None. It writes into the tensors. It raises EmulationError with
    a report if the kernel breaks a rule, or needs more CPU seconds than `time_limit` (EMU_TIMEOUT,
    240). A seed fixes the order of threads and copies; test with 0 to 5.
    """

    def __init__(
        self,
        prim_func: Any,
        pass_configs: Mapping[str, object] | None = None,
        share_named_barriers: bool = False,
    ) -> None:
        if not hasattr(prim_func, "buffer_map"):
            got, fix = type(prim_func).__name__, "call get_tir(..) of a tilelang.jit function"
            raise TypeError(need("EmulatedKernel", f"got {got}", "a PrimFunc", fix))
        self.lowered = lower(prim_func, pass_configs or {})
        self.executable = build(self.lowered)
        self.share_named_barriers = share_named_barriers
        self.roles = ""  # threads of each role, for reports

    @property
    def name(self) -> str:
        """The PrimFunc's name."""
        return self.lowered.name

    @property
    def parameters(self) -> list[str]:
        """The names of the PrimFunc's parameters, in its order."""
        return self.lowered.parameters

    def __call__(
        self, *arguments: Argument, seed: int = 0, time_limit: float | None = None
    ) -> None:
        names = self.parameters
        if len(arguments) != len(names):
            raise TypeError(
                f"{self.name} takes {len(names)} arguments ({', '.join(names)}),"
                f" got {len(arguments)}"
            )
        schedule = os.environ.get("EMU_SCHEDULE", "seeded")
        if schedule not in SCHEDULES:
            raise ValueError(f"EMU_SCHEDULE={schedule}; need one of {', '.join(SCHEDULES)}")
        options = {
            "seed": seed,
            "workers": int(os.environ.get("EMU_WORKERS", min(4, os.cpu_count() or 1))),
            "schedule": schedule,
            "share_named_barriers": int(self.share_named_barriers),
        }
        if time_limit is None:
            time_limit = float(os.environ.get("EMU_TIMEOUT", 240))
        try:
            process.run(self.executable, names, arguments, options, time_limit)
        except EmulationError as error:
            roles = f"\n  roles: {self.roles}" if self.roles else ""
            source = self.executable.with_name("kernel.cpp")
            raise EmulationError(f"{error}{roles}\n  seed {seed}; source: {source}") from None
