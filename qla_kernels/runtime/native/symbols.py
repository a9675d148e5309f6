"""Numbers that follow from a call's number of tokens T, and for which T they hold.

While launch code runs on a `Number` in place of T, every sum, product, quotient and remainder is
written down as a node of a small program, which forms.c evaluates for any T. Anything else that is
done with a Number sets bounds of a node; the program is not used for a T that leaves them.

    a comparison       the difference stays on the side of 0 where it is
    int, float, hash   the value stays as it is

A Number is no int, so that nothing can read its value and leave no bounds.
"""

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, TypeVar

TOKENS, CONSTANT, ADD, SUB, MUL, FLOORDIV, MOD, LOOKUP = range(8)  # forms.c has the same
LEAST, MOST = -(1 << 63), (1 << 63) - 1
_COMPUTE: dict[int, Callable[[int, int], int]] = {
    ADD: operator.add,
    SUB: operator.sub,
    MUL: operator.mul,
    FLOORDIV: operator.floordiv,
    MOD: operator.mod,
}
_NEUTRAL = {ADD: 0, SUB: 0, MUL: 1, FLOORDIV: 1}  # as the second operand

R = TypeVar("R")
_thread = threading.local()


class Decided(dict[int, int]):
    """The values of a function of one whole number, each computed when it is first looked up."""

    def __init__(self, of: Callable[[int], int]) -> None:
        self._of = of

    def __missing__(self, n: int) -> int:
        self[n] = found = self._of(n)
        return found


class Numbers:
    """A program of nodes, in the order of their evaluation.

    Attributes:
        nodes: of each its operation, two operands, and the bounds of its value. Operands are
            earlier nodes; but that of CONSTANT is the number, and the first one of LOOKUP is a
            place in `tables`.
        values: of the nodes, for the T of the call that is traced.
        tokens: T.
    """

    def __init__(self, tokens: int) -> None:
        self.nodes: list[list[int]] = []
        self.values: list[int] = []
        self.tables: list[Decided] = []
        self._known: dict[tuple[int, int, int], Number] = {}
        self.tokens = self._node(TOKENS, 0, 0, tokens)

    def _node(self, operation: int, a: int, b: int, value: int) -> "Number":
        if (operation, a, b) not in self._known:
            self._known[operation, a, b] = Number(self, len(self.nodes))
            self.nodes.append([operation, a, b, LEAST, MOST])
            self.values.append(value)
        return self._known[operation, a, b]

    def place(self, x: "int | Number") -> int:
        """Returns the node of x, which may be a plain number."""
        if isinstance(x, Number):
            return x.node
        return self._node(CONSTANT, int(x), 0, int(x)).node

    def computed(self, operation: int, a: Any, b: Any) -> Any:
        if type(b) is int:
            if b == _NEUTRAL.get(operation):
                return a
        elif type(a) is int and operation in (ADD, MUL) and a == _NEUTRAL[operation]:
            return b
        if not (isinstance(a, _WHOLE) and isinstance(b, _WHOLE)):
            return NotImplemented
        i, j = self.place(a), self.place(b)
        if operation in (FLOORDIV, MOD):
            self.bound(j, 1, MOST)
        elif operation != SUB and i > j:  # one node for a + b and b + a
            i, j = j, i
        return self._node(operation, i, j, _COMPUTE[operation](self.values[i], self.values[j]))

    def looked_up(self, of: Callable[[int], int], n: "Number") -> "Number":
        """Returns of(n). `of` has to return the same whenever it is called."""
        self.tables.append(Decided(of))
        return self._node(LOOKUP, len(self.tables) - 1, n.node, self.tables[-1][n.value])

    def value_at(self, node: int, tokens: int) -> int:
        """Returns the value of a node for another T."""
        operation, a, b, *_ = self.nodes[node]
        if operation == TOKENS:
            return tokens
        if operation == CONSTANT:
            return a
        if operation == LOOKUP:
            return self.tables[a][self.value_at(b, tokens)]
        return _COMPUTE[operation](self.value_at(a, tokens), self.value_at(b, tokens))

    def bound(self, node: int, least: int, most: int) -> None:
        """Says that a node's value has to stay in these bounds."""
        bounds = self.nodes[node]
        bounds[3:] = max(bounds[3], least), min(bounds[4], most)


