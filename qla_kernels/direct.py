"""Calls operators without torch's dispatcher, for users who run without CUDA graphs.

The dispatcher takes as much host time as two or three launches.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qla_kernels import jit


def imported_late(module: str, function: str) -> Callable[..., Any]:
    """Returns a function that calls `function` of `module`, which it imports at its first call.

    Modules that launch kernels need TileLang, so they are not imported earlier.
    """
    home = functools.cache(lambda: jit.imported(module))
    return lambda *args, **flags: getattr(home(), function)(*args, **flags)


def direct(
    operator: Callable[..., Any], on_cuda: Callable[..., Any], on_cpu: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that calls `operator`, or its implementation where that is equivalent.

    The first argument has to be a tensor. If no compiler, tracer, mode or tensor subclass needs to
    see the call, a CUDA tensor goes to `on_cuda` and a CPU tensor to `on_cpu`; all other calls go
    to `operator`.
    """

    def call(*args: Any, **flags: Any) -> Any:
        if _is_watched(args):
            return operator(*args, **flags)
        x = args[0]
        if x.is_cuda:
            return on_cuda(*args, **flags)
        return (on_cpu if x.is_cpu else operator)(*args, **flags)

    return call


# Types that the dispatcher need not see. A list or tuple holds tensors that this package has made.
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, tuple))


def _is_watched(args: tuple[Any, ...]) -> bool:
    """Returns whether the call has to go through the dispatcher.

    True under a compiler, a tracer, a mode (fake tensors, selective checkpointing) or functorch,
    and if an argument has a type other than _PLAIN: a tensor subclass may override operators.
    """
    return (
        torch.compiler.is_compiling()
        or not _PLAIN.issuperset(map(type, args))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )
