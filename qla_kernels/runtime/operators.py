"""Defines operators of `torch.ops.qla_kernels`, and calls them without torch's dispatcher.

The dispatcher takes the host as long as two or three launches. It is skipped where nothing could
observe the call: no compiler or tracer, no dispatch mode, no tensor subclass.
"""

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Annotated, Any, cast, get_type_hints

import torch
from torch import Tensor

from qla_kernels.runtime.native import recording
from qla_kernels.runtime.native.placeholders import Placeholder

_LIBRARY: Any = torch.library.Library("qla_kernels", "DEF")  # type: ignore[no-untyped-call]
# The strides of a call are accepted or refused when it is traced: Inductor must keep them.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

Overwritten = Annotated[Tensor, "overwritten"]  # the type of a record's field that is changed

# A field's type in torch's notation; each tensor that is changed has a letter of its own
_IN_SCHEMAS = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    list[int]: "int[]",
    Overwritten: "Tensor({}!)",
    Overwritten | None: "Tensor({}!)?",
    float: "float",
    bool: "bool",
    bool | None: "bool?",
    int: "int",
    str: "str",
}


def imported_late(module: str, function: str) -> Callable[..., Any]:
    """Returns a function that calls `function` of `module`, which it imports at its first call.

    Modules that launch kernels import all of a family's kernel files, so they come in late.
    """
    home = functools.cache(lambda: importlib.import_module(module))
    return lambda *args, **flags: getattr(home(), function)(*args, **flags)


def implementations(op: str, cuda: str, cpu: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the function `op` of two modules, for CUDA and CPU tensors, imported at first use."""
    return imported_late(cuda, op), imported_late(cpu, op)


def define(
    name: str, schema: str, fake: Callable[..., Any], **implementations: Callable[..., Any]
) -> Callable[..., Any]:
    """Defines `torch.ops.qla_kernels.<name>` and returns its default overload.

    Args:
        name: the operator's name.
        schema: its arguments and results, in torch's notation.
        fake: returns empty results of the right shapes, for tracing.
        implementations: a function for each dispatch key, such as CUDA and CPU.
    """
    _LIBRARY.define(name + schema, tags=_TAGS)
    for key, run in implementations.items():
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"qla_kernels::{name}", fake, lib=_LIBRARY)
    return cast(Callable[..., Any], getattr(torch.ops.qla_kernels, name).default)


def schema(records: Sequence[type], results: type | None) -> str:
    """Returns the schema of an operator, "(arguments) -> results" in torch's notation.

    Its arguments are the fields of the records, which are NamedTuple classes, in order. `results`
    is Tensor, the NamedTuple class of the results, or None for an operator that returns nothing.
    """
    arguments = ", ".join(_fields(record) for record in records)
    changed = arguments.count("{}!")
    arguments = arguments.format(*"abcdefgh"[:changed])
    if results is None:
        return f"({arguments}) -> ()"
    return f"({arguments}) -> {'Tensor' if results is Tensor else f'({_fields(results)})'}"


def _fields(record: type) -> str:
    hints = get_type_hints(record, include_extras=True)
    return ", ".join(f"{_IN_SCHEMAS[kind]} {name}" for name, kind in hints.items())


def define_on_records(
    name: str,
    records: Sequence[Any],
    results: Any,
    fake: Callable[..., Any],
    on_cuda: Callable[..., Any],
    on_cpu: Callable[..., Any],
) -> Callable[..., Any]:
    """Defines an operator whose arguments are the fields of records, which are NamedTuple classes.

    `fake` and the implementations take the records, and return an instance of `results`.

    Returns:
        A function that also takes the records. It skips the dispatcher as `skip_dispatcher` does.
    """
    ends = [0]
    for record in records:
        ends.append(ends[-1] + len(record._fields))
    parts = list(zip(records, ends, ends[1:], strict=False))

    def on_fields(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *fields: run(*(record(*fields[a:b]) for record, a, b in parts))

    implementations = {"CUDA": on_fields(on_cuda), "CPU": on_fields(on_cpu)}
    operator = define(name, schema(records, results), on_fields(fake), **implementations)

    def call(*given: Any) -> Any:
        run = _short_way(given, on_cuda, on_cpu)
        if run is not None:
            return run(*given)
        fields: tuple[Any, ...] = ()
        for record in given:
            fields = (*fields, *record)
        done = operator(*fields)
        return done if results in (Tensor, None) else results(*done)

    return call


def refuse_backward(name: str, refuse: Callable[..., Any]) -> None:
    """Calls `refuse` when autograd asks for gradients of the operator."""
    torch.library.register_autograd(f"qla_kernels::{name}", refuse, lib=_LIBRARY)


def skip_dispatcher(
    operator: Callable[..., Any], on_cuda: Callable[..., Any], on_cpu: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that calls an implementation at once where nothing observes the call.

    Otherwise it calls `operator`. The first argument decides between CUDA and CPU.
    """

    def call(*args: Any, **flags: Any) -> Any:
        return (_short_way((args,), on_cuda, on_cpu) or operator)(*args, **flags)

    return call


def define_direct(
    name: str, schema: str, fake: Callable[..., Any], cuda: str, cpu: str
) -> Callable[..., Any]:
    """Defines an operator that the modules `cuda` and `cpu` implement under its name.

    Returns a function that takes the operator's arguments and skips the dispatcher.
    """
    on_cuda, on_cpu = implementations(name, cuda, cpu)
    operator = define(name, schema, fake, CUDA=on_cuda, CPU=on_cpu)
    return skip_dispatcher(operator, on_cuda, on_cpu)


def _short_way(
    records: tuple[tuple[Any, ...], ...], on_cuda: Callable[..., Any], on_cpu: Callable[..., Any]
) -> Callable[..., Any] | None:
    """Returns the implementation for the first argument's device, or None for the dispatcher."""
    if _is_watched(records):
        return None
    x = records[0][0]
    return on_cuda if x.is_cuda else on_cpu if x.is_cpu else None


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
        or torch._C._len_torch_dispatch_stack() > (recording.active() is not None)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )
