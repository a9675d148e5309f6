"""Caches of device tensors that the host computes, safe across streams and CUDA graphs.

Four cases need care:

    another stream    A table is filled on the stream that was current when it was made. Each other
                      stream waits for that once, before it first reads the table, and the allocator
                      is told of the stream, so that the memory of a table that the cache drops is
                      not reused while the stream reads it.
    a CUDA graph      A graph reads a table at each replay but holds no reference to it. Tables that
                      a capture reads from the cache are therefore kept until the process ends. Only
                      captures add to these, each table once, and a graph with its memory takes far
                      more than its tables. A capture cannot wait for work outside it;
                      `torch.cuda.graph` waits for the device before it begins.
    a first use       In a capture a missing table is filled by launches that the graph records. A
    in a capture      copy from the host would read memory that is gone at a replay. The memory is
                      the graph's, so the table is not cached. Such a graph makes its table at every
                      replay; to avoid that, call once before the capture.
    a warm-up         While torch warms up a graph, allocations of its thread belong to the graph
                      and are overwritten later. `kept` therefore makes tables in a thread of its
                      own, where no mode of torch, such as a test's, sees them.

Call all functions here while the tables' GPU is the current one, as inside `device.of`.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from qla_kernels.runtime import device
from qla_kernels.runtime.native import recording

T = TypeVar("T")
P = ParamSpec("P")
Made = TypeVar("Made", Tensor, tuple[Tensor, ...])

_read_by_graphs: set[object] = set()


class Kept(Generic[T]):
    """A value whose `buffers` were filled on the current stream, outside of a capture."""

    __slots__ = ("_buffers", "_filled", "_gpu", "_streams", "_value")

    def __init__(self, value: T, *buffers: Tensor) -> None:
        self._value, self._buffers = value, buffers
        self._gpu = buffers[0].get_device()  # -1 for CPU tensors
        if self._gpu >= 0:
            self._streams = {device.stream(self._gpu)}
            self._filled = device.reached()

    def here(self) -> T:
        """Returns the value, to be read on the current stream.

        A stream other than the one that filled the buffers waits for them before its first read.
        During a capture, the value is kept until the process ends instead.
        """
        if self._gpu >= 0:
            stream = device.stream(self._gpu)
            if stream != device.DEFAULT_STREAM or stream not in self._streams:
                self._read_on(stream)
        return self._value

    def _read_on(self, stream: int) -> None:
        if device.capturing():
            _read_by_graphs.add(self)
        elif stream not in self._streams:
            device.follow(self._filled, self._buffers)
            self._streams.add(stream)


def kept(most: int) -> Callable[[Callable[P, Made]], Callable[P, Made]]:
    """Returns a decorator that caches up to `most` results of a function of (device, ...).

    The function returns a tensor or a tuple of tensors; its arguments are the cache's key. The
    oldest result is dropped for a new one. Results made during a capture are not cached.
    """

    def of(make: Callable[P, Made]) -> Callable[P, Made]:
        known: dict[object, Kept[Made]] = {}
        lock = threading.Lock()

        @functools.wraps(make)
        def table(*key: P.args, **none: P.kwargs) -> Made:
            found = known.get(key)
            if found is not None:
                return recording.constant(found.here())
            on_gpu = key[0].type == "cuda"  # type: ignore[attr-defined]
            if on_gpu and device.capturing():
                return make(*key, **none)
            with lock:
                made = device.elsewhere(make, *key)
                while len(known) >= most:
                    del known[next(iter(known))]
                known[key] = Kept(made, *(made if isinstance(made, tuple) else (made,)))
            return recording.constant(made)

        return table

    return of


def numbers(rows: Sequence[Sequence[int]], on: torch.device) -> Tensor:
    """Returns an int32 tensor [rows, columns] of host numbers on device `on`.

    The host does not wait for a copy. During a capture the tensor is filled by launches.
    """
    host = torch.tensor(rows, dtype=torch.int32, device="cpu")
    if on.type != "cuda":
        return host.to(on)
    if not device.capturing():
        return host.pin_memory().to(on, non_blocking=True)
    there = torch.zeros(host.numel(), dtype=torch.int32, device=on)
    for place, number in enumerate(host.flatten().tolist()):
        if number:  # an argument of a launch: the graph has a copy
            there[place].fill_(number)
    return there.view(host.shape)
