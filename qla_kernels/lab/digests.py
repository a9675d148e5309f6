"""Prints digests of generated code, or compares them between processes or with a record.

    python -m qla_kernels digests                          every variant of every kernel
    python -m qla_kernels digests gdn.fused_fwd            one kernel, or one family
    python -m qla_kernels digests --write                  update runtime/digests.json
    python -m qla_kernels digests --check                  compare with runtime/digests.json
    python -m qla_kernels digests --check REV              compare with that file in a git revision
    python -m qla_kernels digests --processes 20           lower each kernel in 20 fresh processes

Prints a line for each variant: digests of its code and of what its launch needs, and its label.
Comments and names of variables do not count. Compared processes have a random PYTHONHASHSEED and
lower one kernel each. Needs TileLang, but neither nvcc nor a GPU. Lowering every kernel once takes
about 20 minutes of a core. The exit status is 1 if digests differ.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from qla_kernels.lab import build, command_line
from qla_kernels.runtime import digests, jit
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.native import sources

ROOT = Path(__file__).parents[2]

Digests = dict[str, str]  # by the variant's label


class Lowered(NamedTuple):
    code: Digests
    launch: Digests


def selected(wanted: str) -> list[str]:
    """Returns one kernel, the kernels of a family, or all for ""; ValueError if there is none."""
    names = [".".join(name) for name in jit.kernel_names()]
    found = [name for name in names if wanted in ("", name, name.partition(".")[0])]
    if not found:
        fix = f"see {command_line.PROGRAM} warmup --list"
        raise ValueError(need("digests", f"no kernel {wanted!r}", "a kernel or a family", fix))
    return found


def own(wanted: str) -> Iterator[tuple[str, str, str]]:
    """Yields the label of each variant of selected kernels, and digests of its code and launch."""
    chosen = selected(wanted)
    for kernel in jit.kernel_modules(wanted.partition(".")[0] or None):
        if str(kernel) in chosen:
            for variant in kernel.module.VARIANTS:
                lowered = jit.lower(kernel, variant)
                launch = digests.launch(build.entry_of(lowered), kernel.module.PASS_CONFIGS)
                code = digests.digest(lowered.source, lowered.function)
                yield jit.label(kernel.module, variant), code, launch


def in_a_process(wanted: list[str]) -> Lowered:
    """Returns the digests that this command prints when it runs in a fresh process."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "qla_kernels", "digests", *wanted],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "random"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = [line.split() for line in done.stdout.splitlines()]
    return Lowered({name: code for code, _, name in found}, {name: x for _, x, name in found})


def in_processes(kernels: list[str], runs: int, workers: int) -> list[Lowered]:
    """Lowers every kernel in its own process, `runs` times."""
    with ThreadPoolExecutor(workers) as pool:
        jobs = [[pool.submit(in_a_process, [name]) for name in kernels] for _ in range(runs)]
        return [merged(job.result() for job in run) for run in jobs]


def merged(parts: Iterable[Lowered]) -> Lowered:
    """Merges the digests of several processes."""
    every = Lowered({}, {})
    for part in parts:
        every.code.update(part.code)
        every.launch.update(part.launch)
    return every


def differences(runs: Sequence[Digests], what: str = "") -> list[str]:
    """Returns a line for each variant whose digest is not the same in all runs."""
    lines = []
    for name in sorted(set().union(*runs)):
        seen = [run.get(name, "absent") for run in runs]
        if len(set(seen)) > 1:
            counts = ", ".join(f"{digest} x {seen.count(digest)}" for digest in sorted(set(seen)))
            lines.append(f"{name}{what}: {counts}")
    return lines


def on_record(revision: str) -> Lowered:
    """Returns the digests of digests.json, in the working tree or in a git revision.

    Raises Unsupported if git does not have that revision of the file.
    """
    if not revision:
        return Lowered(digests.recorded(), digests.launches())
    file = digests.FILE.relative_to(ROOT).as_posix()
    git = ["git", "-C", str(ROOT), "show", f"{revision}:{file}"]
    try:
        done = subprocess.run(git, capture_output=True, text=True)
    except OSError as error:
        raise Unsupported(need("digests", str(error), "git", "install it")) from error
    if done.returncode:
        fix = "name a revision of a checkout"
        raise Unsupported(need("digests", done.stderr.strip(), f"{revision}:{file}", fix))
    record = json.loads(done.stdout)
    return Lowered(record["kernels"], record.get("launches", {}))


def main(arguments: Sequence[str]) -> int:
    parser = command_line.parser("digests", __doc__)
    parser.add_argument("kernels", nargs="*", help="family or family.kernel; default: all")
    parser.add_argument("--processes", type=int, metavar="N", help="compare N fresh processes")
    parser.add_argument("--workers", type=int, default=1, help="parallel processes")
    parser.add_argument("--check", nargs="?", const="", metavar="REV", help="compare with a record")
    parser.add_argument("--write", action="store_true", help="write digests.json")
    options = parser.parse_args(arguments)
    try:
        if options.write:
            command_line.need_checkout("digests --write")
        jit.tilelang_for("digests")
        kernels = [name for wanted in options.kernels or [""] for name in selected(wanted)]
        if options.processes or options.check is not None or options.write:
            return _compare(kernels, options.processes or 1, options)
        for wanted in options.kernels or [""]:
            for name, *both in own(wanted):
                print(*both, name, flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _compare(kernels: list[str], processes: int, options: argparse.Namespace) -> int:
    runs = in_processes(kernels, processes, options.workers)
    lines = differences([run.code for run in runs])
    lines += differences([run.launch for run in runs], ", launch")
    if options.check is not None:
        record = on_record(options.check)
        asked = {k: v for k, v in record.code.items() if k.partition("-")[0] in kernels}
        lines += differences([asked, runs[0].code])
        launches = {k: record.launch.get(k, v) for k, v in runs[0].launch.items()}
        lines += differences([launches, runs[0].launch], ", launch")
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{len(runs[0].code)} variants, {len(runs)} processes, {len(lines)} differ")
    if options.write and len(lines) == 0:
        record_them(runs[0], kernels)
    return 1 if lines else 0


def record_them(found: Lowered, kernels: list[str]) -> None:
    """Writes digests.json: new digests of these kernels, and the old ones of all others."""
    import tilelang

    others = set(selected("")) - set(kernels)

    def kept(record: Digests) -> Digests:
        return {name: x for name, x in record.items() if name.partition("-")[0] in others}

    digests.write(
        kept(digests.recorded()) | found.code,
        kept(digests.launches()) | found.launch,
        kept(digests.sources()) | {name: sources.code(sources.module_of(name)) for name in kernels},
        tilelang.__version__,
    )
