"""What launch code tells while it is traced, and what that becomes: a program.

A Trace (trace.py) runs launch code on placeholders, and returns a program for any number of tokens.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

LAUNCH, WAIT, FILL, COPY = range(4)  # steps; programs.c has the same
ALIGN = 256  # bytes, of the parts of a workspace

_thread = threading.local()

Made = TypeVar("Made", Tensor, tuple[Tensor, ...])


class NotRecordable(Exception):
    """The call does something that a program cannot repeat."""


class Place(NamedTuple):
    """Memory that a tensor lies in."""

    kind: str  # input, room or constant
    number: int


class Program(NamedTuple):
    """The arguments of `store` of programs.c, from the third on."""

    outputs: tuple[Tensor, ...]  # of their dtypes and numbers of axes
    results: tuple[int, ...]
    constants: tuple[Tensor, ...]
    other_stream: int
    steps: tuple[tuple[Any, ...], ...]
    written: int  # bits: inputs that the call overwrites
    held: object
    code: bytes
    tables: tuple[Any, ...]


class Tracing(Protocol):
    """A Trace."""

    events: list[tuple[Any, ...]]
    held: list[Any]

    def keep(self, x: Tensor) -> Tensor: ...

    def overwrite(self, x: Tensor) -> None: ...

    def refuse(self, problem: str) -> None: ...


def active() -> Tracing | None:
    """Returns the trace of this thread, if launch code is being traced."""
    return getattr(_thread, "trace", None)


def activate(trace: Tracing | None) -> None:
    """Makes `trace` this thread's trace, or none."""
    _thread.trace = trace


def note_wait(stream: Any, other: Any) -> None:
    """Tells the trace that `stream` now waits for `other`."""
    if (trace := active()) is not None:
        trace.events.append((WAIT, stream.cuda_stream, other.cuda_stream))
        trace.held.append((stream, other))


def noting(kernel: str, launch: Callable[..., None]) -> Callable[..., None]:
    """Returns `launch`, TileLang's of a kernel, which a program cannot repeat; tells traces."""

    def run(*arguments: Any) -> None:
        if (trace := active()) is not None:
            trace.refuse(f"{kernel} is not prebuilt")
        launch(*arguments)

    return run


def overwritten(*tensors: Tensor | None) -> None:
    """Counts a write to each of these arguments of the call, as torch does for its operators.

    Autograd then refuses a backward that has saved an earlier version of the tensor.
    """
    trace = active()
    for x in tensors:
        if x is not None and trace is not None:
            trace.overwrite(x)
        elif x is not None:
            torch.autograd.graph.increment_version(x)


def numbered(here: int, events: Iterable[tuple[Any, ...]]) -> dict[int, int]:
    """Numbers the streams of all events: 0 is the caller's, 1 another."""
    numbers = {here: 0}
    for kind, stream, what, *_ in events:
        for x in (stream, what) if kind == WAIT else (stream,):
            numbers.setdefault(x, len(numbers))
    if len(numbers) > 2:
        raise NotRecordable("more than two streams")
    return numbers


def constant(tensors: Made) -> Made:
    """Tells the trace that these tensors never change; returns what stands for them."""
    if (trace := active()) is None:
        return tensors
    if isinstance(tensors, Tensor):
        return trace.keep(tensors)
    kept = map(trace.keep, tensors)
    return type(tensors)(*kept) if hasattr(tensors, "_fields") else tuple(kept)


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Yields the tensors among values, in order, and those of lists and tuples among them."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from tensors_in(x)
