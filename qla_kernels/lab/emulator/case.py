"""Files of kernels: their variants, emulated, and the case that each file tries them with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from qla_kernels.lab.emulator import lowering
from qla_kernels.lab.emulator.errors import EmulationError
from qla_kernels.lab.emulator.kernel import EmulatedKernel
from qla_kernels.lab.emulator.process import Argument
from qla_kernels.lab.kernel_file import kernel_of
from qla_kernels.runtime import jit
from qla_kernels.runtime.errors import Unsupported, need

NEEDS = ("VARIANTS", "build")  # of a file


class Case(NamedTuple):
    """A launch and the numbers that should come out: the result of a file's `case(variant)`."""

    arguments: Sequence[Argument]  # those of the PrimFunc; outputs begin as NaN
    expected: Mapping[str, Tensor]  # the contents of tensors afterwards, by their parameters' names
    tolerance: float  # of each expected tensor: relative L2 error


def load(file: str | Path, variant: str = "") -> EmulatedKernel:
    """Returns the kernel of a file, for the only variant whose id contains `variant`, or the first.

    An id joins the values of a variant's fields: `bf16-k64` is that of Variant("bfloat16", K=64).
    The file defines VARIANTS, build(variant) and, if it needs any, PASS_CONFIGS, as for
    `python -m qla_kernels inspect`. Raises Unsupported if it does not, or has no such variant, or
    several.
    """
    module = kernel_of("emulate", Path(file), NEEDS).module
    ids = {jit.variant_id(v): v for v in module.VARIANTS}
    fitting = [id for id in ids if variant in (id, "")] or [id for id in ids if variant in id]
    if not fitting or (variant and len(fitting) > 1):
        got = f"{len(fitting) or 'no'} variants with {variant!r} in {file}"
        raise Unsupported(need("emulator", got, f"one of {', '.join(ids)}", "choose one"))
    return emulated(module, ids[fitting[0]])


def emulated(module: jit.KernelModule, variant: object) -> EmulatedKernel:
    """Returns a variant of a kernel file that was imported already."""
    lowering.imported()  # before the file's own code needs it
    traced = jit.trace(module, variant)
    with jit.short_errors(module, variant, EmulationError):
        kernel = EmulatedKernel(traced, module.PASS_CONFIGS)
    if hasattr(module, "schedule"):
        plan = module.schedule(variant)
        names = [role.name for role in plan.roles]
        kernel.roles = ", ".join(f"{x} {plan.start(x)}..{plan.end(x) - 1}" for x in names)
    return kernel


def check(kernel: EmulatedKernel, case: Case, seed: int) -> float:
    """Launches a case, compares each expected tensor and returns the largest relative L2 error.

    Raises AssertionError if one is wrong, and says where.
    """
    from qla_kernels.lab.selftest.compare import (
        assert_close,  # imports the host code of all families
    )

    # with too few arguments the launch says so
    given = zip(kernel.parameters, case.arguments, strict=False)
    tensors = {name: x for name, x in given if isinstance(x, Tensor)}
    absent = sorted(case.expected.keys() - tensors.keys())
    if absent or not case.expected:
        got = f"expected numbers of {', '.join(absent) or 'no tensor'}"
        fix = "name them as the PrimFunc's parameters"
        raise Unsupported(need(kernel.name, got, f"some of {', '.join(tensors)}", fix))
    kernel(*case.arguments, seed=seed)
    return max(
        assert_close(name, tensors[name], want, case.tolerance)
        for name, want in case.expected.items()
    )
