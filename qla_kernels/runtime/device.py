"""Queries about GPUs, streams and the driver; none runs at import."""

import functools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from qla_kernels.runtime.native import recording

T = TypeVar("T")


def available() -> bool:
    """Returns whether torch can use a GPU."""
    return torch.cuda.is_available()


def capability(device: torch.device) -> tuple[int, int]:
    """Returns the GPU's compute capability (major, minor): (9, 0) is Hopper."""
    found = _properties(device)
    return found.major, found.minor


def capabilities() -> list[tuple[int, int]]:
    """Returns the capability of each GPU that torch can use."""
    count = torch.cuda.device_count() if available() else 0
    return [capability(torch.device("cuda", i)) for i in range(count)]


class of:
    """Context manager for kernel launches on x's GPU: `with device.of(x)`.

    Makes x's GPU the current one, unless x is a CPU tensor. Disables autograd's bookkeeping, which
    takes as long per view as the view itself, even if no tensor requires a gradient: tensors made
    inside require no gradient, and writes inside do not count as in-place changes of a tensor.
    """

    __slots__ = ("_index", "_unwatched")

    def __init__(self, x: torch.Tensor) -> None:
        self._index = x.get_device()  # -1 for a CPU tensor: nothing to change
        self._unwatched = torch._C._AutoDispatchBelowADInplaceOrView()

    def __enter__(self) -> None:
        self._index = torch.cuda._exchange_device(self._index)
        self._unwatched.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self._unwatched.__exit__(*error)
        torch.cuda._maybe_exchange_device(self._index)


@contextmanager
def fork(x: torch.Tensor) -> Iterator[AbstractContextManager[object]]:
    """Returns a context manager for launches that may overlap on x's GPU: `with fork(x) as aside`.

    Launches inside `with aside` go to a second stream: they start after all launches before the
    block, end before all launches after it, and may overlap with the rest of the block. Allocate
    the results of `aside` before the block: their memory then belongs to the caller's stream, which
    waits for the second one, so torch's allocator needs no record of the second stream. A CUDA
    graph captures both branches. For a CPU tensor `aside` does nothing.
    """
    if not x.is_cuda:
        yield nullcontext()
        return
    here = torch.cuda.current_stream(x.device)
    second = _second_stream(here)
    _wait(second, here)
    try:
        yield torch.cuda.stream(second)
    finally:
        _wait(here, second)


def _wait(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    stream.wait_stream(other)
    recording.note_wait(stream, other)


@functools.lru_cache(maxsize=64)
def _second_stream(first: torch.cuda.Stream) -> torch.cuda.Stream:
    """Returns a stream other than `first`; cached, so that each stream keeps its second stream.

    A captured stream's second stream is captured as well until the capture ends, so streams do not
    share one. A new stream for each call would not do: torch hands out a few streams in turn, and
    the new one could be in use elsewhere.
    """
    while True:
        second: torch.cuda.Stream = torch.cuda.Stream(first.device)  # type: ignore[no-untyped-call]
        if second != first:
            return second


DEFAULT_STREAM = 0  # the number that `stream` returns for it; it cannot be captured


def stream(gpu: int) -> int:
    """Returns the current stream of a GPU as CUDA's number, by the faster of two torch queries."""
    return int(torch._C._cuda_getCurrentRawStream(gpu))


def capturing() -> bool:
    """Returns whether the current stream is recording a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


def reached() -> torch.cuda.Event:
    """Returns an event that completes when all work launched on the current stream is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def elsewhere(make: Callable[..., T], *arguments: Any) -> T:
    """Runs make(*arguments) in a new thread, on the caller's current stream; returns its result.

    While torch warms up a CUDA graph, allocations of the thread that does so belong to the graph;
    allocations of another thread do not.
    """
    here = torch.cuda.current_stream() if available() else None

    def run() -> T:
        with torch.cuda.stream(here):
            return make(*arguments)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def follow(event: torch.cuda.Event, read: Sequence[torch.Tensor]) -> None:
    """Makes the current stream wait for `event`, and marks the tensors `read` as used on it.

    The host does not wait.
    """
    here = torch.cuda.current_stream()
    here.wait_event(event)
    for x in read:
        x.record_stream(here)


def sm_count(device: torch.device) -> int:
    """Returns the GPU's number of SMs; cached for a device with an index.

    Every launch asks for it, and no tracer sees these calls, so this cache is used always.
    """
    if device.index is None:
        return int(_properties(device).multi_processor_count)
    return _remembered_sm_count(device)


@functools.cache
def _remembered_sm_count(device: torch.device) -> int:
    return int(_properties(device).multi_processor_count)


def name(device: torch.device) -> str:
    return str(_properties(device).name)


def _properties(device: torch.device) -> Any:
    """Returns torch's properties of the device, from a cache if possible.

    torch caches them too, but its lookup takes as long as a launch. The cache is not used for
    "cuda" without an index, which means the current GPU, nor while Dynamo traces: Dynamo treats
    torch's own call as a constant, but does not look into caches.
    """
    if device.index is None or torch.compiler.is_compiling():
        return torch.cuda.get_device_properties(device)
    return _remembered_properties(device)


@functools.cache
def _remembered_properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


@functools.cache
def driver() -> str | None:
    """Returns the NVIDIA driver's release, such as 580.65.06; None if there is no driver."""
    try:  # "NVRM version: NVIDIA UNIX ... Kernel Module  580.65.06  Release Build ..."
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        words = []
    release = next((w for w in words if w[0].isdigit() and "." in w), None)
    return release or _driver_from_nvidia_smi()


def _driver_from_nvidia_smi() -> str | None:
    """Returns nvidia-smi's driver release, or None; for containers that hide /proc/driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    releases = done.stdout.split()
    return releases[0] if releases else None
