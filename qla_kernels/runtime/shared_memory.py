"""Gives every shared-memory buffer a unique name, so that each process generates the same code.

TileLang names a buffer after the variable or macro parameter to which it was last bound, and leaves
it unnamed if it was allocated inside an expression. Its layout of shared memory orders buffers by
lifetime, size and name, and buffers with one name by their addresses in the process.
"""

from typing import Any


def name_apart(prim_func: Any) -> None:
    """Appends numbers to the names of buffers that share one, in the order of their allocation."""
    from tvm.script.ir_builder import IRBuilder

    for name, buffers in buffers_by_name(prim_func).items():
        for i, buffer in enumerate(buffers[1:], 1):
            IRBuilder.name(f"{name}_{i}", buffer)


def buffers_by_name(prim_func: Any) -> dict[str, list[Any]]:
    """Returns the shared-memory buffers by name; those with one name in the order of allocation."""
    from tilelang import tvm

    named: dict[str, list[Any]] = {}

    def visit(node: Any) -> None:
        for buffer in getattr(node, "alloc_buffers", ()):
            if buffer.scope().startswith("shared"):
                named.setdefault(str(buffer.name), []).append(buffer)

    tvm.tirx.stmt_functor.post_order_visit(prim_func.body, visit)
    return named
