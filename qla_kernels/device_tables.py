"""Tables that kernels read and that the host knows: made once, kept, and safe to be read later.

A cache of device tensors has to answer four questions:

    another stream    The table is filled on the stream that was current when it was made. Each
                      other stream waits for that, once, before it reads, and the allocator is told
                      of it, so that a table that the cache drops is not overwritten while it reads.
    a CUDA graph      A graph reads a table at each replay and holds no reference. What a capture
                      reads is therefore held until the process ends. Only captures add to that,
                      each table once, and a graph with its memory takes far more than its tables. A
                      capture cannot wait for work outside it; `torch.cuda.graph` waits for the
                      device before it begins.
    a first use       In a capture a missing table is filled by launches that the graph records: no
    in a capture      copy from the host, which would read memory that is gone at a replay. The
                      memory is the graph's, so the table is not kept. Such a graph makes its table
                      at every replay: call once before the capture.
    a warm-up         While torch warms up a graph, what its thread allocates belongs to the graph,
                      and is overwritten later. Tables are therefore made by a thread of their own.

All functions here are called where the tables' GPU is the current one, as in `device.of`.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from qla_kernels import device

T = TypeVar("T")
P = ParamSpec("P")
Made = TypeVar("Made", Tensor, tuple[Tensor, ...])

_read_by_graphs: set[object] = set()


class Kept(Generic[T]):
    """`value`, whose `buffers` were filled on the current stream, outside of a capture."""

    __slots__ = ("_buffers", "_filled", "_gpu", "_streams", "_value")

    def __init__(self, value: T, *buffers: Tensor) -> None:
        self._value, self._buffers = value, buffers
        self._gpu = buffers[0].get_device()  # -1 for CPU tensors
        if self._gpu >= 0:
            self._streams = {device.stream(self._gpu)}
            self._filled = device.reached()

    def here(self) -> T:
        """The value, to be read on the current stream."""
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
    """Of a function of (device, ...) that makes tensors: remember so many of its results.

    The oldest is dropped for a new one.
    """

    def of(make: Callable[P, Made]) -> Callable[P, Made]:
        known: dict[object, Kept[Made]] = {}
        lock = threading.Lock()

        @functools.wraps(make)
        def table(*key: P.args, **none: P.kwargs) -> Made:
            found = known.get(key)
            if found is not None:
                return found.here()
            on_gpu = key[0].type == "cuda"  # type: ignore[attr-defined]
            if on_gpu and device.capturing():
                return make(*key, **none)
            with lock:
                made = device.elsewhere(make, *key) if on_gpu else make(*key, **none)
                while len(known) >= most:
                    del known[next(iter(known))]
                known[key] = Kept(made, *(made if isinstance(made, tuple) else (made,)))
            return made

        return table

    return of


def numbers(rows: Sequence[Sequence[int]], on: torch.device) -> Tensor:
    """int32 [rows, columns] of what the host knows; the host does not wait for a copy."""
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
