"""Runs launch code on placeholders, and returns its call as a program, in which T may be open.

The launcher notes the launches of placeholders and does none of them. Every number of the call,
such as a size, an offset or an argument, leads back to a node of a program that computes it from T
(symbols.py). forms.c evaluates these for a call with another T.
"""

from collections.abc import Callable, Sequence
from struct import pack, unpack
from typing import Any

import torch
from torch import Tensor

from qla_kernels.runtime.native.memory import copy_of
from qla_kernels.runtime.native.placeholders import ALIGNMENT, Placeholder, Size, contiguous
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
from qla_kernels.runtime.native.symbols import Number, Numbers, followed


class Trace:
    """What a call does with placeholders.

    Attributes:
        events: in order, launches as (entry, stream, arguments), which the launcher appends, waits
            as (WAIT, stream, other), fills as (FILL, stream, tensor, value), and copies as
            (COPY, stream, destination, source).
        held: what has to live as long as the program.
    """

    def __init__(self, native: Any, arguments: Sequence[object], tokens: Sequence[int]) -> None:
        self.native = native
        self.events: list[tuple[Any, ...]] = []
        self.held: list[Any] = []
        self.rooms: list[Placeholder] = []
        self.constants: list[Tensor] = []
        self.inputs = list(tensors_in(arguments))
        self.written = 0
        self.gpu = next((x.get_device() for x in self.inputs if x.is_cuda), -1)
        with_tokens = [x for i in tokens if isinstance(x := arguments[i], Tensor) and x.dim() > 1]
        self.numbers = Numbers(with_tokens[0].shape[1] if with_tokens else 0)
        open_ones = set(map(id, with_tokens))
        self._known: dict[int, Any] = {}
        for i, x in enumerate(self.inputs):
            if id(x) not in self._known:
                self._known[id(x)] = self._of_input(i, x, id(x) in open_ones)

    def _of_input(self, i: int, x: Tensor, is_open: bool) -> Any:
        """Returns a placeholder for an input; numbers of the host are read as they are."""
        if self.is_of_host(x):
            return x
        shape, strides = list[Size](x.shape), list[Size](x.stride())
        tokens: Any = self.numbers.tokens
        if is_open and shape[1] == tokens.value:  # as `see_tokens` of programs.c
            if strides[0] == tokens.value * x.stride(1):
                strides[0] = tokens * x.stride(1)
            shape[1] = tokens
        at, wants = x.data_ptr() % ALIGNMENT, x.requires_grad
        of = x.dtype, x.device, shape, strides
        return Placeholder(self, Place("input", i), *of, begin=at, requires_grad=wants)

    @staticmethod
    def is_of_host(x: Tensor) -> bool:
        """Returns whether launch code may read the tensor's numbers."""
        return x.is_cpu and not x.is_floating_point()

    def given(self, x: Any) -> Any:
        """Returns x with placeholders for tensors, also for those in lists and tuples."""
        if isinstance(x, Tensor):
            return self._known.get(id(x), x)
        if not isinstance(x, list | tuple):
            return x
        parts = map(self.given, x)
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)

    def keep(self, x: Tensor) -> Any:
        """Returns the placeholder of a tensor that never changes."""
        if id(x) not in self._known:
            place = Place("constant", len(self.constants))
            self.constants.append(x)
            begin, of = x.data_ptr() % ALIGNMENT, (x.dtype, x.device, x.shape, x.stride())
            made = Placeholder(self, place, *of, begin=begin)
            self._known[id(x)] = made
        return self._known[id(x)]

    def overwrite(self, x: Any) -> None:
        """Notes that the call overwrites x, which is one of its arguments, or a room."""
        if type(x) is not Placeholder or x.place.kind == "constant":
            raise NotRecordable("a write to a tensor of unknown origin")
        if x.place.kind == "input":
            self.written |= 1 << x.place.number

    def refuse(self, problem: str) -> None:
        raise NotRecordable(problem)

    def room(self, shape: Sequence[Size], dtype: torch.dtype, on: torch.device) -> Placeholder:
        place = Place("room", len(self.rooms))
        self.rooms.append(Placeholder(self, place, dtype, on, shape, contiguous(shape)))
        return self.rooms[-1]

    def stream(self) -> int:
        """Returns torch's current stream, as the launcher notes it with each launch."""
        return int(torch._C._cuda_getCurrentRawStream(self.gpu)) if self.gpu >= 0 else 0

    def program(self, call: Callable[..., Sequence[Any]], *given: Any) -> Program:
        """Runs call(*given) on placeholders; returns the call's program.

        Raises NotRecordable if it has none. The trace is used up: placeholders refer to it, and
        the tensors that it refers to should not wait for the garbage collector.
        """
        try:
            return self._program(call, *given)
        finally:
            self.__dict__.clear()

    def _program(self, call: Callable[..., Sequence[Any]], *given: Any) -> Program:
        """Numbers of the code are in the order in which forms.c reads them."""
        here = self.stream()
        try:
            activate(self)
            self.native.note(self.events, max(0, self.gpu))
            with followed(self.numbers):
                results = call(*map(self.given, given))
        except NotRecordable:
            raise
        except Exception as error:  # of whatever else is done with a tensor
            raise NotRecordable(f"{type(error).__name__}: {error}") from error
        finally:
            self.native.note(None, 0)
            activate(None)
        outputs = self._outputs(results)
        size, bases = self._bases(outputs)
        streams = numbered(here, self.events)
        steps, numbers = [], [size, *(n for x in outputs for n in x.shape)]
        for event in self.events:
            step, of_step = self._step(event, streams, bases)
            steps.append(step)
            numbers += of_step
        places = [self.numbers.place(n) for n in numbers]
        nodes = [n for node in self.numbers.nodes for n in node]
        code = [len(self.numbers.nodes), *nodes, *places]
        alike = (torch.empty((0,) * x.dim(), dtype=x.dtype, device="cpu") for x in outputs)
        count = iter(range(len(outputs)))
        return Program(
            tuple(alike),
            tuple(-1 if x is None else next(count) for x in results),
            tuple(self.constants),
            next((stream for stream, number in streams.items() if number == 1), 0),
            tuple(steps),
            self.written,
            (*self.constants, *self.held, *(event[0] for event in self.events)),
            pack(f"{len(code)}q", *code),
            tuple(self.numbers.tables),
        )

    def _outputs(self, results: Sequence[Any]) -> list[Placeholder]:
        outputs: list[Placeholder] = [x for x in results if x is not None]
        if any(type(x) is not Placeholder for x in outputs):
            raise NotRecordable("a result of unknown origin")
        for x in outputs:
            room = self.rooms[x.place.number] if x.place.kind == "room" else None
            if room is None or not x.is_contiguous() or not x.fills(room):
                raise NotRecordable("a result that is not a contiguous tensor of its own")
        if len({x.place for x in outputs}) < len(outputs):
            raise NotRecordable("two results in one tensor")
        return outputs

    def _bases(self, outputs: list[Placeholder]) -> tuple[Size, dict[Place, tuple[int, Size]]]:
        """Returns the size of the workspace, and base and offset of each place."""
        bases: dict[Place, tuple[int, Size]]
        bases = {Place("input", i): (i, 0) for i in range(len(self.inputs))}
        bases |= {x.place: (len(self.inputs) + i, 0) for i, x in enumerate(outputs)}
        free, size = len(self.inputs) + len(outputs), 0
        for room in self.rooms:
            if room.place not in bases:
                bases[room.place] = free, size
                size = size + -(-room.numel() * room.element_size() // ALIGN) * ALIGN
        for i in range(len(self.constants)):
            bases[Place("constant", i)] = free + 1 + i, 0
        return size, bases

    def _step(
        self,
        event: tuple[Any, ...],
        streams: dict[int, int],
        bases: dict[Place, tuple[int, Size]],
    ) -> tuple[tuple[Any, ...], list[Size]]:
        """Returns a step as `store` of programs.c takes it, and the step's numbers."""
        kind, stream, *others = event
        on = streams[stream]
        if kind == WAIT:
            return (WAIT, on, (), streams[others[0]]), []
        given = {FILL: others[:1], COPY: others}.get(kind, others[0])
        tensors: list[Any] = [x for x in given if type(x) is Placeholder]
        at = tuple(bases[x.place][0] for x in tensors)
        found = [bases[x.place][1] + x.bytes_into() for x in tensors]
        if kind == FILL:
            found.append(tensors[0].numel() * tensors[0].element_size())
            return (FILL, on, at, others[1]), found
        if kind == COPY:
            return (COPY, on, at, None), [*found, *copy_of(*tensors)]
        found += [n for x in tensors for n in (*x.shape, *x.stride())]
        found += [n for x in given if type(x) is not Placeholder for n in scalar(x)]
        return (LAUNCH, on, at, kind), found


def scalar(x: Any) -> tuple[Size, int]:
    """Returns x as a whole number, and the bits of x as fp32; 0 for what it is not."""
    if isinstance(x, Number):
        return x, 0
    if not isinstance(x, int | float):
        raise NotRecordable(f"an argument of type {type(x).__name__}")
    return x if isinstance(x, int) else 0, unpack("i", pack("f", x))[0]
