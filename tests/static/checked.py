"""On record: the variants that were compiled and found to be what schedules and claims.py say.

    python -m tests.static.checked           checks the variants that are not on record
    python -m tests.static.checked --write   and puts them there, and code for the emulated tier
    python -m tests.static.checked --all     checks all variants again

To lower and assemble all variants takes half of an hour of a core. What a check finds follows from
the traced kernel, its schedule, the flags, the tools, our reader of machine code and claims.py. A
digest of all of these is a variant's key. A test run checks the variants whose key is not on
record, and of the others one in 16. Needs TileLang and nvcc; no GPU.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from qla_kernels.lab import inspect
from qla_kernels.lab.inspect import sass
from qla_kernels.lab.inspect.gather import key as key_of_facts
from qla_kernels.runtime import digests, jit
from qla_kernels.runtime.native.sources import structure
from tests import lowered
from tests.static import claims
from tests.static.one_unit import one_unit

FILE = Path(__file__).with_suffix(".json")
SAMPLED = 16  # one variant in so many is checked in every run


def tools() -> dict[str, str]:
    return {
        "tilelang": version("tilelang"),
        "nvcc": jit.nvcc_version(),
        "nvdisasm": sass.nvdisasm_version(),
    }


@cache
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def key(kernel: jit.Kernel, variant: Any) -> str:
    """The digest on record and how it is made count, too: they are compared in the same check."""
    digest = digests.recorded().get(jit.label(kernel.module, variant))
    parts = [key_of_facts(kernel, variant), digest, *structure(Path(digests.__file__).read_text())]
    if claims.of(str(kernel), variant):
        parts.append(Path(claims.__file__).read_text())
    return hashlib.sha256(repr(tuple(parts)).encode()).hexdigest()[:16]


def due(kernel: jit.Kernel) -> list[Any]:
    """Returns the variants that a test run checks."""
    known = recorded()["variants"]
    keys = {variant: key(kernel, variant) for variant in kernel.module.VARIANTS}
    return [
        variant
        for variant, its in keys.items()
        if known.get(jit.label(kernel.module, variant)) != its or int(its, 16) % SAMPLED == 0
    ]


def check(kernel: jit.Kernel, variants: Sequence[Any]) -> tuple[list[str], set[str]]:
    """Compiles variants; returns what is not as it should be, and what could not be read."""
    said: list[str] = []
    unread: set[str] = set()
    with one_unit(kernel, variants):
        for variant in variants:
            label = jit.label(kernel.module, variant)
            code = jit.lower(kernel, variant)
            if version("tilelang") == digests.lowered_by():
                found = digests.digest(code.source, code.function)
                if found != (wanted := digests.recorded().get(label)):
                    fix = f"python -m qla_kernels digests {kernel} --write, if intended"
                    said.append(f"{label}: digest {found}; on record is {wanted}: {fix}")
            facts = inspect.facts(kernel, variant)
            if violations := inspect.check(facts, kernel.module.schedule(variant)):
                said += [facts.kernel, *violations]
            if not facts.unchecked:
                wrong = [x for claim in claims.of(str(kernel), variant) for x in claim(facts)]
                said += [f"{label}: {x}" for x in wrong]
            unread |= set(facts.unchecked)
    return said, unread


def main(arguments: list[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="check all variants again")
    parser.add_argument("--write", action="store_true", help="write what is right")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes")
    options = parser.parse_args(arguments)
    keys: dict[str, str] = {}
    failed = 0
    names = [str(kernel) for kernel in jit.kernel_modules()]
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        for mine, said in pool.map(partial(_checked, options.all, options.write), names):
            keys |= mine
            print(*said, sep="\n", flush=True)
            failed += len(said) - 1
    if options.write and not failed:
        text = {"tools": tools(), "variants": dict(sorted(keys.items()))}
        FILE.write_text(json.dumps(text, indent=1) + "\n")
    return 1 if failed else 0


def _checked(every: bool, write: bool, name: str) -> tuple[dict[str, str], list[str]]:
    """Checks a kernel; returns the keys of its variants, a line that says so, and what is wrong.

    With `write`, code for the emulated tier is put on record if nothing is wrong.
    """
    known = recorded()["variants"] if FILE.exists() else {}
    kernel = next(kernel for kernel in jit.kernel_modules() if str(kernel) == name)
    mine = {v: (jit.label(kernel.module, v), key(kernel, v)) for v in kernel.module.VARIANTS}
    asked = [v for v, (label, its) in mine.items() if every or known.get(label) != its]
    said, unread = check(kernel, asked) if asked else ([], set())
    wrong = [*said, *sorted(unread)]
    if write and not wrong:
        lowered.pack(kernel)
    return dict(mine.values()), [f"{name}: {len(asked)} of {len(mine)} variants checked", *wrong]


if __name__ == "__main__":
    sys.exit(main())
