"""CPU time of a launch on the stand-in driver, ours and TileLang's, in multiples of an addition.

    python -m tests.native.host_time                     gdn.fused_fwd and gdn.kkt_solve
    python -m tests.native.host_time gdn.gate --bursts 60

The driver's own time is left out: the stand-in's calls cost nearly nothing. TileLang's host
function is given tensors that are its own already, and `hand over` is what the same number of torch
tensors costs it besides. Times are CPU time of the thread, medians of bursts, with the least and
the 80th percentile; the unit is `x + 1` on eight floats, timed in turn with the rest.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from qla_kernels.lab.build import selected
from qla_kernels.runtime import jit
from qla_kernels.runtime.native.pack import pack, texts
from tests.native import standin, tilelang_host
from tests.native.compare import arguments

CALLS = 300  # of a burst


def seconds(call: Callable[[], object]) -> float:
    """CPU time of one call, in a burst."""
    begin = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - begin) / CALLS


def calls(kernel: jit.Kernel, variant: Any) -> dict[str, Callable[[], object]]:
    import tvm_ffi

    entry, theirs, _, _ = tilelang_host.lowered(kernel, variant)
    given = arguments(entry, random.Random(0))
    tensors = [x for x in given if _is_tensor(x)]
    disguised = [tilelang_host.OnGpu(x) if _is_tensor(x) else x for x in given]
    own = [x if isinstance(x, int | float) else tvm_ffi.from_dlpack(x) for x in disguised]
    nothing = tvm_ffi.get_global_func("testing.nop")
    name, code = jit.label(kernel.module, variant), b"\x7fELF"
    ours = standin.launcher().launcher(name, entry["function"], code, pack(entry), *texts(entry))
    return {
        "launch": lambda: ours(*given),
        "launch, TileLang's": lambda: (theirs(*own), disguised)[0],  # whose sizes it points to
        "hand over, TileLang's": lambda: nothing(*tensors),
    }


def _is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def by_python(kernel: jit.Kernel, variant: Any) -> Callable[[], object]:
    """A launch without the exchange API. There is one launcher for the process: this goes last."""
    ours = calls(kernel, variant)["launch"]
    standin.launcher(exchange=False)
    return ours


def report(timed: dict[str, Callable[[], object]], bursts: int) -> None:
    x = torch.zeros(8)
    timed = {"x + 1": lambda: x + 1, **timed}
    times: dict[str, list[float]] = {name: [] for name in timed}
    for call in timed.values():
        seconds(call)
    for _ in range(bursts):
        for name, call in timed.items():
            times[name].append(seconds(call) * 1e6)
    unit = statistics.median(times["x + 1"])
    for name, found in times.items():
        found.sort()
        middle, most = statistics.median(found), found[len(found) * 4 // 5]
        said = f"{middle:6.2f} us ({found[0]:.2f} .. {most:.2f}), {middle / unit:5.2f} additions"
        print(f"  {name:24} {said}", flush=True)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kernels", nargs="*", default=["gdn.fused_fwd", "gdn.kkt_solve"])
    parser.add_argument("--bursts", type=int, default=40)
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    found = selected(options.kernels)
    firsts = [(k, v) for k, v in found if v == k.module.VARIANTS[0]]
    for kernel, variant in firsts:
        print(jit.label(kernel.module, variant))
        report(calls(kernel, variant), options.bursts)
        report({"launch, by Python": by_python(kernel, variant)}, options.bursts)
    return 0


if __name__ == "__main__":
    if "STANDIN_FOLDER" not in os.environ:
        command = [sys.executable, "-m", "tests.native.host_time", *sys.argv[1:]]
        os.execve(sys.executable, command, standin.environment(standin.built()))
    sys.exit(main(sys.argv[1:]))
