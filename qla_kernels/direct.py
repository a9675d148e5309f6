"""Operators called past torch's dispatcher, for the sake of those who run without graphs.

The dispatcher takes the host as long as two or three launches.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qla_kernels import jit


def imported_late(module: str, function: str) -> Callable[..., Any]:
    """A function of a module that is imported at its first call: launching needs TileLang."""
    home = functools.cache(lambda: jit.imported(module))
    return lambda *args, **flags: getattr(home(), function)(*args, **flags)


def direct(
    operator: Callable[..., Any], on_cuda: Callable[..., Any], on_cpu: Callable[..., Any]
) -> Callable[..., Any]:
    """`operator`, whose first argument is a tensor: by its implementations where nobody looks."""

    def call(*args: Any, **flags: Any) -> Any:
        if _is_watched(args):
            return operator(*args, **flags)
        x = args[0]
        if x.is_cuda:
            return on_cuda(*args, **flags)
        return (on_cpu if x.is_cpu else operator)(*args, **flags)

    return call


# A list or tuple holds tensors that this package has made.
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, tuple))


def _is_watched(args: tuple[Any, ...]) -> bool:
    """By a compiler, a tracer, a mode (fake tensors, selective checkpointing), functorch, or by an
    argument: any tensor may be a subclass that has something to say.
    """
    return (
        torch.compiler.is_compiling()
        or not _PLAIN.issuperset(map(type, args))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )
