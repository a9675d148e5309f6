"""What launch code tells while its call is recorded, and what a recording becomes.

A Trace (trace.py) runs launch code on placeholders, and returns a form, a program for any number of
tokens. Calls that have no form are recorded: a Recorder (recorder.py) watches one.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

LAUNCH, WAIT, FILL, COPY = range(4)  # steps; programs.c has the same
ALIGN = 256  # bytes, of the parts of a workspace

_thread = threading.local()

Made = TypeVar("Made", Tensor, tuple[Tensor, ...])


class NotRecordable(Exception):
    """The call did something that a program cannot repeat."""


class Place(NamedTuple):
    """Memory that a tensor lies in."""

    kind: str  # input, room, constant, or host
    number: int


class Program(NamedTuple):
    """The arguments of `store` of programs.c, from the third on: a program for one T."""

    outputs: tuple[Tensor, ...]
    results: tuple[int, ...]
    workspace: int
    constants: tuple[Tensor, ...]
    other_stream: int
    steps: tuple[tuple[Any, ...], ...]
    held: object


class Form(NamedTuple):
    """The arguments of `open_form` of programs.c, from the third on: a program with T open."""

    outputs: tuple[Tensor, ...]  # of their dtypes and numbers of axes
    results: tuple[int, ...]
    constants: tuple[Tensor, ...]
    other_stream: int
    steps: tuple[tuple[Any, ...], ...]
    held: object
    code: bytes
    tables: tuple[Any, ...]


class Recording(Protocol):
    """A Recorder, or a Trace."""

    events: list[tuple[Any, ...]]
    held: list[Any]

    def keep(self, x: Tensor) -> Tensor: ...

    def refuse(self, problem: str) -> None: ...


def active() -> Recording | None:
    """Returns the recorder of this thread, if a call is being recorded."""
    return getattr(_thread, "recorder", None)


def activate(recording: Recording | None) -> None:
    """Makes `recording` this thread's recorder, or none."""
    _thread.recorder = recording


def note_wait(stream: Any, other: Any) -> None:
    """Tells the recorder, if any, that `stream` now waits for `other`."""
    if (recorder := active()) is not None:
        recorder.events.append((WAIT, stream.cuda_stream, other.cuda_stream))
        recorder.held.append((stream, other))


def noting(kernel: str, launch: Callable[..., None]) -> Callable[..., None]:
    """Returns `launch`, TileLang's of a kernel, which a program cannot repeat; tells recorders."""

    def run(*arguments: Any) -> None:
        if (recorder := active()) is not None:
            recorder.refuse(f"{kernel} is not prebuilt")
        launch(*arguments)

    return run


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
    """Tells the recorder, if any, that these tensors never change; returns what stands for them."""
    if (recorder := active()) is None:
        return tensors
    if isinstance(tensors, Tensor):
        return recorder.keep(tensors)
    kept = map(recorder.keep, tensors)
    return type(tensors)(*kept) if hasattr(tensors, "_fields") else tuple(kept)


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Yields the tensors among values, in order, and those of lists and tuples among them."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from tensors_in(x)
