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
from functools import cache
from importlib.metadata import version
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
    options = parser.parse_args(arguments)
    known = recorded()["variants"] if FILE.exists() else {}
    keys: dict[str, str] = {}
    failed = 0
    for kernel in jit.kernel_modules():
        mine = {v: (jit.label(kernel.module, v), key(kernel, v)) for v in kernel.module.VARIANTS}
        keys |= dict(mine.values())
        asked = [v for v, (name, its) in mine.items() if options.all or known.get(name) != its]
        said, unread = check(kernel, asked) if asked else ([], set())
        print(f"{kernel}: {len(asked)} of {len(mine)} variants checked", *said, *unread, sep="\n")
        failed += len(said) + len(unread)
    if options.write and not failed:
        text = {"tools": tools(), "variants": dict(sorted(keys.items()))}
        FILE.write_text(json.dumps(text, indent=1) + "\n")
        for kernel in jit.kernel_modules():
            lowered.pack(kernel)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
