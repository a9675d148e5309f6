"""Cases: what runs a kernel and checks it, on which inputs, in which tiers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from qla_kernels.runtime import jit


class Cases(NamedTuple):
    """The cases of a kernel, or of kernels that one call launches together.

    Self-test and device tests run `inputs` for every variant. The emulated tier, which builds each
    variant for the CPU, runs them for the variants in `emulated`.
    """

    kernels: tuple[str, ...]  # family.kernel; variants are those of the first
    check: Callable[[Any, Any, str], None]
    """check(variant, one of the inputs, device) launches; raises AssertionError if it is wrong.

    Inputs are drawn on the CPU and results are compared there, so that a broken GPU does not check
    itself. Results begin as NaN.
    """
    inputs: Sequence[Any]
    large: Sequence[Any] = ()  # more inputs, for device tests alone
    emulated: tuple[str, ...] | None = None  # ids of variants; None: all
    of: Callable[[Any], bool] | None = None  # variants that the cases are of; None: all

    def variants(self) -> tuple[Any, ...]:
        """Returns the variants of the first kernel that the cases are of."""
        family = self.kernels[0].partition(".")[0]
        modules = {str(kernel): kernel.module for kernel in jit.kernel_modules(family)}
        return tuple(v for v in modules[self.kernels[0]].VARIANTS if not self.of or self.of(v))

    def variants_of(self, kernel: str, variant: str = "") -> tuple[Any, ...]:
        """Returns the variants that run `kernel`: one if `variant` is the id of one of the first's.

        All of them run `kernel` if its own variants have other ids than the first's.
        """
        found = self.variants()
        same = tuple(v for v in found if jit.variant_id(v) == variant)
        return same if same or (variant and kernel == self.kernels[0]) else found


@dataclass(frozen=True)
class Result:
    """What became of a case."""

    name: str
    passed: bool | None  # None when nothing was run
    note: str = ""

    def __str__(self) -> str:
        verdict = {True: "ok  ", False: "FAIL", None: "skip"}[self.passed]
        return f"{verdict}  {self.name}" + (f": {self.note}" if self.note else "")


def checked(name: str, check: Callable[..., None], *arguments: Any) -> Result:
    """Runs a check on numbers that do not depend on other checks; returns its result.

    Fresh memory is NaN meanwhile, by torch's own switch, so that reading what nobody wrote shows.
    """
    torch.manual_seed(0)
    enabled = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        check(*arguments)
    except AssertionError as error:
        return Result(name, False, str(error))
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns_only)
    return Result(name, True)


def to(x: Any, device: str) -> Any:
    """Returns a tensor or layout, or a record or dictionary with some, on a device."""
    if hasattr(x, "to"):
        return x.to(device)
    if isinstance(x, dict):
        return {name: to(value, device) for name, value in x.items()}
    if isinstance(x, tuple):
        moved = (to(value, device) for value in x)
        return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
    return x


def dtype_of(variant: Any) -> torch.dtype:
    """Returns the dtype that a variant names."""
    found: torch.dtype = getattr(torch, variant.dtype)
    return found
