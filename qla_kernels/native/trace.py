"""Runs launch code on placeholders, and returns its call as a form: a program in which T is open.

The launcher notes the launches of placeholders and does none of them. Every number of the call,
such as a size, an offset or an argument, leads back to a node of a program that computes it from T
(symbols.py). forms.c evaluates these for a call with another T.
"""

from collections.abc import Callable, Iterable, Sequence
from struct import pack, unpack
from typing import Any

import torch
from torch import Tensor

from qla_kernels.native.memory import copy_of
from qla_kernels.native.placeholders import ALIGNMENT, Placeholder, Size, contiguous
from qla_kernels.native.recording import (
    ALIGN,
    COPY,
    FILL,
    LAUNCH,
    WAIT,
    NotRecordable,
    Place,
    Program,
    activate,
    tensors_in,
)
from qla_kernels.native.symbols import Decided, Number, Numbers, followed


class Trace:
    """What a call did with placeholders, in the terms of recorder.Recorder."""

    def __init__(self, native: Any, arguments: Sequence[object], tokens: Sequence[int]) -> None:
        self.native, self.arguments = native, arguments
        self.events: list[tuple[Any, ...]] = []
        self.held: list[Any] = []
        self.rooms: list[Placeholder] = []
        self.constants: list[Tensor] = []
        self.inputs = list(tensors_in(arguments))
        first = arguments[tokens[0]]
        assert isinstance(first, Tensor)
        self.gpu, self.numbers = first.get_device(), Numbers(first.shape[1])
        open_ones = {id(arguments[i]) for i in tokens}
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
        if is_open and x.dim() > 1 and shape[1] == tokens.value:  # as `see_tokens` of programs.c
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

    def given(self, values: Iterable[Any]) -> list[Any]:
        """Returns the call's arguments, with placeholders for tensors."""
        return [
            type(x)(self.given(x))
            if isinstance(x, list | tuple)
            else self._known[id(x)]
            if isinstance(x, Tensor)
            else x
            for x in values
        ]

    def keep(self, x: Tensor) -> Any:
        """Returns the placeholder of a tensor that never changes."""
        if id(x) not in self._known:
            place = Place("constant", len(self.constants))
            self.constants.append(x)
            begin, of = x.data_ptr() % ALIGNMENT, (x.dtype, x.device, x.shape, x.stride())
            made = Placeholder(self, place, *of, begin=begin)
            self._known[id(x)] = made
        return self._known[id(x)]

    def refuse(self, problem: str) -> None:
        raise NotRecordable(problem)

    def room(self, shape: Sequence[Size], dtype: torch.dtype, on: torch.device) -> Placeholder:
        place = Place("room", len(self.rooms))
        self.rooms.append(Placeholder(self, place, dtype, on, shape, contiguous(shape)))
        return self.rooms[-1]

    def code(
        self, run: Callable[[list[Any]], Sequence[Any]], recorded: Program
    ) -> tuple[bytes, tuple[Decided, ...]]:
        """Calls `run` with the placeholders; returns the recorded program's code, and its tables.

        Numbers are in the order in which forms.c reads them. Raises NotRecordable if there is none.
        """
        try:
            activate(self)
            self.native.record(self.events, max(0, self.gpu))
            with followed(self.numbers):
                results = run(self.given(self.arguments))
        except NotRecordable:
            raise
        except Exception as error:  # of whatever else is done with a tensor
            raise NotRecordable(f"{type(error).__name__}: {error}") from error
        finally:
            self.native.record(None, -1)
            activate(None)
        outputs = [x for x in results if x is not None]
        if any(type(x) is not Placeholder for x in outputs):
            raise NotRecordable("a result of unknown origin")
        size, bases = self._bases(outputs)
        steps = [self._step(event, bases) for event in self.events]
        if [step[:3] for step in steps] != [(x[0], x[2], _kernel(x)) for x in recorded.steps]:
            raise NotRecordable("placeholders took another way than tensors")
        numbers = [size, *(n for x in outputs for n in x.shape)]
        numbers += [n for *_, found in steps for n in found]
        places = [self.numbers.place(n) for n in numbers]
        nodes = [n for node in self.numbers.nodes for n in node]
        code = [len(self.numbers.nodes), *nodes, *places]
        return pack(f"{len(code)}q", *code), tuple(self.numbers.tables)

    def _bases(self, outputs: list[Placeholder]) -> tuple[Size, dict[Place, tuple[int, Size]]]:
        """Returns the size of the workspace, and base and offset of each place, as a Recorder."""
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
        self, event: tuple[Any, ...], bases: dict[Place, tuple[int, Size]]
    ) -> tuple[int, tuple[int, ...], Any, list[Size]]:
        """Returns kind and bases of a step, the kernel of a launch, and the step's numbers."""
        kind, _, *others = event
        if kind == WAIT:
            return WAIT, (), None, []
        given = {FILL: others[:1], COPY: others}.get(kind, others[0])
        tensors: list[Any] = [x for x in given if type(x) is Placeholder]
        at = tuple(bases[x.place][0] for x in tensors)
        found = [bases[x.place][1] + x.bytes_into() for x in tensors]
        if kind == FILL:
            found.append(tensors[0].numel() * tensors[0].element_size())
        elif kind == COPY:
            found += copy_of(*tensors)
        else:
            found += [n for x in tensors for n in (*x.shape, *x.stride())]
            found += [n for x in given if type(x) is not Placeholder for n in scalar(x)]
            return LAUNCH, at, kind, found
        return kind, at, None, found


def _kernel(step: tuple[Any, ...]) -> Any:
    """Returns the kernel of a step of a Program, if it is a launch."""
    kind, *_, what = step
    return what[0] if kind == LAUNCH else None


def scalar(x: Any) -> tuple[Size, int]:
    """Returns x as a whole number, and the bits of x as fp32; 0 for what it is not."""
    if isinstance(x, Number):
        return x, 0
    if not isinstance(x, int | float):
        raise NotRecordable(f"an argument of type {type(x).__name__}")
    return x if isinstance(x, int) else 0, unpack("i", pack("f", x))[0]
