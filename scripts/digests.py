"""Digests of the generated code: is it the same in every process, and what it was?

    python scripts/digests.py                          every variant of every kernel
    python scripts/digests.py gdn.fused_fwd            one kernel, or one family
    python scripts/digests.py --write                  bring qla_kernels/digests.json up to date
    python scripts/digests.py --check                  compare with qla_kernels/digests.json
    python scripts/digests.py --check REV              compare with that file in a git revision
    python scripts/digests.py --processes 20           lower each kernel in 20 fresh processes

Prints a line a variant: its digest and its label. Comments and names of variables do not count.
Compared processes have a random PYTHONHASHSEED and lower one kernel each; --workers says how many
run at a time. Needs TileLang; neither nvcc nor a GPU. Lowering every kernel once takes some 20
minutes of a core. Exit status 1 when digests differ.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent

Digests = dict[str, str]  # by the variant's label


def selected(wanted: str) -> list[str]:
    """The kernels of a family, or the one kernel, or for "" all."""
    from qla_kernels import jit

    names = [".".join(name) for name in jit.kernel_names()]
    return [name for name in names if wanted in ("", name, name.partition(".")[0])]


def own(wanted: str) -> Iterator[tuple[str, str]]:
    """(label, digest) of each variant of the selected kernels."""
    from qla_kernels import jit
    from qla_kernels.digests import digest

    chosen = selected(wanted)
    for kernel in jit.kernel_modules(wanted.partition(".")[0] or None):
        if str(kernel) in chosen:
            for variant in kernel.module.VARIANTS:
                lowered = jit.lower(kernel, variant)
                yield jit.label(kernel.module, variant), digest(lowered.source, lowered.function)


def in_a_process(wanted: list[str]) -> Digests:
    """Returns the digests that this script prints when it runs in a fresh process."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, __file__, *wanted],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "random"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {name: digest for digest, name in map(str.split, done.stdout.splitlines())}


def in_processes(kernels: list[str], runs: int, workers: int) -> list[Digests]:
    """Every kernel in a process of its own, `runs` times."""
    with ThreadPoolExecutor(workers) as pool:
        jobs = [[pool.submit(in_a_process, [name]) for name in kernels] for _ in range(runs)]
        return [{k: v for job in run for k, v in job.result().items()} for run in jobs]


def differences(runs: list[Digests]) -> list[str]:
    """A line for each variant whose digest is not the same in all runs."""
    said = []
    for name in sorted(set().union(*runs)):
        seen = [run.get(name, "absent") for run in runs]
        if len(set(seen)) > 1:
            counts = ", ".join(f"{digest} x {seen.count(digest)}" for digest in sorted(set(seen)))
            said.append(f"{name}: {counts}")
    return said


def on_record(revision: str) -> Digests:
    """What digests.json says: the one in the working tree, or that of a git revision."""
    from qla_kernels import digests

    if not revision:
        return digests.recorded()
    file = digests.FILE.relative_to(ROOT).as_posix()
    git = ["git", "-C", str(ROOT), "show", f"{revision}:{file}"]
    text = subprocess.run(git, stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(json.loads(text)["kernels"])


def main(arguments: list[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kernels", nargs="*", help="family or family.kernel; all when left out")
    parser.add_argument("--processes", type=int, metavar="N", help="compare N fresh processes")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--check", nargs="?", const="", metavar="REV", help="compare with a record")
    parser.add_argument("--write", action="store_true", help="write digests.json")
    options = parser.parse_args(arguments)
    if not options.processes and options.check is None and not options.write:
        for wanted in options.kernels or [""]:
            for name, digest in own(wanted):
                print(digest, name, flush=True)
        return 0
    kernels = [name for wanted in options.kernels or [""] for name in selected(wanted)]
    runs = in_processes(kernels, options.processes or 1, options.workers)
    said = differences(runs)
    if options.check is not None:
        record = on_record(options.check)
        asked = {k: v for k, v in record.items() if k.partition("-")[0] in kernels}
        said += differences([asked, runs[0]])
    print(*said, sep="\n", end="\n" if said else "")
    print(f"{len(runs[0])} variants, {len(runs)} processes, {len(said)} differ")
    if options.write and len(said) == 0:
        record_them(runs[0], kernels)
    return 1 if said else 0


def record_them(found: Digests, kernels: list[str]) -> None:
    """What was lowered, and of all other kernels what stands there."""
    import tilelang

    from qla_kernels import digests

    known = set(selected(""))
    kept = {
        name: digest
        for name, digest in digests.recorded().items()
        if name.partition("-")[0] in known - set(kernels)
    }
    digests.write(kept | found, tilelang.__version__)


if __name__ == "__main__":
    sys.exit(main())
