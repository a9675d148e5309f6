"""Prepares kernels before they are needed: checks prebuilt ones and compiles the others.

    python -m qla_kernels warmup                              every variant
    python -m qla_kernels warmup --model qwen3-next --tp 4    the variants that one model needs
    python -m qla_kernels warmup --list                       prints them, and which are prebuilt

Prebuilt kernels are read and compared with their checksums. This takes milliseconds, needs neither
TileLang nor nvcc, and writes nothing. The others are compiled, several at a time, into TileLang's
cache. That needs nvcc but no GPU: the cache folder (TILELANG_CACHE_DIR) also serves a Hopper
machine with the same TileLang. Ctrl-C stops it; finished kernels stay in the cache.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

from qla_kernels.dualkv.shapes import HEAD_SIZES
from qla_kernels.gdn.shapes import VALUE_KERNELS, key_room, leaves_values, part_columns
from qla_kernels.lab import command_line
from qla_kernels.norm.heuristics import columns_of
from qla_kernels.runtime import jit
from qla_kernels.runtime.compiler import NEEDS_TILELANG
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.native import prebuilt
from qla_kernels.runtime.sm90 import DTYPES, dtype_name

INTERRUPTED = 130  # the exit status that shells report after Ctrl-C


class Model(NamedTuple):
    """The layers of a hybrid model: heads and head sizes of gated delta nets, and other sizes."""

    key_heads: int
    value_heads: int
    K: int
    V: int
    dtype: str = "bfloat16"
    width: int = 4  # of the convolution
    head_dim: int = 256  # of attention


MODELS = {
    "qwen3-next": Model(16, 32, 128, 128),
    "qwen3.5-397b": Model(16, 64, 128, 128),
    "qwen3.5-122b": Model(16, 64, 128, 128),
    "qwen3.5-35b": Model(16, 32, 128, 128),
    "qwen3.5-27b": Model(16, 48, 128, 128),
    "qwen3.5-9b": Model(16, 32, 128, 128),
    "qwen3.5-4b": Model(16, 32, 128, 128),
    "qwen3.5-2b": Model(16, 16, 128, 128),
    "qwen3.5-0.8b": Model(16, 16, 128, 128),
    "olmo-hybrid-7b": Model(30, 30, 96, 192, head_dim=128),
}

Job = tuple[jit.KernelModule, Any]


def jobs(models: Iterable[Model] = (), families: Iterable[str] = ()) -> Iterator[Job]:
    """Yields (kernel module, variant) for every variant that one of the models needs.

    Without models it yields every variant of all kernels, or of those that `families` launch.
    """
    wanted, named = list(models), set(families)
    named |= {"attn"} if named & {"dualkv", "sparse_ring"} else set()  # both launch some of its
    named |= {"head"} if "dualkv" in named else set()  # its batches do
    for kernel in jit.kernel_modules():
        if named and kernel.family not in named:
            continue
        for variant in kernel.module.VARIANTS:
            if not wanted or any(_needs(model, kernel, variant) for model in wanted):
                yield kernel.module, variant


def _needs(model: Model, kernel: jit.Kernel, variant: Any) -> bool:
    """Returns whether a model needs the variant, in plain calls or over shared prompts.

    It does if the variant's sizes, if any, run those of the model, and its dtype is not the other
    one of 16 bits: tables, gates and sums of states have their own dtypes.
    """
    family, fields = kernel.family, variant._asdict()
    if fields.get("dtype") in {dtype_name(x) for x in DTYPES} - {model.dtype}:
        return False
    if kernel.name in VALUE_KERNELS and not leaves_values(model.K, model.V):
        return False
    if family in ("gdn", "conv"):
        sizes = ("K", key_room(model.K)), ("V", part_columns(model.V)), ("W", model.width)
        return all(fields.get(name, size) == size for name, size in sizes)
    if family == "norm":
        return fields.get("V") in (None, columns_of(model.V))
    if family == "head":
        return True
    # some kernels of attention have a size, some are for large ones, and the others for small ones
    large = model.head_dim == HEAD_SIZES[-1] and fields.get("wide", False)
    return family in ("dualkv", "attn") and (fields.get("D") == model.head_dim or large)


def sharded(name: str, tp: int) -> Model:
    """Returns a model's layers on one of `tp` GPUs; ValueError if tp does not divide key heads."""
    model = MODELS[name]
    if tp < 1 or model.key_heads % tp:
        fix = f"use a divisor of {model.key_heads}"
        raise ValueError(need("warmup", f"--tp {tp}", "whole key heads a GPU", fix))
    return model._replace(key_heads=model.key_heads // tp, value_heads=model.value_heads // tp)


def main(arguments: Sequence[str]) -> int:
    parser = command_line.parser("warmup", __doc__)
    known = sorted({family for family, _ in jit.kernel_names()})
    family_help = f"only kernels of these; default: all; known: {', '.join(known)}"
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=family_help)
    model_help = f"may be repeated; default: every variant; known: {', '.join(MODELS)}"
    parser.add_argument(
        "--model", action="append", default=[], choices=MODELS, metavar="NAME", help=model_help
    )
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share a layer's heads")
    parser.add_argument("--list", action="store_true", help="only print the variants")
    parser.add_argument("--workers", type=int, help="parallel compiles; default: one per core")
    parser.add_argument(
        "--in-process", action="store_true", help="for debuggers; Ctrl-C may then be lost"
    )
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.families} - {*known}):
        parser.error(f"{', '.join(unknown)}; need families of {', '.join(known)}")
    if options.families and options.model:
        parser.error("families beside --model; need one of them: a model has its families")
    if not options.in_process:
        return run_apart([*arguments, "--in-process"])
    try:
        found = list(jobs([sharded(name, options.tp) for name in options.model], options.families))
        if options.list:
            ready = set(prebuilt_jobs(found))
            marks = (" (prebuilt)" if job in ready else "" for job in found)
            sys.stdout.writelines(
                f"{jit.label(*job)}{mark}\n" for job, mark in zip(found, marks, strict=True)
            )
        else:
            make_ready(found, options.workers)
    except ValueError as error:  # --tp does not fit, TileLang or nvcc is missing
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def run_apart(arguments: Sequence[str]) -> int:
    """Runs the command in a process with its own session; returns its exit status.

    Ctrl-C and SIGTERM end that session at once, compilers included. In this process Ctrl-C would
    often be lost, because TileLang uses Z3, which catches SIGINT. The cache is written by renames,
    so stopping leaves no partial entry.
    """
    command = [sys.executable, "-m", "qla_kernels", "warmup", *arguments]
    process = subprocess.Popen(command, start_new_session=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of `timeout` and of schedulers
    try:
        return process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        sys.stderr.write(f"\nstopped; finished kernels are in {jit.cache_dir()}\n")
        return INTERRUPTED


def compile_all(
    jobs: Iterable[Job], workers: int | None = None, progress: bool = True
) -> list[jit.Launch]:
    """Compiles each (module, variant), several at a time; returns the launch functions in order.

    Threads suffice: most of the time goes to nvcc, and TileLang's passes release the GIL. The first
    failure cancels the jobs that have not begun and is raised.
    """
    from tqdm.auto import tqdm

    pending = list(jobs)
    workers = workers or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(min(workers, len(pending)) or 1, "qla-compile") as pool:
        futures = {
            pool.submit(jit.compile, module, variant): jit.label(module, variant)
            for module, variant in pending
        }
        try:
            with tqdm(total=len(pending), desc="compile", disable=not progress) as bar:
                for future in as_completed(futures):
                    future.result()  # the first failure ends the wait
                    bar.set_postfix_str(futures[future])
                    bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def prebuilt_jobs(found: list[Job]) -> list[Job]:
    """Returns the jobs whose kernels are prebuilt."""
    file = prebuilt.in_use()
    return [] if isinstance(file, str) else [job for job in found if file.has(jit.label(*job))]


def make_ready(found: list[Job], workers: int | None) -> None:
    """Loads the prebuilt kernels among the jobs, compiles the others, and prints their numbers."""
    started = time.perf_counter()
    ready = prebuilt_jobs(found)
    for job in ready:
        jit.compile(*job)
    if ready:
        seconds, file = time.perf_counter() - started, prebuilt.in_use()
        assert isinstance(file, prebuilt.KernelFile)
        sys.stdout.write(f"{len(ready)} prebuilt kernels in {seconds:.1f} s: {file.path}\n")
    check_others([jit.label(*job) for job in found])
    if others := [job for job in found if job not in ready]:
        if not prebuilt.can_compile():
            jit.tilelang_for("warmup", jit.label(*others[0]))
        started = time.perf_counter()
        cost = "5 to 20 s of a core each"
        sys.stdout.write(f"compiles {len(others)} kernels, {cost}, into {jit.cache_dir()}\n")
        sys.stdout.flush()
        compile_all(others, workers)
        seconds = time.perf_counter() - started
        sys.stdout.write(f"{len(others)} kernels compiled in {seconds:.1f} s: {jit.cache_dir()}\n")


def check_others(labels: list[str]) -> None:
    """Without a driver, also reads the set of kernels for other drivers, and reports it.

    Raises Unsupported if it lacks a kernel that cannot be compiled here.
    """
    for file in prebuilt.others():
        here = [label for label in labels if file.has(label)]
        prebuilt.read(file, here)
        of_set = f"set {file.manifest['set']}, which other drivers use"
        sys.stdout.write(f"{len(here)} of {len(labels)} in {of_set}: {file.path}\n")
        if len(here) < len(labels) and not prebuilt.can_compile():
            absent = next(label for label in labels if label not in here)
            got = f"{file.path} lacks {len(labels) - len(here)} of {len(labels)} kernels ({absent}"
            needs = f"all of them, or {NEEDS_TILELANG}"
            fix = "build this set again, or take the file away if no such driver is used"
            raise Unsupported(need("warmup", f"{got}, ..)", needs, fix))
