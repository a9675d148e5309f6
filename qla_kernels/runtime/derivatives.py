"""Refusals of derivatives that no kernel computes and that torch would otherwise take to be 0.

    refuse_forward_mode         tangents of inputs: no kernel propagates them
    refuse_second_derivative    derivatives of gradients: a backward is a kernel, too

Calls without such derivatives pay next to nothing for the checks.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad

from qla_kernels.runtime.errors import Unsupported, need


def refuse_forward_mode(op: str, *tensors: object) -> None:
    """Raises Unsupported if any of `tensors` has a forward-mode tangent (torch.func.jvp).

    Objects that are no tensors are ignored. `op` is the function that the error names.
    """
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return
    if any(isinstance(x, Tensor) and _has_tangent(x) for x in tensors):
        fix = "use reverse mode, such as torch.autograd.grad or functional.jacobian"
        got, needs = "an input has a forward-mode tangent", "tensors without tangents"
        raise Unsupported(need(op, got, needs, fix))


def wants_gradients(arguments: Iterable[object]) -> bool:
    """Returns whether autograd would record a call with these arguments.

    True if grad mode is on and at least one argument is a tensor that requires a gradient.
    """
    return torch.is_grad_enabled() and any(map(_needs_gradient, arguments))


def _has_tangent(x: Tensor) -> bool:
    """Returns whether x has a tangent: of torch.autograd.forward_ad, or of an active func.jvp."""
    transform = _functorch.peek_interpreter_stack()
    batched = transform is not None and transform.key() == _functorch.TransformType.Vmap
    unpack: Callable[[Tensor], Any] = forward_ad.unpack_dual
    if not batched and unpack(x).tangent is not None:
        return True
    if transform is None:
        return False
    if _functorch.maybe_get_level(x) == transform.level():
        x = _functorch.get_unwrapped(x)
    with temporarily_pop_interpreter_stack():
        return _has_tangent(x)


def refuse_second_derivative(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator for the `backward` of an autograd.Function without second derivatives.

    The decorated `backward` runs without grad mode. Its gradients can be used under
    create_graph=True, but a backward through them raises Unsupported; the error names `op`.

    It replaces torch's once_differentiable, which raises only if an incoming gradient requires a
    gradient. If the incoming gradient is a constant, such as that of a sum, second derivatives
    would be 0 without an error.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *incoming: Any) -> Any:
            if torch.compiler.is_compiling():
                with torch.no_grad():  # a compiled backward refuses by itself
                    return backward(ctx, *incoming)
            if not torch.is_grad_enabled():
                return backward(ctx, *incoming)
            ctx = _Unpacked(ctx)
            with torch.no_grad():
                grads = backward(ctx, *incoming)
            sources = [x for x in (*ctx.saved_tensors, *incoming) if _needs_gradient(x)]
            if not sources:
                return grads
            several = grads if isinstance(grads, tuple) else (grads,)
            return _Last.apply(op, len(several), *several, *sources)  # type: ignore[no-untyped-call]

        return once

    return decorate


def _needs_gradient(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


class _Unpacked:
    """A ctx that reads its saved tensors once and keeps them.

    Activation checkpointing hands saved tensors out only once, and they are needed twice.
    """

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Last(torch.autograd.Function):
    """Returns gradients unchanged, attached to the tensors they depend on; its backward raises."""

    @staticmethod
    def forward(ctx: Any, op: str, num: int, *tensors: Tensor | None) -> Any:
        ctx.op = op
        return tuple(None if x is None else x.detach() for x in tensors[:num])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        got, needs = "a derivative of its gradients is asked for", "first derivatives alone"
        fix = "detach the gradients, or differentiate the definition in `reference`"
        raise Unsupported(need(ctx.op, got, needs, fix))
