"""Emulates the kernel of a file, in several orders of its threads and copies.

    python -m qla_kernels emulate my_kernels/gemm.py
    python -m qla_kernels emulate my_kernels/gemm.py --variant bf16 --seeds 20

The file defines `VARIANTS`, instances of a NamedTuple with the values that change generated code;
`build(variant)`, which returns the PrimFunc; and `case(variant)`, which returns a Case of
qla_kernels.lab.emulator: the arguments of a launch, and the numbers that should come out. It is
called once a seed, with torch.manual_seed of the same number. `PASS_CONFIGS` is a dict of
TileLang's, empty if left out.

The exit status is 0 if the numbers of every variant are right for every seed, 1 if not, 2 if a tool
is missing, the file is not one of a kernel, its code raises, or no variant matches.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qla_kernels.lab import command_line
from qla_kernels.lab.emulator.case import NEEDS, check, emulated
from qla_kernels.lab.emulator.errors import EmulationError
from qla_kernels.lab.emulator.lowering import imported
from qla_kernels.lab.kernel_file import chosen, kernel_of, mistakes
from qla_kernels.runtime import jit
from qla_kernels.runtime.errors import Unsupported

NAN = """\
      nan: an element that was not written; or, if EMU_SCHEDULE=eager mends or moves it, one made
      of shared memory that was read before it was written"""
SEEDS = 6  # late copies and random ones, faulting pages before tensors and behind: README.md


def main(arguments: Sequence[str]) -> int:
    parser = command_line.parser("emulate", __doc__)
    parser.add_argument("file", type=Path, help="a .py file with a kernel of yours")
    parser.add_argument("--variant", default="", help="only variants whose name contains this")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default: {SEEDS}")
    options = parser.parse_args(arguments)
    try:
        imported()  # before the file's own code needs it
        kernel = kernel_of("emulate", options.file, (*NEEDS, "case"))
        outcomes = [
            _right(kernel.module, options.file, variant, options.seeds)
            for variant in chosen(kernel, options.variant)
        ]
    except Unsupported as error:
        print(error, file=sys.stderr)
        return 2
    if not outcomes:
        ids = ", ".join(map(jit.variant_id, kernel.module.VARIANTS))
        print(f"no variant matches; variants: {ids}", file=sys.stderr)
        return 2
    return 0 if all(outcomes) else 1


def _right(module: Any, file: Path, variant: Any, seeds: int) -> bool:
    """Prints what came out, and returns whether it is right for every seed."""
    name, largest, where = jit.label(module, variant), 0.0, "not built"
    try:
        with mistakes("emulate", file, f"building {name}", EmulationError):
            kernel = emulated(module, variant)
        for seed in range(seeds):
            where = f"seed {seed}"
            torch.manual_seed(seed)
            with mistakes("emulate", file, f"case of {name}"):
                case = module.case(variant)
            with mistakes("emulate", file, f"launching {name}", AssertionError, EmulationError):
                largest = max(largest, check(kernel, case, seed))
    except (AssertionError, EmulationError) as error:
        print(f"WRONG {name}, {where}: {error}", flush=True)
        if "first nan at" in str(error):
            print(NAN, flush=True)
        return False
    said = f"largest relative error {largest:.1e}" if largest else "exact"
    print(f"ok    {name}: {seeds} seeds, {said}", flush=True)
    return True
