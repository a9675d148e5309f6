"""Compiles kernels before they are needed, several at a time; TileLang's cache keeps the results.

    python -m qla_kernels.warmup                              every variant there is
    python -m qla_kernels.warmup --model qwen3-next --tp 4    the variants that one model needs
    python -m qla_kernels.warmup --list                       only prints what would be compiled

Needs nvcc but no GPU: a cache folder filled here (TILELANG_CACHE_DIR) serves a Hopper machine that
has the same TileLang. Ctrl-C stops it; kernels that were finished stay in the cache.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

from qla_kernels import jit
from qla_kernels.errors import need

INTERRUPTED = 130  # the exit status that shells report after Ctrl-C


class Model(NamedTuple):
    """A model's linear-attention layers: family, numbers of heads, head sizes and dtype."""

    family: str
    key_heads: int
    value_heads: int
    K: int
    V: int
    dtype: str = "bfloat16"


MODELS = {
    "qwen3-next": Model("gdn", 16, 32, 128, 128),
    "qwen3.5-397b": Model("gdn", 16, 64, 128, 128),
    "qwen3.5-122b": Model("gdn", 16, 64, 128, 128),
    "qwen3.5-35b": Model("gdn", 16, 32, 128, 128),
    "qwen3.5-27b": Model("gdn", 16, 48, 128, 128),
    "qwen3.5-9b": Model("gdn", 16, 32, 128, 128),
    "qwen3.5-4b": Model("gdn", 16, 32, 128, 128),
    "qwen3.5-2b": Model("gdn", 16, 16, 128, 128),
    "qwen3.5-0.8b": Model("gdn", 16, 16, 128, 128),
}

Job = tuple[jit.KernelModule, Any]


def jobs(models: Iterable[Model] = ()) -> Iterator[Job]:
    """Yields (kernel module, variant) for every variant that one of the models needs.

    Without models it yields every variant of every kernel.
    """
    wanted = list(models)
    for kernel in jit.kernel_modules():
        for variant in kernel.module.VARIANTS:
            if not wanted or any(_needs(model, kernel.family, variant) for model in wanted):
                yield kernel.module, variant


def _needs(model: Model, family: str, variant: Any) -> bool:
    """Returns whether a model of this family needs the variant.

    It does if the variant's dtype, K and V, where it has these fields, are the model's.
    """
    fields = variant._asdict()
    return model.family == family and all(
        fields.get(name, value) == value
        for name, value in (("dtype", model.dtype), ("K", model.K), ("V", model.V))
    )


def sharded(name: str, tp: int) -> Model:
    """Returns a named model's layers on one of `tp` GPUs.

    Raises ValueError if tp does not divide the key heads.
    """
    model = MODELS[name]
    if tp < 1 or model.key_heads % tp:
        fix = f"use a divisor of {model.key_heads}"
        raise ValueError(need("warmup", f"--tp {tp}", "whole key heads a GPU", fix))
    return model._replace(key_heads=model.key_heads // tp, value_heads=model.value_heads // tp)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m qla_kernels.warmup", description="Compile kernels before they are needed."
    )
    model_help = f"may be repeated; default: every variant; known: {', '.join(MODELS)}"
    parser.add_argument(
        "--model", action="append", default=[], choices=MODELS, metavar="NAME", help=model_help
    )
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share a layer's heads")
    parser.add_argument("--list", action="store_true", help="only say what would be compiled")
    parser.add_argument("--workers", type=int, help="compiles at a time; default: one a core")
    parser.add_argument(
        "--in-process", action="store_true", help="for debuggers; Ctrl-C may then be lost"
    )
    options = parser.parse_args(arguments)
    if not options.in_process:
        return run_apart([*arguments, "--in-process"])
    try:
        found = list(jobs([sharded(name, options.tp) for name in options.model]))
        if options.list:
            sys.stdout.writelines(f"{jit.label(*job)}\n" for job in found)
        else:
            compile_jobs(found, options.workers)
    except ValueError as error:  # --tp does not fit, TileLang or nvcc is missing
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def run_apart(arguments: Sequence[str]) -> int:
    """Runs the command in a process of its own session; returns its exit status.

    Ctrl-C ends that session at once, compilers included. In this process Ctrl-C would often be
    lost: TileLang simplifies terms with Z3, which catches SIGINT. The cache is written by renames,
    so stopping leaves no partial entry.
    """
    command = [sys.executable, "-m", "qla_kernels.warmup", *arguments]
    process = subprocess.Popen(command, start_new_session=True)
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


def compile_jobs(found: list[Job], workers: int | None) -> None:
    started = time.perf_counter()
    compile_all(found, workers)
    seconds = time.perf_counter() - started
    sys.stdout.write(f"{len(found)} kernels in {seconds:.1f} s; cache: {jit.cache_dir()}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
