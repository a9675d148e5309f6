"""A function under attack: how it is called at random, and what its results have to be."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.fuzz.draw import Draw

Call = dict[str, Any]  # keyword arguments


class Target(NamedTuple):
    call: Callable[[Draw], Call]
    run: Callable[..., Any]
    verify: Callable[[Draw, Call, Any], None]  # raises an AssertionError
    covers: tuple[str, ...]  # names in __all__ of the package and its families
    # What `wrong` leaves alone: arguments, such as what a method belongs to, or single replacements
    given: tuple[str, ...] = ()

    def attack(self, d: Draw) -> None:
        call = self.call(d)
        self.verify(d, call, self.run(**call))
