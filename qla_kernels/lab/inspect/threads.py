"""Determines which threads of a CTA take which branch.

Generated CUDA and TileLang's IR both choose roles with `if`s on the thread index. A condition is
parsed as a Python expression and evaluated for every thread. Run-time values are unknown, and an
unknown condition sends a thread down both branches.

Threads are numbered linearly, x first, as in warps and roles: in a block of (128, 4), y is the
warpgroup.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping

from qla_kernels.tile.schedule import WARP

Threads = frozenset[int]
Block = tuple[int, ...]  # threads along x, y, z
Definitions = Mapping[str, ast.expr]

THREAD = ("threadIdx_x", "threadIdx_y", "threadIdx_z")  # how conditions spell threadIdx
ELECT = "tl_shuffle_elect"

_OPERATIONS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # C's; thread indices are never negative
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}

_CAST = re.compile(r"\((?:bool|u?int(?:\d+_t)?)\)")


def everyone(block: Block) -> Threads:
    return frozenset(range(math.prod(block)))


def split(
    condition: ast.expr | None, threads: Threads, block: Block, definitions: Definitions
) -> tuple[Threads, Threads]:
    """Returns the threads that may take the branch, and the threads that may skip it.

    A thread for which the condition is unknown is in both sets.
    """
    if condition is None:
        return threads, threads
    values = {
        thread: _evaluate(condition, _indices(thread, block), definitions) for thread in threads
    }
    taken = frozenset(thread for thread, value in values.items() if value is None or value)
    skipped = frozenset(thread for thread, value in values.items() if not value)
    return taken, skipped


def parse_c(condition: str) -> ast.expr | None:
    """Returns a C condition as a Python expression; None if it is outside the supported subset."""
    text = re.sub(rf"tl::{ELECT}<(\d+)>\(\)", rf"{ELECT}(\1)", _CAST.sub("", condition))
    text = re.sub(r"threadIdx\.([xyz])", r"threadIdx_\1", text)
    text = text.replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"!(?!=)", " not ", text)
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None


def _indices(thread: int, block: Block) -> dict[str, int]:
    indices = {}
    for name, extent in zip(THREAD, block, strict=False):
        thread, indices[name] = divmod(thread, extent)
    return indices


def _evaluate(node: ast.expr, indices: Mapping[str, int], definitions: Definitions) -> int | None:
    def value(child: ast.expr) -> int | None:
        return _evaluate(child, indices, definitions)

    match node:
        case ast.Constant(value=int(constant)):
            return constant
        case ast.Name(id=name):
            if name in indices:
                return indices[name]
            return value(definitions[name]) if name in definitions else None
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = value(operand)
            return None if inner is None else not inner
        case ast.BoolOp(op=op, values=children):
            decided = not isinstance(op, ast.And)  # the value that settles an `or`; else an `and`
            parts = [value(child) for child in children]
            if any(part is not None and bool(part) is decided for part in parts):
                return decided
            return None if None in parts else not decided
        case ast.BinOp(left=left, op=op, right=right):
            return _apply(op, value(left), value(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _apply(op, value(left), value(right))
        case ast.Call(
            func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(every)]
        ):
            if name == ELECT and isinstance(every, int):
                return _elected(indices[THREAD[0]], every)
    return None


def _elected(x: int, every: int) -> bool:
    """Returns whether ELECT picks thread x.

    It picks the first of each `every` threads, rounded up to whole warps, or the first of all if
    `every` is 0. It looks at x alone, so every row of the block has its own elected threads.
    """
    return x % (-(-every // WARP) * WARP) == 0 if every else x == 0


def _apply(op: ast.AST, left: int | None, right: int | None) -> int | None:
    apply = _OPERATIONS.get(type(op))
    if apply is None or left is None or right is None:
        return None
    try:
        return apply(left, right)
    except ArithmeticError:
        return None