class Number:
    """A whole number of a call: a node of the program that computes it from T."""

    __slots__ = ("node", "numbers")

    def __init__(self, numbers: Numbers, node: int) -> None:
        self.numbers, self.node = numbers, node

    @property
    def value(self) -> int:
        """The value for the T of the call that is traced; only for code that sets bounds."""
        return self.numbers.values[self.node]

    def __int__(self) -> int:
        self.numbers.bound(self.node, self.value, self.value)
        return self.value

    __index__ = __hash__ = __int__

    def __float__(self) -> float:
        return float(int(self))

    def __bool__(self) -> bool:
        return self != 0

    def __repr__(self) -> str:
        return repr(int(self))

    def _compared(self, other: object, holds: Callable[[Any, Any], bool]) -> bool:
        if not isinstance(other, int | Number):
            return holds(int(self), other)
        if isinstance(other, Number) and other.node == self.node:
            return holds(0, 0)
        difference = self - other
        sign = (difference.value > 0) - (difference.value < 0)
        self.numbers.bound(difference.node, *_bounds(holds, sign))
        return holds(sign, 0)

    def __eq__(self, other: object) -> bool:
        return self._compared(other, operator.eq)

    def __ne__(self, other: object) -> bool:
        return self._compared(other, operator.ne)

    def __lt__(self, other: object) -> bool:
        return self._compared(other, operator.lt)

    def __le__(self, other: object) -> bool:
        return self._compared(other, operator.le)

    def __gt__(self, other: object) -> bool:
        return self._compared(other, operator.gt)

    def __ge__(self, other: object) -> bool:
        return self._compared(other, operator.ge)

    def __neg__(self) -> Any:
        return 0 - self

    def __add__(self, other: Any) -> Any:
        return self.numbers.computed(ADD, self, other)

    def __sub__(self, other: Any) -> Any:
        return self.numbers.computed(SUB, self, other)

    def __rsub__(self, other: Any) -> Any:
        return self.numbers.computed(SUB, other, self)

    def __mul__(self, other: Any) -> Any:
        return self.numbers.computed(MUL, self, other)

    def __floordiv__(self, other: Any) -> Any:
        return self.numbers.computed(FLOORDIV, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self.numbers.computed(FLOORDIV, other, self)

    def __mod__(self, other: Any) -> Any:
        return self.numbers.computed(MOD, self, other)

    __radd__, __rmul__ = __add__, __mul__


_WHOLE = int, Number


@cache
def _bounds(holds: Callable[[Any, Any], bool], sign: int) -> tuple[int, int]:
    """Returns the bounds of a difference of this sign in which its comparison with 0 stays."""
    same = [s for s in (-1, 0, 1) if holds(s, 0) == holds(sign, 0)]
    if same == [-1, 1]:  # no bounds leave out the 0 between
        same = [sign]
    return (LEAST, 0, 1)[same[0] + 1], (-1, 0, MOST)[same[-1] + 1]


@contextmanager
def followed(numbers: Numbers) -> Iterator[None]:
    """While it is active, `decided` expects Numbers in this thread."""
    _thread.numbers = numbers
    try:
        yield
    finally:
        del _thread.numbers


def decided(function: Callable[..., R], *arguments: Any) -> R:
    """Returns function(*arguments), where arguments, or those in a tuple, may be Numbers.

    A decision such as a plan changes with a Number in steps that no bounds describe, and so each
    new value asks for it again, or each new T if there are several Numbers: `function` has to be a
    pure function of numbers. If it returns a whole number, or a tuple that has some, a program
    follows these, and holds while the rest is the same.
    """
    found = list(_numbers_in(arguments)) if _thread.__dict__ else []
    if not found:
        return function(*arguments)
    alone = len({n.node for n in found}) == 1
    n = found[0] if alone else found[0].numbers.tokens

    @lru_cache(maxsize=1)  # the tables below ask for a new value one after the other
    def at(value: int) -> Any:
        def of(x: Number) -> int:
            return value if alone else x.numbers.value_at(x.node, value)

        return function(*_replaced(arguments, of))

    result: Any = at(n.value)
    rest = _rest(result)
    alike = n.numbers.looked_up(lambda value: _rest(at(value)) == rest, n)
    n.numbers.bound(alike.node, 1, 1)
    if type(result) is int:
        result = n.numbers.looked_up(at, n)
    elif isinstance(result, tuple):
        numbers = {i: _part(at, i) for i, part in enumerate(result) if type(part) is int}
        parts = [
            n.numbers.looked_up(numbers[i], n) if i in numbers else part
            for i, part in enumerate(result)
        ]
        result = getattr(result, "_make", tuple)(parts)
    return result  # type: ignore[no-any-return]


def _part(of: Callable[[int], Any], i: int) -> Callable[[int], int]:
    return lambda n: int(of(n)[i])


def _rest(result: object) -> object:
    """Returns the result with `int` in place of its whole numbers."""
    if isinstance(result, tuple):
        return tuple(int if type(part) is int else part for part in result)
    return int if type(result) is int else result


def _numbers_in(values: tuple[Any, ...]) -> Iterator[Number]:
    for x in values:
        if isinstance(x, Number):
            yield x
        elif type(x) is tuple:
            yield from _numbers_in(x)


def _replaced(values: tuple[Any, ...], by: Callable[[Number], int]) -> tuple[Any, ...]:
    return tuple(
        by(x) if isinstance(x, Number) else _replaced(x, by) if type(x) is tuple else x
        for x in values
    )
