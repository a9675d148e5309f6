"""Replays calls that were seen before: their launches are kept, and one native call repeats them.

    find      looks for a call like this one
    record    makes the program of a call, launches it and keeps it
    keep      keeps a value for calls like this one, such as "these arguments were accepted"

A call is like another if the launch code would do the same for it: same sizes, strides, dtypes,
alignment, flags, numbers in host tensors, stream; programs.c compares them. In a table with tokens,
the number of tokens T may differ: forms.c computes what follows from it. Programs exist where
kernels are prebuilt (`native/`) and torch has DLPack's exchange API (2.10), and not under a
compiler, tracer, mode or tensor subclass. QLA_PROGRAMS=0 turns them off. With
QLA_CHECK_PROGRAMS=1 the program of each call is made anew and compared with the one that is known.
"""

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from qla_kernels.runtime import device, jit
from qla_kernels.runtime.errors import Unsupported
from qla_kernels.runtime.native import prebuilt
from qla_kernels.runtime.native.recording import NotRecordable, Program, tensors_in
from qla_kernels.runtime.native.trace import Trace

MOST = 256  # programs of one function; the one that was used longest ago is dropped for another

DIFFERS, FAILS = 1, 2  # outcomes of storing a program; making.c has the same

RECORD = True  # what `find` returns at the second call of a kind


class _HasFlat(Protocol):
    def flat(self) -> tuple[Tensor | None, ...]: ...


Flat = TypeVar("Flat", bound=_HasFlat)
Results = TypeVar("Results", bound=tuple[Tensor | None, ...])

_tables: "weakref.WeakSet[Programs]" = weakref.WeakSet()


class Programs:
    """The programs of one function.

    Attributes:
        find: called with the function's arguments, returns the results of a replay as a tuple, a
            value that was kept, RECORD, or None if the function has to be run as usual.
    """

    def __init__(self, name: str, gradients: bool = False, tokens: Sequence[int] = ()) -> None:
        """Makes an empty table.

        Args:
            gradients: calls that want gradients are of another kind.
            tokens: the places of arguments [B, T, ..]. One program serves calls with any T as far
                as launch code does the same for them.
        """
        self.name = name
        self._gradients, self._tokens = gradients, tokens
        # The launcher and its table. Each call reads them once: `forget` may run beside it.
        self._known: tuple[Any, Any] | None = None
        self.find: Callable[..., Any] = self._first
        _tables.add(self)

    def _first(self, *arguments: Any) -> Any:
        native, find = _native(), _nothing
        if native is not None:
            find = native.table(MOST, self._gradients, sum(1 << place for place in self._tokens))
            self._known = native, find.__self__
        self.find = find
        return find(*arguments)

    def forget(self) -> None:
        """Drops all programs, and looks for prebuilt kernels again at the next call."""
        self._known, self.find = None, self._first

    @property
    def native(self) -> Any:
        """The launcher, from the first call on; None before, and where there are no programs."""
        known = self._known
        return None if known is None else known[0]

    def __len__(self) -> int:
        known = self._known
        return 0 if known is None else int(known[0].num_programs(known[1]))

    def replays(self) -> int:
        """Returns how many calls the table has replayed."""
        known = self._known
        return 0 if known is None else int(known[0].num_replays(known[1]))

    def run(
        self,
        function: Callable[..., Flat],
        records: tuple[tuple[Any, ...], ...],
        of_flat: Callable[..., Flat],
    ) -> Flat:
        """Returns function(*records), replayed if possible.

        Args:
            function: returns an object whose `flat()` is a tuple of tensors and None.
            of_flat: makes such an object from that tuple's elements.
        """
        if torch.compiler.is_compiling():
            return function(*records)
        arguments = tuple(chain.from_iterable(records))
        found = self.find(*arguments)
        if type(found) is tuple:
            return of_flat(*found)
        if found is RECORD:
            return of_flat(*self.record(arguments, lambda *x: function(*x).flat(), *records))
        return function(*records)

    def keep(
        self,
        arguments: tuple[Any, ...],
        value: object,
        call: Callable[..., object],
        *given: Any,
    ) -> None:
        """Keeps a value, not a tuple: `find` returns it for arguments like these.

        Also for arguments with another T, as far as call(*given), which is what the value stands
        for, allows. `given` are arguments of the call, or tuples of such.
        """
        if (known := self._known) is not None:
            native, table = known
            traced = self._traced(known, arguments, lambda *x: (call(*x), ())[1], *given)
            code = (None, ()) if traced is None else traced[-2:]
            native.keep(table, arguments, value, *code)

    def record(
        self,
        arguments: tuple[Any, ...],
        call: Callable[..., Results],
        *given: Any,
        usual: Callable[[], Results] | None = None,
    ) -> Results:
        """Returns call(*given) after `find` returned RECORD for its arguments.

        Runs `call` on placeholders, and launches and keeps the program that this makes. If there is
        none, keeps that, and runs the call on tensors.

        Args:
            arguments: those of `find`.
            given: arguments of the call, or lists and tuples of such. A tensor that is not among
                the arguments cannot be in a program.
            usual: runs the call on tensors; call(*given) if None.
        """
        usual = usual or functools.partial(call, *given)
        known = self._known
        if known is None or _is_capturing(arguments):
            return usual()
        native, table = known
        program = self._traced(known, arguments, call, *given)
        done = FAILS if program is None else native.store(table, arguments, *program)
        if done == DIFFERS:
            raise RuntimeError(
                f"{self.name}: a call that looks like an earlier one launches other kernels or"
                " numbers; need the same; please report it, and set QLA_PROGRAMS=0 until then"
            )
        if done == FAILS:
            native.keep(table, arguments, None, b"", ())  # nor have those with another T a program
            native.keep(table, arguments, None, None, ())
        return done if isinstance(done, tuple) else usual()  # type: ignore[return-value]

    def _traced(
        self,
        known: tuple[Any, Any],
        arguments: tuple[Any, ...],
        call: Callable[..., Sequence[Any]],
        *given: Any,
    ) -> Program | None:
        """Returns the program of call(*given), or None if it has none."""
        try:
            return Trace(known[0], arguments, self._tokens).program(call, *given)
        except NotRecordable as reason:
            jit.log.debug("%s: no program for a call: %s", self.name, reason)
            return None


def forget() -> None:
    """Drops all programs of all functions, as after a change of QLA_PREBUILT or of heuristics."""
    for table in _tables:
        table.forget()


def _nothing(*arguments: Any) -> None:
    return None


def _native() -> Any:
    """Returns the launcher, told how to ask torch whether a call is observed; None without it."""
    if os.environ.get("QLA_PROGRAMS", "1") == "0" or os.environ.get("QLA_DUMP"):
        return None
    try:
        native = prebuilt.launcher()
    except Unsupported:  # a launch raises it; CPU tensors need none
        return None
    if native is None or not native.exchanges():
        return None
    native.watch_with(
        torch.nn.Parameter,
        torch.is_grad_enabled,
        torch._C._len_torch_dispatch_stack,
        torch._C._functorch.peek_interpreter_stack,
        torch._C._get_tracing_state,
        torch.autograd.forward_ad,
        torch.autograd.graph.increment_version,
    )
    return native


def _is_capturing(arguments: tuple[Any, ...]) -> bool:
    """Returns whether the current stream records a CUDA graph, whose memory is its own."""
    return any(x.is_cuda for x in tensors_in(arguments)) and device.capturing()
