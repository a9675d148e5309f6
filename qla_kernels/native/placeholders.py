"""Runs launch code on placeholders for tensors, and returns its call as a form: T is open in it.

A placeholder has sizes, strides and an offset, of which some are Numbers (symbols.py), and no
memory. It has the methods of a tensor that launch code calls on its way to a launch; any other one
raises, and the call then has no form. The launcher notes launches without launching.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from struct import pack, unpack
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from qla_kernels.native.memory import can_copy, copy_of
from qla_kernels.native.recorder import (
    ALIGN,
    COPY,
    FILL,
    LAUNCH,
    WAIT,
    NotRecordable,
    Place,
    Program,
    instead,
    tensors_in,
)
from qla_kernels.native.symbols import Number, Numbers, Steps, followed

Size: TypeAlias = Any  # a whole number, or a Number

ALIGNMENT = 16  # programs.c compares addresses modulo this; those of rooms are multiples


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
        if x.is_cpu and not x.is_floating_point():
            return x
        shape, strides = list[Size](x.shape), list[Size](x.stride())
        tokens: Any = self.numbers.tokens
        if is_open and x.dim() > 1 and shape[1] == tokens.value:  # as `see_tensor` of programs.c
            if strides[0] == tokens.value * x.stride(1):
                strides[0] = tokens * x.stride(1)
            shape[1] = tokens
        at, wants = x.data_ptr() % ALIGNMENT, x.requires_grad
        of = x.dtype, x.device, shape, strides
        return Placeholder(self, Place("input", i), *of, begin=at, requires_grad=wants)

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

    def room(self, shape: Sequence[Size], dtype: torch.dtype, on: torch.device) -> "Placeholder":
        place = Place("room", len(self.rooms))
        self.rooms.append(Placeholder(self, place, dtype, on, shape, contiguous(shape)))
        return self.rooms[-1]

    def code(
        self, run: Callable[[list[Any]], Sequence[Any]], recorded: Program
    ) -> tuple[bytes, tuple[Steps, ...]]:
        """Calls `run` with the placeholders; returns the recorded program's code, and its tables.

        Numbers are in the order in which forms.c reads them. Raises NotRecordable if there is none.
        """
        try:
            with instead(self), followed(self.numbers):
                self.native.record(self.events, max(0, self.gpu))
                results = run(self.given(self.arguments))
        except NotRecordable:
            raise
        except Exception as error:  # of whatever else is done with a tensor
            raise NotRecordable(f"{type(error).__name__}: {error}") from error
        finally:
            self.native.record(None, -1)
        outputs = [x for x in results if x is not None]
        if any(type(x) is not Placeholder for x in outputs):
            raise NotRecordable("a result of unknown origin")
        size, bases = self._bases(outputs)
        steps = [self._step(event, bases) for event in self.events]
        if [step[:2] for step in steps] != [(step[0], step[2]) for step in recorded.steps]:
            raise NotRecordable("placeholders took another way than tensors")
        numbers = [size, *(n for x in outputs for n in x.shape)]
        numbers += [n for _, _, found in steps for n in found]
        places = [self.numbers.place(n) for n in numbers]
        nodes = [n for node in self.numbers.nodes for n in node]
        code = [len(self.numbers.nodes), *nodes, *places]
        return pack(f"{len(code)}q", *code), tuple(self.numbers.tables)

    def _bases(self, outputs: list["Placeholder"]) -> tuple[Size, dict[Place, tuple[int, Size]]]:
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
    ) -> tuple[int, tuple[int, ...], list[Size]]:
        """Returns kind and bases of a step, and its numbers."""
        kind, _, *others = event
        if kind == WAIT:
            return WAIT, (), []
        given = {FILL: others[:1], COPY: others}.get(kind, others[0])
        tensors: list[Any] = [x for x in given if type(x) is Placeholder]
        found = [bases[x.place][1] + x.bytes_into() for x in tensors]
        if kind == FILL:
            found.append(tensors[0].numel() * tensors[0].element_size())
        elif kind == COPY:
            found += copy_of(*tensors)
        else:
            kind = LAUNCH
            found += [n for x in tensors for n in (*x.shape, *x.stride())]
            found += [n for x in given if type(x) is not Placeholder for n in scalar(x)]
        return kind, tuple(bases[x.place][0] for x in tensors), found


def scalar(x: Any) -> tuple[Size, int]:
    """Returns x as a whole number, and the bits of x as fp32; 0 for what it is not."""
    if isinstance(x, Number):
        return x, 0
    if not isinstance(x, int | float):
        raise NotRecordable(f"an argument of type {type(x).__name__}")
    return x if isinstance(x, int) else 0, unpack("i", pack("f", x))[0]


def contiguous(shape: Sequence[Size]) -> list[Size]:
    """Returns the strides of a contiguous tensor, as torch computes them."""
    strides: list[Size] = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * (shape[i] if shape[i] != 0 else 1)
    return strides


class Address:
    """Of a placeholder, of which only the place modulo ALIGNMENT is known."""

    def __init__(self, begin: Size) -> None:
        self._begin = begin

    def __mod__(self, n: int) -> Size:
        if ALIGNMENT % n:
            raise NotRecordable(f"an address modulo {n}")
        return self._begin % n


class Placeholder:
    """Stands for a tensor; `isinstance` takes it for one."""

    def __init__(
        self,
        trace: Trace,
        place: Place,
        dtype: torch.dtype,
        device: torch.device,
        shape: Sequence[Size],
        strides: Sequence[Size],
        offset: Size = 0,
        begin: int = 0,
        requires_grad: bool = False,
    ) -> None:
        """Offset and strides count elements; begin is the address of its place, modulo 16."""
        self.trace, self.place, self.dtype, self.device = trace, place, dtype, device
        self._begin, self.requires_grad = begin, requires_grad
        self.shape, self._strides, self._offset = tuple(shape), tuple(strides), offset

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return getattr(args[0], func.__name__)(*args[1:], **(kwargs or {}))

    # ---- what it looks like ----

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    def get_device(self) -> int:
        return self.trace.gpu

    def stride(self, axis: int | None = None) -> Any:
        return self._strides if axis is None else self._strides[axis]

    def storage_offset(self) -> Size:
        return self._offset

    def data_ptr(self) -> "Address":
        return Address(self._begin + self._offset * self.element_size())

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> Any:
        return prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return int(self.shape[0])

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def is_contiguous(self) -> bool:
        expected: Size = 1
        for n, stride in zip(reversed(self.shape), reversed(self._strides), strict=True):
            if not (stride == expected or n == 1):
                return bool(self.numel() == 0)
            expected = expected * n
        return True

    def bytes_into(self) -> Any:
        """Returns how far it begins behind the tensor of its place, as recorder.py says."""
        return self._offset * self.element_size() if self.numel() else 0

    # ---- views ----

    def _view(self, shape: Any, strides: Any, offset: Size, dtype: Any = None) -> "Placeholder":
        dtype = dtype or self.dtype
        of = self.trace, self.place, dtype, self.device
        return Placeholder(*of, shape, strides, offset, self._begin)

    def as_strided(self, shape: Any, strides: Any, offset: Size | None = None) -> "Placeholder":
        return self._view(shape, strides, self._offset if offset is None else offset)

    def view(self, *shape: Any) -> "Placeholder":
        if isinstance(shape[0], torch.dtype):
            return self._bytes(shape[0])
        sizes = list(shape[0] if isinstance(shape[0], tuple | list | torch.Size) else shape)
        if -1 in [n for n in sizes if isinstance(n, int)]:
            known = prod(n for n in sizes if not (isinstance(n, int) and n == -1))
            sizes = [self.numel() // known if isinstance(n, int) and n == -1 else n for n in sizes]
        if not self.is_contiguous():
            return self._regrouped(sizes)
        return self._view(sizes, contiguous(sizes), self._offset)

    def _regrouped(self, sizes: list[Size]) -> "Placeholder":
        """Returns a view of strided memory, in which the leading axes become one."""
        merged = self.dim() - len(sizes) + 1
        if merged < 1 or list(self.shape[merged:]) != sizes[1:]:
            raise NotRecordable(f"a view as {sizes}")
        for i in range(merged - 1):
            if self.shape[i] != 1 and self._strides[i] != self.shape[i + 1] * self._strides[i + 1]:
                raise NotRecordable("a view of what does not flatten")
        return self._view(sizes, self._strides[merged - 1 :], self._offset)

    def _bytes(self, dtype: torch.dtype) -> "Placeholder":
        if dtype.itemsize != 1 or self._strides[-1] != 1:
            raise NotRecordable(f"a view as {dtype}")
        size = self.element_size()
        shape, strides = (
            (*self.shape[:-1], self.shape[-1] * size),
            [n * size for n in self._strides],
        )
        return self._view(shape, (*strides[:-1], 1), self._offset * size, dtype)

    def unflatten(self, axis: int, sizes: Sequence[Size]) -> "Placeholder":
        axis %= self.dim()
        known = prod(n for n in sizes if n != -1)
        sizes = [self.shape[axis] // known if n == -1 else n for n in sizes]
        inner = [n * self._strides[axis] for n in contiguous(sizes)]
        return self._view(
            (*self.shape[:axis], *sizes, *self.shape[axis + 1 :]),
            (*self._strides[:axis], *inner, *self._strides[axis + 1 :]),
            self._offset,
        )

    @property
    def mT(self) -> "Placeholder":
        (*outer, a, b), (*steps, s, t) = self.shape, self._strides
        return self._view((*outer, b, a), (*steps, t, s), self._offset)

    def __getitem__(self, index: Any) -> "Placeholder":
        index = index if isinstance(index, tuple) else (index,)
        shape, strides, offset = list[Size](), list[Size](), self._offset
        for axis, (n, stride) in enumerate(zip(self.shape, self._strides, strict=True)):
            at = index[axis] if axis < len(index) else slice(None)
            if at is Ellipsis or at is None or isinstance(at, Placeholder):
                raise NotRecordable(f"an index {at}")
            if isinstance(at, slice):
                begin, end, step = at.indices(int(n)) if at != slice(None) else (0, n, 1)
                if step != 1:
                    raise NotRecordable("a slice with steps")
                shape.append(end - begin if at == slice(None) else max(0, end - begin))
                strides.append(stride)
                offset = offset + begin * stride
            else:
                offset = offset + (at if at >= 0 else n + at) * stride
        return self._view(shape, strides, offset)

    # ---- memory ----

    def new_empty(self, *shape: Any, dtype: Any = None) -> "Placeholder":
        sizes = shape[0] if isinstance(shape[0], tuple | list | torch.Size) else shape
        return self.trace.room(sizes, dtype or self.dtype, self.device)

    def empty_like(self, dtype: Any = None, memory_format: Any = None) -> "Placeholder":
        if memory_format is not torch.contiguous_format and not self.is_contiguous():
            raise NotRecordable("empty_like of what is not contiguous")
        return self.new_empty(self.shape, dtype=dtype)

    def zero_(self) -> "Placeholder":
        if self.place.kind != "room" or not self.is_contiguous():
            raise NotRecordable("a fill of such a tensor")
        if self.numel():
            self.trace.events.append((FILL, 0, self))
        return self

    def new_zeros(self, *shape: Any, dtype: Any = None) -> "Placeholder":
        return self.new_empty(*shape, dtype=dtype).zero_()

    def copy_(self, source: Any) -> "Placeholder":
        if self.place.kind != "room" or not can_copy(source, cast(Any, self)):
            raise NotRecordable("a copy between such tensors")
        if self.numel():
            self.trace.events.append((COPY, 0, self, source))
        return self

    def to(self, dtype: torch.dtype) -> "Placeholder":
        return self if dtype == self.dtype else self.new_empty(self.shape, dtype=dtype).copy_(self)

    def int(self) -> "Placeholder":
        return self.to(torch.int32)

    def float(self) -> "Placeholder":
        return self.to(torch.float32)

    def contiguous(self) -> "Placeholder":
        return self if self.is_contiguous() else self.new_empty(self.shape).copy_(self)
