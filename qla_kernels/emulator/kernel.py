"""EmulatedKernel: a TileLang kernel's generated sm_90a code, called with CPU tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from qla_kernels.emulator import process
from qla_kernels.emulator.build import build
from qla_kernels.emulator.errors import EmulationError
from qla_kernels.emulator.lowering import lower
from qla_kernels.emulator.process import Argument

SCHEDULES = ("seeded", "random", "late", "eager")


class EmulatedKernel:
    """Lowers and builds once (both are cached on disk); each call is one launch.

    kernel(*arguments, seed=n) writes outputs into the tensors passed, which may be views, and
    raises EmulationError with a report when the kernel breaks a rule. Seeds give different
    interleavings of threads and copies.
    """

    def __init__(
        self,
        prim_func: Any,
        pass_configs: Mapping[str, object] | None = None,
        share_named_barriers: bool = False,
    ) -> None:
        self.lowered = lower(prim_func, pass_configs or {})
        self.executable = build(self.lowered)
        self.share_named_barriers = share_named_barriers

    def __call__(
        self, *arguments: Argument, seed: int = 0, time_limit: float | None = None
    ) -> None:
        names = self.lowered.parameters
        if len(arguments) != len(names):
            raise TypeError(
                f"{self.lowered.name} takes {len(names)} arguments ({', '.join(names)}),"
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
            raise EmulationError(
                f"{error}\n  seed {seed}; source: {self.executable.with_name('kernel.cpp')}"
            ) from None
