"""Records what one call does on the GPU, as a program for programs.c.

The call runs as usual, under a dispatch mode that sees each ATen operator. The mode follows every
tensor to what it is part of, by identity and through views, not by address: inputs may be slices
of one tensor. The launcher notes the launches of the thread meanwhile, and `device.fork` the waits
between streams. A call that does anything else on the GPU, or reads a value back, has no program.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qla_kernels.runtime.native.memory import COPIES, FILLS, can_copy, copy_of, word
from qla_kernels.runtime.native.recording import (
    ALIGN,
    COPY,
    FILL,
    LAUNCH,
    WAIT,
    NotRecordable,
    Place,
    Program,
    activate,
    numbered,
    tensors_in,
)

ROOM = frozenset(("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"))
MADE = frozenset(("arange",))  # of numbers alone: the result is kept with the program


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, follows tensors and notes launches.

    Attributes:
        events: in order, launches as (entry, stream, arguments), which the launcher appends, waits
            as (WAIT, stream, other), fills as (FILL, stream, tensor, value), and copies as
            (COPY, stream, destination, source).
        held: what has to live as long as the program, and tensors whose identity is remembered.
    """

    def __init__(self, native: Any, arguments: Sequence[object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.native = native
        self.events: list[tuple[Any, ...]] = []
        self.held: list[Any] = []
        self.inputs = list(tensors_in(arguments))
        self.rooms: list[Tensor] = []
        self.constants: list[Tensor] = []
        self._places: dict[int, Place] = {}
        self._problem: str | None = None
        for i, x in enumerate(self.inputs):
            if id(x) not in self._places:
                self._places[id(x)] = Place("input", i)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Says that Dynamo need not be kept out, for which torch would import it: 2 s.

        A call that Dynamo compiles is not recorded.
        """
        return False

    def __enter__(self) -> "Recorder":
        super().__enter__()  # type: ignore[no-untyped-call]
        activate(self)
        self.native.record(self.events, -1)
        return self

    def __exit__(self, *error: Any) -> None:
        self.native.record(None, -1)
        activate(None)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        sources = list(tensors_in((*args, *(kwargs or {}).values())))
        self.held += sources
        for x in tensors_in((out,)):
            self.held.append(x)
            if self._fills(x, name, args) or self._copies(x, name, args):
                continue
            if func._schema.is_mutable or not self._follow(x, name, sources):
                self._problem = self._problem or str(func)
        is_number = not isinstance(out, Tensor | list | tuple)
        if is_number and any(self._place(x).kind != "host" for x in sources):  # it was read back
            self._problem = self._problem or str(func)
        return out

    def _fills(self, x: Tensor, name: str, args: Sequence[Any]) -> bool:
        """Notes an operator that sets all numbers of x to one; returns whether it is one."""
        if name not in FILLS:
            return False
        value = args[FILLS[name]] if FILLS[name] else 0
        if isinstance(value, Tensor) or not x.is_contiguous():
            return False
        bits = word(value, x.dtype)
        if bits is None:
            return False
        if not name.endswith("_"):
            self._new_room(x)
        if x.numel():
            self.events.append((FILL, self._current_stream(), x, bits))
        return self._place(x).kind == "room"

    def _copies(self, x: Tensor, name: str, args: Sequence[Any]) -> bool:
        """Notes a copy to x that memory.py describes; returns whether it is one."""
        if name not in COPIES or x.is_cpu != args[0].is_cpu:
            return False
        source = args[COPIES[name]]
        if source.device != x.device or not can_copy(source, x):
            return False
        if name != "copy_":
            if id(x) in self._places:
                return True
            if not x.is_contiguous():
                return False
            self._new_room(x)
        if x.numel():
            self.events.append((COPY, self._current_stream(), x, source))
        return self._place(x).kind == "room"

    def _new_room(self, x: Tensor) -> None:
        self._places[id(x)] = Place("room", len(self.rooms))
        self.rooms.append(x)

    def keep(self, x: Tensor) -> Tensor:
        if id(x) in self._places:
            return x
        self._places[id(x)] = Place("constant", len(self.constants))
        self.constants.append(x)
        self.held.append(x)
        return x

    def refuse(self, problem: str) -> None:
        """Says that the call has no program."""
        self._problem = self._problem or problem

    def _place(self, x: Tensor) -> Place:
        return self._places.get(id(x), Place("unknown", 0))

    def _follow(self, x: Tensor, name: str, sources: Sequence[Tensor]) -> bool:
        """Notes where x, the result of an operator, lies; returns whether a program can have it."""
        if id(x) in self._places:
            return True
        for source in sources:
            if id(source) in self._places and _shares(x, source):
                self._places[id(x)] = self._places[id(source)]
                return True
        if name in ROOM:
            self._new_room(x)
        elif not sources and name in MADE:
            self.keep(x)
        elif all(self._is_of_host(source) for source in sources):
            if x.is_cuda:  # it follows from numbers in the key
                self.keep(x)
            else:
                self._places[id(x)] = Place("host", 0)
        else:
            return False
        return True

    def _is_of_host(self, x: Tensor) -> bool:
        place = self._place(x)
        return place.kind == "host" or (
            place.kind == "input" and x.device.type == "cpu" and not x.is_floating_point()
        )

    def program(self, results: Sequence[Tensor | None]) -> Program:
        """Returns the program, for a call with these results; NotRecordable if there is none."""
        if self._problem is not None:
            raise NotRecordable(self._problem)
        outputs: list[Tensor] = []
        at: list[int] = []
        bases: dict[Place, tuple[int, int]] = {
            Place("input", i): (i, 0) for i in range(len(self.inputs))
        }
        for x in results:
            at.append(-1 if x is None else len(outputs))
            if x is not None:
                place = self._place(x)
                if place.kind != "room" or not _is_whole(x, self.rooms[place.number]):
                    raise NotRecordable("a result that is not a contiguous tensor of its own")
                if place in bases:
                    raise NotRecordable("two results in one tensor")
                bases[place] = len(self.inputs) + len(outputs), 0
                outputs.append(x)
        first_free = len(self.inputs) + len(outputs)
        size = 0
        for i, room in enumerate(self.rooms):
            if Place("room", i) not in bases:
                bases[Place("room", i)] = first_free, size
                size += -(-room.untyped_storage().nbytes() // ALIGN) * ALIGN
        for i in range(len(self.constants)):
            bases[Place("constant", i)] = first_free + 1 + i, 0
        streams = numbered(self._current_stream(), self.events)
        steps = tuple(self._step(event, streams, bases) for event in self.events)
        other = next((stream for stream, number in streams.items() if number == 1), 0)
        held = (*self.constants, self._streams_held(), *(event[0] for event in self.events))
        constants = tuple(self.constants)
        return Program(tuple(outputs), tuple(at), size, constants, other, steps, held)

    def _streams_held(self) -> list[Any]:
        return [x for x in self.held if not isinstance(x, Tensor)]

    def _current_stream(self) -> int:
        gpu = next((x for x in self.inputs if x.is_cuda), None)
        return 0 if gpu is None else int(torch._C._cuda_getCurrentRawStream(gpu.get_device()))

    def _step(
        self,
        event: tuple[Any, ...],
        streams: dict[int, int],
        bases: dict[Place, tuple[int, int]],
    ) -> tuple[Any, ...]:
        kind, stream, *others = event
        on = streams[stream]
        if kind == WAIT:
            return WAIT, on, (), (), (streams[others[0]],)
        if kind == FILL:
            x, bits = others
            return FILL, on, *self._addresses((x,), bases), (bits, x.numel() * x.element_size())
        if kind == COPY:
            return COPY, on, *self._addresses(others, bases), copy_of(*others)
        (arguments,) = others
        return LAUNCH, on, *self._addresses(arguments, bases), (kind, arguments)

    def _addresses(
        self, values: Iterable[object], bases: dict[Place, tuple[int, int]]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the bases and offsets of the tensors among values."""
        at, offsets = [], []
        for x in values:
            if isinstance(x, Tensor):
                place = self._place(x)
                if place not in bases:
                    raise NotRecordable(f"a tensor of unknown origin, {place.kind}")
                base, begin = bases[place]
                at.append(base)
                offsets.append(begin + self._bytes_into(x, place))
        return tuple(at), tuple(offsets)

    def _bytes_into(self, x: Tensor, place: Place) -> int:
        """Returns how far x begins behind the tensor of its place."""
        if not x.numel():
            return 0
        whole = {"input": self.inputs, "room": self.rooms, "constant": self.constants}[place.kind]
        return _begin(x) - _begin(whole[place.number])


def _begin(x: Tensor) -> int:
    return int(x.storage_offset()) * x.element_size()


def _shares(x: Tensor, y: Tensor) -> bool:
    """Returns whether x is y or a view of it, whatever operator made it."""
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)


def _is_whole(x: Tensor, room: Tensor) -> bool:
    return (
        x.is_contiguous() and x.storage_offset() == room.storage_offset()
        and x.numel() * x.element_size() == room.numel() * room.element_size()
    )  # fmt: skip
