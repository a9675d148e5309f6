"""Digests of the generated code: is it the same in every process, and the same as in a revision?

    python scripts/digests.py                          every variant of every kernel
    python scripts/digests.py gdn.fused_fwd            one kernel, or one family
    python scripts/digests.py --processes 20           lower each kernel in 20 fresh processes
    python scripts/digests.py --check REV              compare with the code of a git revision

Prints a line a variant: the first 16 digits of the SHA-256 of its CUDA, and its function's name.
Compared processes have a random PYTHONHASHSEED and lower one kernel each; --workers says how many
run at a time. Needs TileLang; neither nvcc nor a GPU. Lowering every kernel once takes some 20
minutes of a core. Exit status 1 when digests differ.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent

Digests = dict[str, str]  # by the function's name


def selected(wanted: str) -> list[str]:
    """The kernels of a family, or the one kernel, or for "" all."""
    from qla_kernels import jit

    names = [".".join(name) for name in jit.kernel_names()]
    return [name for name in names if wanted in ("", name, name.partition(".")[0])]


def own(wanted: str) -> Iterator[tuple[str, str]]:
    """(function, digest) of each variant of the selected kernels."""
    from qla_kernels import jit

    chosen = selected(wanted)
    for kernel in jit.kernel_modules(wanted.partition(".")[0] or None):
        if str(kernel) in chosen:
            for variant in kernel.module.VARIANTS:
                lowered = jit.lower(kernel, variant)
                yield lowered.function, hashlib.sha256(lowered.source.encode()).hexdigest()[:16]


def in_a_process(wanted: list[str], root: Path = ROOT) -> Digests:
    """What this script, run in a fresh process with the package in `root`, prints."""
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONHASHSEED": "random"}
    done = subprocess.run(
        [sys.executable, __file__, *wanted],
        env=environment,
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {name: digest for digest, name in map(str.split, done.stdout.splitlines())}


def differences(runs: list[Digests]) -> list[str]:
    """A line for each function whose digest is not the same in all runs."""
    said = []
    for name in sorted(set().union(*runs)):
        seen = [run.get(name, "absent") for run in runs]
        if len(set(seen)) > 1:
            counts = ", ".join(f"{digest} x {seen.count(digest)}" for digest in sorted(set(seen)))
            said.append(f"{name}: {counts}")
    return said


@contextmanager
def checkout(revision: str | None) -> Iterator[Path | None]:
    """A folder that holds a revision, while it lasts; None for None."""
    if revision is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


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
    parser.add_argument("--check", metavar="REV", help="compare with a git revision")
    options = parser.parse_args(arguments)
    if not options.processes and not options.check:
        for wanted in options.kernels or [""]:
            for name, digest in own(wanted):
                print(digest, name, flush=True)
        return 0
    kernels = [name for wanted in options.kernels or [""] for name in selected(wanted)]
    with ThreadPoolExecutor(options.workers) as pool, checkout(options.check) as other:
        roots = [ROOT] * (options.processes or 1) + ([other] if other else [])
        jobs = [pool.submit(in_a_process, [name], root) for root in roots for name in kernels]
        done = [job.result() for job in jobs]
    runs: list[Digests] = []
    for i in range(len(roots)):
        of_a_run = done[i * len(kernels) : (i + 1) * len(kernels)]
        runs.append({name: digest for part in of_a_run for name, digest in part.items()})
    said = differences(runs)
    print(*said, sep="\n", end="\n" if said else "")
    print(f"{len(runs[0])} variants, {len(runs)} processes, {len(said)} differ")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
