"""Gives every buffer in shared memory a name of its own, so that generated code is always the same.

TileLang names a buffer after what it was last bound to, a variable or the parameter of a macro, and
leaves it unnamed where it was allocated inside an expression. Its plan of shared memory orders
buffers by lifetime, size and name, and those of one name by their addresses in this process.
"""

from typing import Any


def name_apart(prim_func: Any) -> None:
    """Number the buffers that share a name, in the order of their allocation."""
    from tvm.script.ir_builder import IRBuilder

    for name, buffers in buffers_by_name(prim_func).items():
        for i, buffer in enumerate(buffers[1:], 1):
            IRBuilder.name(f"{name}_{i}", buffer)


def buffers_by_name(prim_func: Any) -> dict[str, list[Any]]:
    """The buffers in shared memory, those of one name in the order of their allocation."""
    from tilelang import tvm

    named: dict[str, list[Any]] = {}

    def visit(node: Any) -> None:
        for buffer in getattr(node, "alloc_buffers", ()):
            if buffer.scope().startswith("shared"):
                named.setdefault(str(buffer.name), []).append(buffer)

    tvm.tirx.stmt_functor.post_order_visit(prim_func.body, visit)
    return named
