"""Comparisons of tensor sizes that TileLang's host code leaves out.

The host code stores a tensor's sizes under the name of its buffer, and a buffer that is passed to a
macro takes the name of the macro's parameter: with `load(rows=q)` and `load(rows=do)` both buffers
are called `rows`. Of the tensors with one name the host code reads only the last one's sizes, so it
would launch with a `q` of any size, and the kernel would read past its end. Type, device, number of
dimensions and strides are checked for every tensor.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from qla_kernels.runtime.errors import need


class Unread(NamedTuple):
    """A tensor whose sizes the host code does not read, and the tensor that it reads instead."""

    place: int  # index among the launch's arguments
    name: str
    like: int  # index of the tensor that is read instead
    like_name: str


def unread(prim_func: Any) -> list[Unread]:
    """Returns the tensors of a PrimFunc whose sizes `checked` has to compare.

    For most kernels there are none. Raises ValueError if two tensors of one name are declared with
    different shapes.
    """
    tensors = [
        (place, str(param.name).removesuffix("_handle"), prim_func.buffer_map[param])
        for place, param in enumerate(prim_func.params)
        if param in prim_func.buffer_map
    ]
    last = {buffer.name: (place, name, buffer) for place, name, buffer in tensors}
    found = []
    for place, name, buffer in tensors:
        like, like_name, read = last[buffer.name]
        if like == place:
            continue
        shape, like_shape = ([str(size) for size in x.shape] for x in (buffer, read))
        if shape != like_shape:  # the host code would apply the one's checks to the other
            op = str(prim_func.attrs["global_symbol"])
            got = f"{name} {shape} and {like_name} {like_shape} both named {buffer.name}"
            fix = "hand them to parameters of different names"
            raise ValueError(need(op, got, "one shape or two names", fix))
        found.append(Unread(place, name, like, like_name))
    return found


def checked(launch: Callable[..., None], kernel: str, prim_func: Any) -> Callable[..., None]:
    """Returns `launch`, preceded by the size comparisons that its host code leaves out, if any.

    The returned function raises ValueError if such a tensor has other sizes.
    """
    tensors = unread(prim_func)
    if not tensors:
        return launch

    def launch_checked(*arguments: Any) -> None:
        for place, name, like, like_name in tensors:
            got, needed = arguments[place].shape, arguments[like].shape
            if got != needed:
                sizes = f"{list(needed)}, the sizes of {like_name}"
                fix = "launch it with such a tensor"
                raise ValueError(need(kernel, f"{name} is {list(got)}", sizes, fix))
        launch(*arguments)

    return launch_checked
