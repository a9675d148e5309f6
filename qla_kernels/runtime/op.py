"""Operators of `torch.ops.qla_kernels`, and calls of them without torch's dispatcher.

    @op("qla_kernels.norm.launch")
    def gated_norm_fwd(x: Tensor, weight: Tensor, eps: float) -> Annotated[Tensor, "like x"]: ...

`op` makes an operator of the function that runs it on CPU tensors, whose annotations are the
operator's signature. Its schema follows from them. So does its fake implementation, if results are
annotated as entries of `signature.py`, without a name. A parameter may be a record, a NamedTuple
class, if all are: the operator then has their fields. CUDA tensors go to the function of the same
name in the module that is named, which is imported at the first call with one.

The dispatcher takes the host as long as two or three launches. It is skipped where nothing could
observe the call: no compiler or tracer, no dispatch mode, no tensor subclass.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import (
    Annotated,
    Any,
    Generic,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

from qla_kernels.runtime.contents import checks_contents
from qla_kernels.runtime.native.placeholders import Placeholder
from qla_kernels.runtime.programs import Programs
from qla_kernels.runtime.signature import Entry

_LIBRARY: Any = torch.library.Library("qla_kernels", "DEF")  # type: ignore[no-untyped-call]
# The strides of a call are accepted or refused when it is traced: Inductor must keep them.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

Overwritten = Annotated[Tensor, "overwritten"]  # the type of a record's field that is changed

SymInt = Annotated[int, "symbolic"]  # an int that torch.compile need not take for a constant

# A field's type in torch's notation; each tensor that is changed has a letter of its own
_IN_SCHEMAS = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    list[int]: "int[]",
    list[bool]: "bool[]",
    Overwritten: "Tensor({}!)",
    Overwritten | None: "Tensor({}!)?",
    float: "float",
    bool: "bool",
    bool | None: "bool?",
    int: "int",
    int | None: "int?",
    SymInt: "SymInt",
    str: "str",
}

R = TypeVar("R")


def imported_late(module: str, function: str) -> Callable[..., Any]:
    """Returns a function that calls `function` of `module`, which it imports at its first call.

    Modules that launch kernels import all of a family's kernel files, so they come in late.
    """
    home = functools.cache(lambda: importlib.import_module(module))
    return lambda *args, **flags: getattr(home(), function)(*args, **flags)


def schema(hints: Mapping[str, Any], results: Any, defaults: Mapping[str, Any]) -> str:
    """Returns the schema of a function, "(arguments) -> results" in torch's notation.

    Args:
        hints: the types of arguments, by name. A record stands for its fields.
        results: Tensor, the NamedTuple class of results, or type(None).
        defaults: of arguments that have one.
    """
    text = ", ".join(
        f"{_in_schema(hint)} {name}" + f"={defaults.get(name)}" * (name in defaults)
        for name, hint in _flattened(hints).items()
    )
    text = text.format(*"abcdefgh"[: text.count("{}!")])
    if results is type(None):
        return f"({text}) -> ()"
    if not _is_record(results):
        return f"({text}) -> {_in_schema(results)}"
    made = [f"{_in_schema(hint)} {name}" for name, hint in _flattened({"": results}).items()]
    return f"({text}) -> ({', '.join(made)})"


def _in_schema(hint: Any) -> str:
    if hint not in _IN_SCHEMAS and get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return _IN_SCHEMAS[hint]


def refuse_backward(name: str, refuse: Callable[..., Any]) -> None:
    """Calls `refuse` when autograd asks for gradients of the operator."""
    torch.library.register_autograd(f"qla_kernels::{name}", refuse, lib=_LIBRARY)


# Types that the dispatcher need not see. A list or tuple holds numbers, or tensors of this package.
_PLAIN = frozenset(
    (Tensor, torch.nn.Parameter, Placeholder, type(None), bool, int, float, str, list, tuple)
)


def _is_watched(records: Iterable[tuple[Any, ...]]) -> bool:
    """Returns whether a call with the arguments in these tuples has to go through the dispatcher.

    True under a compiler, a tracer, a mode (fake tensors, selective checkpointing) or functorch,
    and if an argument has a type other than _PLAIN: a tensor subclass may override operators.
    """
    return (
        torch.compiler.is_compiling()
        or not _PLAIN.issuperset(map(type, chain.from_iterable(records)))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


class One(NamedTuple):
    """The result of an operator that has one, as programs take it."""

    y: Any

    def flat(self) -> tuple[Tensor | None, ...]:
        return self


class Operator(Generic[R]):
    """An operator as this package calls it: past the dispatcher where nothing observes the call.

    Attributes:
        on_cuda, on_cpu: the implementations.
        programs: those of `replayed`.
    """

    def __init__(self, run: Callable[..., R], on_cuda: Callable[..., Any], fake: Any) -> None:
        name, hints = run.__name__, get_type_hints(run, include_extras=True)
        results = hints.pop("return")
        records = [hint for hint in hints.values() if _is_record(hint)]
        assert len(records) in (0, len(hints)), f"{name}: all parameters are records, or none"
        self.__doc__, self.on_cuda, self.on_cpu = run.__doc__, on_cuda, _plainly(run)
        self._records, self._results = bool(records), results if _is_record(results) else None
        self.programs = Programs(name)
        if self._results and not hasattr(results, "flat"):
            results.flat = lambda record: record  # as programs take them

        def on_fields(function: Callable[..., Any]) -> Callable[..., Any]:
            if not records:
                return function
            return lambda *given: function(*_regrouped(records, given))

        _LIBRARY.define(name + schema(hints, results, _defaults(run)), tags=_TAGS)
        _LIBRARY.impl(name, on_fields(lambda *x, **flags: self.on_cuda(*x, **flags)), "CUDA")
        _LIBRARY.impl(name, on_fields(lambda *x, **flags: self.on_cpu(*x, **flags)), "CPU")
        empty = on_fields(fake) if fake else _fake_of(_flattened(hints), results)
        torch.library.register_fake(f"qla_kernels::{name}", empty, lib=_LIBRARY)
        self._operator = getattr(torch.ops.qla_kernels, name).default

    def __call__(self, *given: Any, **flags: Any) -> R:
        records: Any = given if self._records else (given,)
        if not _is_watched(records):
            x = records[0][0]
            if x.is_cuda:
                return self.on_cuda(*given, **flags)  # type: ignore[no-any-return]
            if x.is_cpu:
                return self.on_cpu(*given, **flags)  # type: ignore[no-any-return]
        done = self._operator(*chain.from_iterable(records), **flags)
        return self._results(*done) if self._results else done  # type: ignore[no-any-return]

    def replayed(self, *given: Any) -> R:
        """Runs the operator, replayed if possible; takes no keywords."""
        run: Any = self
        programs: Any = self.programs
        results = self._results
        if self._records:
            done = programs.run(run, given, getattr(results, "of_flat", results))
        elif results:
            done = programs.run(lambda given: run(*given), (given,), results)
        else:
            done = programs.run(lambda given: One(run(*given)), (given,), One).y
        return done  # type: ignore[no-any-return]


def op(
    home: str | None = None,
    fake: Callable[..., Any] | None = None,
    check: Callable[..., None] | None = None,
) -> Callable[[Callable[..., R]], Operator[R]]:
    """Returns a decorator that makes an operator of the function that runs CPU tensors.

    That function runs without grad mode and without autocast, which would lower its precision.

    Args:
        home: the module with the function for CUDA tensors; None: they take the same one.
        fake: returns empty results of the right shapes; None if results are annotated with theirs.
        check: runs before either implementation under QLA_CHECK=1, with the same arguments.
    """

    def decorate(run: Callable[..., R]) -> Operator[R]:
        on_cuda = run if home is None else imported_late(home, run.__name__)
        operator = Operator(run, on_cuda, fake)
        if check is not None:
            operator.on_cuda = _checked(operator.on_cuda, check)
            operator.on_cpu = _checked(operator.on_cpu, check)
        return operator

    return decorate


def _checked(run: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    def run_checked(*given: Any) -> Any:
        if checks_contents():
            check(*given)
        return run(*given)

    return run_checked


def _plainly(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_plainly(*given: Any, **flags: Any) -> Any:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return run(*given, **flags)

    return run_plainly


def _defaults(run: Callable[..., Any]) -> dict[str, Any]:
    parameters, none = inspect.signature(run).parameters, inspect.Parameter.empty
    return {name: x.default for name, x in parameters.items() if x.default is not none}


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "_fields")


def _flattened(hints: Mapping[str, Any]) -> dict[str, Any]:
    """Returns type hints by name, with the fields of records in place of the records."""
    flat: dict[str, Any] = {}
    for name, hint in hints.items():
        flat |= get_type_hints(hint, include_extras=True) if _is_record(hint) else {name: hint}
    return flat


def _regrouped(records: Iterable[Any], fields: Sequence[Any]) -> list[Any]:
    rest = iter(fields)
    return [record(*(next(rest) for _ in record._fields)) for record in records]


def _entries(hints: Mapping[str, Any]) -> list[Entry]:
    """Returns the entries of a signature that stand in annotations."""
    texts = {name: get_args(x)[1] for name, x in hints.items() if get_origin(x) is Annotated}
    return [Entry.of(f"{name} {x}") for name, x in texts.items() if hints[name] not in _IN_SCHEMAS]


def _fake_of(fields: Mapping[str, Any], results: Any) -> Callable[..., Any]:
    """Returns a function that makes empty results as their annotations say."""
    arguments, made = _entries(fields), _entries(_flattened({"y": results}))

    def fake(*given: Any, **flags: Any) -> Any:
        if results is type(None):
            return None
        tensors = {**dict(zip(fields, given, strict=False)), **flags}
        sizes: dict[str, int] = {}
        for entry in arguments:
            entry.fits(tensors[entry.name].shape, sizes)
        empty = [entry.empty(tensors, sizes) for entry in made]
        return results(*empty) if _is_record(results) else empty[0]

    return fake
