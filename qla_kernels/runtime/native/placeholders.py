"""Stand-ins for tensors, whose sizes, strides and offset may follow from the number of tokens T.

A placeholder has no memory. It has the methods of a tensor that launch code calls on its way to a
launch, and each computes sizes and strides as torch does; any other raises, and the call then has
no form. trace.py makes placeholders.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from qla_kernels.runtime.native.memory import can_copy, word
from qla_kernels.runtime.native.recording import COPY, FILL, NotRecordable, Place

Size: TypeAlias = Any  # a whole number, or a Number of symbols.py

ALIGNMENT = 16  # programs.c compares addresses modulo this; those of rooms are multiples


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
        trace: Any,
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
        self._numel: Size = None

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
        return int(self.trace.gpu)

    def stride(self, axis: int | None = None) -> Any:
        return self._strides if axis is None else self._strides[axis]

    def storage_offset(self) -> Size:
        return self._offset

    def data_ptr(self) -> "Address":
        return Address(self._begin + self._offset * self.element_size())

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> Any:
        if self._numel is None:
            self._numel = prod(self.shape)
        return self._numel

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator["Placeholder"]:
        return (self[i] for i in range(len(self)))

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def is_contiguous(self) -> bool:
        expected: Size = 1
        for n, stride in zip(reversed(self.shape), reversed(self._strides), strict=True):
            if not (stride == expected or n == 1):
                return bool(self.numel() == 0)
            expected = expected * n
        return True

    def fills(self, room: "Placeholder") -> bool:
        """Returns whether it is all of a room's memory."""
        size, of_room = (x.numel() * x.element_size() for x in (self, room))
        return bool(self._offset == room._offset and size == of_room)

    def bytes_into(self) -> Any:
        """Returns how far it begins behind the tensor of its place, as programs.c adds it."""
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
            return self._as(shape[0])
        sizes = list(shape[0] if isinstance(shape[0], tuple | list | torch.Size) else shape)
        if -1 in [n for n in sizes if isinstance(n, int)]:
            known = prod(n for n in sizes if not (isinstance(n, int) and n == -1))
            sizes = [self.numel() // known if isinstance(n, int) and n == -1 else n for n in sizes]
        if not self.is_contiguous():
            return self._regrouped(sizes)
        return self._view(sizes, contiguous(sizes), self._offset)

    def _regrouped(self, sizes: list[Size]) -> "Placeholder":
        """Returns a view of strided memory: each run of axes without gaps has axes of its own."""
        axis, strides = len(sizes), list[Size]()
        numbers, viewed, step = 1, 1, self._strides[-1]
        for i in range(self.dim() - 1, -1, -1):
            numbers = numbers * self.shape[i]
            if i and (self.shape[i - 1] == 1 or self._strides[i - 1] == numbers * step):
                continue
            while axis and (viewed < numbers or sizes[axis - 1] == 1):
                axis -= 1
                strides.insert(0, viewed * step)
                viewed = viewed * sizes[axis]
            if viewed != numbers:
                raise NotRecordable(f"a view as {sizes}")
            numbers, viewed, step = 1, 1, self._strides[i - 1]
        if axis:
            raise NotRecordable(f"a view as {sizes}")
        return self._view(sizes, strides, self._offset)

    def _as(self, dtype: torch.dtype) -> "Placeholder":
        """Returns a view of the same memory in numbers of another size."""
        old, new = self.element_size(), dtype.itemsize
        if not self.shape or self._strides[-1] != 1:
            raise NotRecordable(f"a view as {dtype}")
        *outer, last = (n * old for n in (self._offset, *self._strides[:-1], self.shape[-1]))
        if any(n % new for n in (*outer, last)):
            raise NotRecordable(f"a view as {dtype}")
        offset, *strides = (n // new for n in outer)
        return self._view((*self.shape[:-1], last // new), (*strides, 1), offset, dtype)

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

    def flatten(self, start: int = 0, end: int = -1) -> "Placeholder":
        a, b = start % self.dim(), end % self.dim() + 1
        return self.view((*self.shape[:a], prod(self.shape[a:b]), *self.shape[b:]))

    def unsqueeze(self, axis: int) -> "Placeholder":
        axis %= self.dim() + 1
        step = self.shape[axis] * self._strides[axis] if axis < self.dim() else 1
        shape, strides = list(self.shape), list(self._strides)
        shape.insert(axis, 1)
        strides.insert(axis, step)
        return self._view(shape, strides, self._offset)

    def squeeze(self, axis: int) -> "Placeholder":
        axis %= self.dim()
        if self.shape[axis] != 1:
            return self
        shape, strides = list(self.shape), list(self._strides)
        del shape[axis], strides[axis]
        return self._view(shape, strides, self._offset)

    def expand(self, *shape: Any) -> "Placeholder":
        sizes = list(shape[0] if isinstance(shape[0], tuple | list | torch.Size) else shape)
        new = len(sizes) - self.dim()
        strides: list[Size] = [0] * new
        for i, (n, stride) in enumerate(zip(self.shape, self._strides, strict=True), new):
            sizes[i] = n if isinstance(sizes[i], int) and sizes[i] == -1 else sizes[i]
            strides.append(stride if sizes[i] == n else 0)
        return self._view(sizes, strides, self._offset)

    def select(self, axis: int, at: Size) -> "Placeholder":
        return self.narrow(axis, at, 1).squeeze(axis)

    def narrow(self, axis: int, start: Size, length: Size) -> "Placeholder":
        axis %= self.dim()
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return self._view(shape, self._strides, self._offset + start * self._strides[axis])

    def split(self, sizes: Any, dim: int = 0) -> "tuple[Placeholder, ...]":
        if isinstance(sizes, int):
            raise NotRecordable("a split in equal parts")
        starts = accumulate(sizes, initial=0)
        return tuple(self.narrow(dim, a, n) for a, n in zip(starts, sizes, strict=False))

    @property
    def mT(self) -> "Placeholder":
        (*outer, a, b), (*steps, s, t) = self.shape, self._strides
        return self._view((*outer, b, a), (*steps, t, s), self._offset)

    def __getitem__(self, index: Any) -> "Placeholder":
        index = index if isinstance(index, tuple) else (index,)
        rest = next((i for i, x in enumerate(index) if x is Ellipsis), None)
        if rest is not None:
            named = sum(x is not None for x in index) - 1
            every = (slice(None),) * (self.dim() - named)
            index = (*index[:rest], *every, *index[rest + 1 :])
        axis = next((i for i, x in enumerate(index) if x is None), None)
        if axis is not None:
            return self.unsqueeze(axis)[(*index[:axis], slice(None), *index[axis + 1 :])]
        shape, strides, offset = list[Size](), list[Size](), self._offset
        for i, (n, stride) in enumerate(zip(self.shape, self._strides, strict=True)):
            at: Any = index[i] if i < len(index) else slice(None)
            if isinstance(at, Placeholder | Tensor):
                raise NotRecordable("an index that is a tensor")
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

    def __setitem__(self, index: Any, value: Any) -> None:
        self[index].copy_(value)

    # ---- memory ----

    def new_empty(self, *shape: Any, dtype: Any = None) -> "Placeholder":
        sizes = shape[0] if isinstance(shape[0], tuple | list | torch.Size) else shape
        made: Placeholder = self.trace.room(sizes, dtype or self.dtype, self.device)
        return made

    def empty_like(self, dtype: Any = None, memory_format: Any = None) -> "Placeholder":
        made = self.new_empty(self.shape, dtype=dtype)
        if memory_format is torch.contiguous_format or self.is_contiguous():
            return made
        if any(n != 1 and stride == 0 for n, stride in zip(self.shape, self._strides, strict=True)):
            raise NotRecordable("empty_like of repeated memory")
        axes = sorted(range(self.dim()), key=self.stride, reverse=True)
        strides: list[Size] = [0] * self.dim()
        for i, stride in zip(axes, contiguous([self.shape[i] for i in axes]), strict=True):
            strides[i] = stride
        return made.as_strided(self.shape, strides)

    def fill_(self, value: float) -> "Placeholder":
        bits = word(value, self.dtype)
        if self.place.kind != "room" or not self.is_contiguous() or bits is None:
            raise NotRecordable("a fill of such a tensor")
        if self.numel():
            self.trace.events.append((FILL, self.trace.stream(), self, bits))
        return self

    def zero_(self) -> "Placeholder":
        return self.fill_(0)

    def new_zeros(self, *shape: Any, dtype: Any = None) -> "Placeholder":
        return self.new_empty(*shape, dtype=dtype).fill_(0)

    def new_full(self, shape: Any, value: float, dtype: Any = None) -> "Placeholder":
        return self.new_empty(shape, dtype=dtype).fill_(value)

    def zeros_like(self, dtype: Any = None, memory_format: Any = None) -> "Placeholder":
        return self.empty_like(dtype, memory_format).fill_(0)

    def copy_(self, source: Any) -> "Placeholder":
        if self.place.kind != "room" or not can_copy(source, cast(Any, self)):
            raise NotRecordable("a copy between such tensors")
        if self.numel():
            self.trace.events.append((COPY, self.trace.stream(), self, source))
        return self

    def to(self, dtype: torch.dtype) -> "Placeholder":
        return self if dtype == self.dtype else self.new_empty(self.shape, dtype=dtype).copy_(self)

    def int(self) -> "Placeholder":
        return self.to(torch.int32)

    def float(self) -> "Placeholder":
        return self.to(torch.float32)

    def clone(self, memory_format: Any = None) -> "Placeholder":
        return self.empty_like(memory_format=memory_format).copy_(self)

    def contiguous(self) -> "Placeholder":
        return self if self.is_contiguous() else self.new_empty(self.shape).copy_(self)
