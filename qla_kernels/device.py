"""The only file that asks questions of torch.cuda, and only when called."""

import functools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def available() -> bool:
    """Whether there is a GPU that torch can use."""
    return torch.cuda.is_available()


def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor): (9, 0) is Hopper."""
    found = _properties(device)
    return found.major, found.minor


class of:
    """Where kernels are launched: `with device.of(x)`.

    x's GPU becomes the current one, unless x is a CPU tensor. And autograd does not look on: it
    takes as long over a view as the view itself, even where nothing has a gradient. Tensors made
    here have none, and what is written here counts as no change of a tensor.
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
    """Launches that may run beside each other, on x's GPU: `with fork(x) as aside`.

    What is launched within `with aside` runs on a second stream: after all that was launched before
    the block, before all that follows it, and beside the rest of the block. Results of `aside` are
    to be allocated before the block: memory then belongs to the caller's stream, which waits for
    the second one, and torch's allocator need not know of it. A CUDA graph captures both branches.
    """
    if not x.is_cuda:
        yield nullcontext()
        return
    here = torch.cuda.current_stream(x.device)
    second = _second_stream(here)
    second.wait_stream(here)
    try:
        yield torch.cuda.stream(second)
    finally:
        here.wait_stream(second)


@functools.lru_cache(maxsize=64)
def _second_stream(first: torch.cuda.Stream) -> torch.cuda.Stream:
    """One for each: where one is captured, its second is too, until the capture ends.

    Kept, because torch hands its few streams out in turn, and a new one could be anybody's.
    """
    while True:
        second: torch.cuda.Stream = torch.cuda.Stream(first.device)  # type: ignore[no-untyped-call]
        if second != first:
            return second


DEFAULT_STREAM = 0  # as `stream` has it; it cannot be captured


def stream(gpu: int) -> int:
    """The current stream of a GPU, as CUDA's number: of the two ways to ask the quick one."""
    return int(torch._C._cuda_getCurrentRawStream(gpu))


def capturing() -> bool:
    """Whether the current stream records a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


def reached() -> torch.cuda.Event:
    """An event at which all is done that was launched on the current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def elsewhere(make: Callable[..., T], *arguments: Any) -> T:
    """`make(*arguments)` on the current stream, by a thread of its own.

    While torch warms up a graph, what the thread that does so allocates belongs to the graph.
    """
    here = torch.cuda.current_stream()

    def run() -> T:
        with torch.cuda.stream(here):
            return make(*arguments)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def follow(event: torch.cuda.Event, read: Sequence[torch.Tensor]) -> None:
    """The current stream waits for an event, the host does not, and then reads these tensors."""
    here = torch.cuda.current_stream()
    here.wait_event(event)
    for x in read:
        x.record_stream(here)


def sm_count(device: torch.device) -> int:
    """Every launch asks, and no tracer sees it: remembered by itself."""
    if device.index is None:
        return int(_properties(device).multi_processor_count)
    return _remembered_sm_count(device)


@functools.cache
def _remembered_sm_count(device: torch.device) -> int:
    return int(_properties(device).multi_processor_count)


def name(device: torch.device) -> str:
    return str(_properties(device).name)


def _properties(device: torch.device) -> Any:
    """torch remembers them, but finding its way there takes as long as a launch.

    Not by heart for "cuda", which is whichever GPU is the current one, nor while Dynamo traces: it
    takes what torch says as constants, and does not look into caches.
    """
    if device.index is None or torch.compiler.is_compiling():
        return torch.cuda.get_device_properties(device)
    return _remembered_properties(device)


@functools.cache
def _remembered_properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


@functools.cache
def driver() -> str | None:
    """The NVIDIA driver's release, such as 580.65.06; None where there is no driver."""
    try:  # "NVRM version: NVIDIA UNIX ... Kernel Module  580.65.06  Release Build ..."
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        words = []
    release = next((w for w in words if w[0].isdigit() and "." in w), None)
    return release or _driver_from_nvidia_smi()


def _driver_from_nvidia_smi() -> str | None:
    """Containers may hide /proc/driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    releases = done.stdout.split()
    return releases[0] if releases else None
