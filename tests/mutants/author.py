"""Make the mistakes of a kernel author, and see whether `check` notices them.

    python -m tests.mutants.author gdn.fused_fwd            ten of the usual seed
    python -m tests.mutants.author dualkv.fwd --seed 7 --count 3
    python -m tests.mutants.author dualkv.fwd --list        names them, and runs none

A mistake is drawn by the seed: first its kind, then one of them. It is made in a copy of the
checkout, in a file that the kernel is made of. `check` has two minutes of CPU time, so that a busy
machine finds the same. Exits with 1 if one is not noticed that is not in EQUIVALENT.
"""

import argparse
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from tests.mutants.__main__ import ROOT, copied
from tests.mutants.generate import Mutant

LIMIT = 120  # CPU seconds
PATIENCE = 15  # times as long, on a busy machine
LINES = {  # of each kind: a line's pattern, and what takes its place
    "dropped wait": (r"(?:\w+\.(?:wait|acquire)\(.*\)|T\.wait_wgmma\(\d\))", "pass"),
    "dropped release": (r"[\w.]+\.(?:release|commit)\(.*\)", "pass"),
    "dropped fence": (r"T\.fence_proxy_async\(\)", "pass"),
    "counter": (r"(?P<a>\w+ \+= )(?P<b>num_chunks|1)", r"\g<a>\g<b> + 1"),
}
PARTS = {
    "index": (r"\.slot\((\w+)\)", r".slot(\1 + 1)"),
    "parity": (r"(\.(?:wait|acquire)\(\w+)\)", r"\1 + 2)"),
}
EARLY = re.compile(r"^( *T\.wait_wgmma\(0\).*\n)( *[\w.]+\.release\(\w+\)\n)", re.MULTILINE)
KINDS = (*LINES, *PARTS, "early release")
# Mistakes that change nothing: the file, the line, the number of such lines before it; the reason.
EQUIVALENT = {
    (
        "sparse_ring/kernels/fwd.py",
        "T.fence_proxy_async()  # s_q: written by threads, read by the TMA store",
        0,
    ): "TileLang then puts a fence before the store, in the thread that issues it",
    (
        "sparse_ring/kernels/fwd.py",
        "steps.v.release(before)",
        1,
    ): "a block has one tile, and after a warpgroup's last step loads no more than there are slots",
    (
        "sparse_ring/kernels/walk.py",
        "steps.k.acquire(i)",
        0,
    ): "slots are released in order: to wait for a later one as well is slower, and no more",
}


def sources(kernel: str) -> list[str]:
    """Returns the files of device code that are imported with a kernel's module."""
    family, _, name = kernel.partition(".")
    module = f"qla_kernels.{family}.kernels.{name}"
    code = (
        f"import sys, {module}; print(*(m.__file__ for n, m in sys.modules.items()"
        f" if n.startswith('qla_kernels.{family}.kernels.')), sep='\\n')"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    said = subprocess.check_output([sys.executable, "-c", code], text=True, env=env, cwd=ROOT)
    return sorted(str(Path(x).relative_to(ROOT)) for x in said.split() if x.startswith(str(ROOT)))


def mistakes(path: str) -> list[Mutant]:
    text = (ROOT / path).read_text()
    edits = [
        (kind, *match.span(1), match[1] if new is None else re.sub(pattern, new, match[1]))
        for kind, (pattern, new) in LINES.items()
        for match in re.finditer(rf"^ +({pattern})(?=$|  #)", text, re.MULTILINE)
    ]
    edits += [
        (kind, *match.span(), match.expand(new))
        for kind, (pattern, new) in PARTS.items()
        for match in re.finditer(pattern, text)
    ]
    edits += [("early release", *m.span(), m[2] + m[1]) for m in EARLY.finditer(text)]
    return [
        Mutant(path, text[:a].count("\n") + 1, kind, len(text[:a].encode()),
               len(text[:b].encode()), new.encode())
        for kind, a, b, new in edits
    ]  # fmt: skip


def drawn(kernel: str, seed: int, count: int) -> list[Mutant]:
    every = [mutant for path in sources(kernel) for mutant in mistakes(path)]
    draw, found = random.Random(f"{kernel} {seed}"), list[Mutant]()
    while len(found) < min(count, len(every)):
        kind = draw.choice(KINDS)
        if of_kind := [m for m in every if m.kind == kind and m not in found]:
            found.append(draw.choice(of_kind))
    return found


def cpu_seconds() -> float:
    """Returns the CPU time of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def verdict(kernel: str, folder: Path) -> str:
    """Runs `check` in a copy; returns what noticed, "late" past the limit, or "survived".

    The emulated tests run first, alone, and the rest only if they pass.
    """
    first = f"check.emulated({kernel!r}, check.chosen({kernel!r}, '', False))"
    for command in (
        [
            "-c",
            f"from qla_kernels.lab import check; said = {first}; print(said.said, said, sep='\\n')",
        ],
        ["-m", "qla_kernels", "check", kernel, "--budget", "0"],
    ):
        if (said := _noticed(command, folder)) != "survived":
            break
    return said


def _noticed(command: list[str], folder: Path) -> str:
    started = cpu_seconds()
    env = os.environ | {"PYTHONPATH": str(folder), "EMU_CACHE": str(ROOT / "build" / "emulator")}
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as running:  # fmt: skip
        try:
            said, _ = running.communicate(timeout=PATIENCE * LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, 9)
            return "late"
    failed = re.findall(r"^FAILED +(\w+) ", said, re.MULTILINE)
    if not failed:
        return "survived"
    return "late" if cpu_seconds() - started > LIMIT else f"caught by {' and '.join(failed)}"


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.mutants.author", description=__doc__)
    parser.add_argument("kernel")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--only", default="", metavar="FILE:LINE", help="the end of its place")
    parser.add_argument("--list", action="store_true", help="run none")
    asked = parser.parse_args()
    folder, survivors = None if asked.list else copied(), 0
    mutants = drawn(asked.kernel, asked.seed, asked.count)
    for mutant in (m for m in mutants if f"{m.path}:{m.line}".endswith(asked.only)):
        data, started, said = (ROOT / mutant.path).read_bytes(), cpu_seconds(), ""
        before, after = mutant.lines(data)
        lines = [line.strip() for line in data[: mutant.begin].decode().splitlines()[:-1]]
        if (mutant.path.removeprefix("qla_kernels/"), before, lines.count(before)) in EQUIVALENT:
            said = "equivalent"
        elif folder is not None:
            (folder / mutant.path).write_bytes(mutant.applied(data))
            said = verdict(asked.kernel, folder)
            (folder / mutant.path).write_bytes(data)
            survivors += not said.startswith("caught")
        print(f"{said:28} {cpu_seconds() - started:4.0f} s  {mutant.kind}  {mutant.path}:"
              f"{mutant.line}\n    - {before}\n    + {after}", flush=True)  # fmt: skip
    if folder is not None:
        shutil.rmtree(folder)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
