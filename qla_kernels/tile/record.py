"""Records of what a kernel's macros share: one argument in place of many."""

from types import SimpleNamespace
from typing import Any

import qla_kernels.tile.language as T


class Record(SimpleNamespace):
    """Values by name: `record.q`, or `record["h0"]` where the name is computed."""

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]


class Variables:
    """A thread's variables, such as the place of the item that it computes.

    `item.length` is the number that the variable has where it is read. TileLang has no assignment
    to an attribute, so `item["length"] = x` and `item["length"] += x` write it.
    """

    def __init__(self, names: str, **others: str) -> None:
        """Allocates an int32 for each of the names, which blanks separate, and others by dtype."""
        dtypes = dict.fromkeys(names.split(), "int32") | others
        self._buffers = {name: named(name, T.alloc_var(dtypes[name])) for name in dtypes}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._buffers:
            raise AttributeError(f"no variable {name!r}")
        return self._buffers[name][0]

    def __getitem__(self, name: str) -> Any:
        return self._buffers[name][0]

    def __setitem__(self, name: str, value: Any) -> None:
        from tvm.script.ir_builder.tirx import buffer_store

        buffer_store(self._buffers[name], value, 0)


def named(name: str, value: Any) -> Any:
    """Gives what TileLang allocated the name that it has in reports and in generated code."""
    from tvm.script.ir_builder import IRBuilder

    IRBuilder.name(name, value)
    return value
