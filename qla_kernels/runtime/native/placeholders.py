"""Stand-ins for tensors, whose sizes, strides and offset may follow from the number of tokens T.

A placeholder has no memory. It has the methods of a tensor that launch code calls on its way to a
launch, and each computes sizes and strides as torch does; any other raises, and the call then has
no form. trace.py makes placeholders.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from qla_kernels.runtime.native.memory import can_copy
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

    def fills(self, room: "Placeholder") -> bool:
        """Returns whether it is all of a room's memory."""
        size, of_room = (x.numel() * x.element_size() for x in (self, room))
        return bool(self._offset == room._offset and size == of_room)

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
        made: Placeholder = self.trace.room(sizes, dtype or self.dtype, self.device)
        return made

    def empty_like(self, dtype: Any = None, memory_format: Any = None) -> "Placeholder":
        if memory_format is not torch.contiguous_format and not self.is_contiguous():
            raise NotRecordable("empty_like of what is not contiguous")
        return self.new_empty(self.shape, dtype=dtype)

    def zero_(self) -> "Placeholder":
        if self.place.kind != "room" or not self.is_contiguous():
            raise NotRecordable("a fill of such a tensor")
        if self.numel():
            self.trace.events.append((FILL, self.trace.stream(), self))
        return self

    def new_zeros(self, *shape: Any, dtype: Any = None) -> "Placeholder":
        return self.new_empty(*shape, dtype=dtype).zero_()

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

    def contiguous(self) -> "Placeholder":
        return self if self.is_contiguous() else self.new_empty(self.shape).copy_(self)
