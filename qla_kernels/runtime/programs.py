"""Replays calls that were seen before: their launches are kept, and one native call repeats them.

    find      looks for a call like this one
    record    runs a call and keeps its launches
    keep      keeps a value for calls like this one, such as "these arguments were accepted"

A call is like another if the launch code would do the same for it: same sizes, strides, dtypes,
alignment, flags, numbers in host tensors, stream; programs.c compares them. In a table with tokens,
the number of tokens T may differ: forms.c computes what follows from it. Programs exist where
kernels are prebuilt (`native/`) and torch has DLPack's exchange API (2.10), and not under a
compiler, tracer, mode or tensor subclass. QLA_PROGRAMS=0 turns them off. With
QLA_CHECK_PROGRAMS=1 each call that would be replayed is recorded and compared.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from qla_kernels.runtime import device, jit
from qla_kernels.runtime.errors import Unsupported
from qla_kernels.runtime.native import prebuilt
from qla_kernels.runtime.native.recorder import Recorder
from qla_kernels.runtime.native.recording import Form, NotRecordable, tensors_in
from qla_kernels.runtime.native.trace import Trace

MOST = 256  # programs of one function; the one that was used longest ago is dropped for another

DIFFERS = 1  # what storing a program finds; programs.c has the same

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
            ends = list(accumulate(map(len, records), initial=0))

            def again(given: Sequence[Any]) -> tuple[Tensor | None, ...]:
                parts = (given[a:b] for a, b in pairwise(ends))
                return function(*(type(r)(*x) for r, x in zip(records, parts, strict=True))).flat()

            return of_flat(*self.record(arguments, lambda: function(*records).flat(), again))
        return function(*records)

    def keep(
        self,
        arguments: tuple[Any, ...],
        value: object,
        again: Callable[[Sequence[Any]], object] | None = None,
    ) -> None:
        """Keeps a value, not a tuple: `find` returns it for arguments like these.

        With `again`, which does what the value stands for with the arguments that it is given, also
        for arguments with another T.
        """

        def run(given: Sequence[Any]) -> tuple[()]:
            assert again is not None
            again(given)
            return ()

        if (known := self._known) is not None:
            native, table = known
            form = self._form(known, arguments, run) if again is not None else None
            code = (None, ()) if form is None else form[-2:]
            native.keep(table, arguments, value, *code)

    def record(
        self,
        arguments: tuple[Any, ...],
        run: Callable[[], Results],
        again: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
    ) -> Results:
        """Runs a call after `find` returned RECORD for its arguments; returns the call's results.

        Keeps its launches if a program can repeat them, and otherwise that it cannot. `again` does
        the same as `run` with the arguments that it is given: placeholders. Tables with tokens
        need it.
        """
        known = self._known
        if known is None or _is_capturing(arguments):
            return run()
        native, table = known
        if again is not None and (form := self._form(known, arguments, again)) is not None:
            if native.open_form(table, arguments, *form):
                return run()
            jit.log.warning("%s: a form does not make its own call; please report it", self.name)
            _keep_out(known, arguments)
        with Recorder(native, arguments) as recorded:
            results = run()
        try:
            program = recorded.program(results)
        except NotRecordable as reason:
            jit.log.debug("%s: no program for a call: %s", self.name, reason)
            native.keep(table, arguments, None, None, ())
            return results
        if native.store(table, arguments, *program) == DIFFERS:
            raise RuntimeError(
                f"{self.name}: a call that looks like an earlier one launches other kernels or"
                " numbers; need the same; please report it, and set QLA_PROGRAMS=0 until then"
            )
        return results

    def _form(
        self,
        known: tuple[Any, Any],
        arguments: tuple[Any, ...],
        again: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> Form | None:
        """Returns the call's program with T open, or None if it has none, or needs none."""
        native, table = known
        if not native.may_open(table, arguments):
            return None
        try:
            return Trace(native, arguments, self._tokens).form(again)
        except NotRecordable as reason:
            jit.log.debug("%s: a program for one T alone: %s", self.name, reason)
            _keep_out(known, arguments)
            return None


def _keep_out(known: tuple[Any, Any], arguments: tuple[Any, ...]) -> None:
    """Says that calls which look like this one, apart from T, have no form."""
    native, table = known
    native.keep(table, arguments, None, b"", ())


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
    )
    return native


def _is_capturing(arguments: tuple[Any, ...]) -> bool:
    """Returns whether the current stream records a CUDA graph, whose memory is its own."""
    return any(x.is_cuda for x in tensors_in(arguments)) and device.capturing()
