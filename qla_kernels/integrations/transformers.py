"""Gated-delta-net layers of Hugging Face transformers (Qwen3-Next, Qwen3.5, OLMo hybrid).

    from qla_kernels.integrations import transformers
    transformers.swap(model)  # returns the number of layers that run our kernels now

Until transformers 5.14 a layer holds the functions it calls, `chunk_gated_delta_rule` for prefill
and training and `recurrent_gated_delta_rule` for decoding; `swap` replaces them in each layer.
Since 5.15 a layer calls functions of its module, which all models of that kind share; `swap`
replaces them in the module. This file does not import transformers.

There is no fallback: a call that our functions refuse, such as fp32 on a GPU, raises.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from qla_kernels.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from qla_kernels.integrations.layout import readable

# Our functions for q, k and v as a convolution leaves them: without its kernel, with a last stride
# other than 1. Layers hold these two functions, and a layer is pickled by their names here.


def chunk(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    return chunk_gated_delta_rule(*readable(q, k, v), *args, **kwargs)


def recurrent(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    return fused_recurrent_gated_delta_rule(*readable(q, k, v), *args, **kwargs)


log = logging.getLogger("qla_kernels")

HOLDS, SHARES = "chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"
HELD: dict[str, Callable[..., Any]] = {  # by a layer
    HOLDS: chunk,
    "recurrent_gated_delta_rule": recurrent,
}
SHARED: dict[str, Callable[..., Any]] = {  # by the layers of a module
    SHARES: chunk,
    "torch_recurrent_gated_delta_rule": recurrent,
}
TAKES: dict[Callable[..., Any], Callable[..., Any]] = {  # the function whose keywords each takes
    chunk: chunk_gated_delta_rule,
    recurrent: fused_recurrent_gated_delta_rule,
}
BEFORE = "before_qla_kernels"  # the attribute that keeps the original functions


def swap(model: nn.Module) -> int:
    """Makes the gated-delta-net layers of `model` call our functions; repeating it changes nothing.

    Returns:
        The number of layers of `model` that do; a warning is logged if there are none. Where layers
        share their module's functions, the layers of other models change as well.
    """
    holders = list(_holders(model))
    for layer in holders:
        before = layer.__dict__.setdefault(BEFORE, {})
        for name, ours in HELD.items():
            if getattr(layer, name, ours) is not ours:
                before[name] = getattr(layer, name)
                setattr(layer, name, ours)
    sharers = list(_sharers(model))
    for _, home in sharers:
        for name, ours in SHARED.items():
            if hasattr(home, name) and not hasattr(getattr(home, name), BEFORE):
                setattr(home, name, _in_place_of(getattr(home, name), ours))
    if not holders and not sharers:
        log.warning(
            "%s has no layer to swap: none holds %s, and none is a %s of a module with %s",
            type(model).__name__, HOLDS, "...GatedDeltaNet", SHARES,
        )  # fmt: skip
    return len(holders) + len(sharers)


def restore(model: nn.Module) -> int:
    """Undoes `swap`, and returns the number of layers for which functions were restored."""
    layers = [layer for layer in _holders(model) if BEFORE in layer.__dict__]
    for layer in layers:
        for name, theirs in layer.__dict__.pop(BEFORE).items():
            setattr(layer, name, theirs)
    sharers = list(_sharers(model))
    undone = [home for _, home in sharers if hasattr(getattr(home, SHARES), BEFORE)]
    for home in undone:
        for name in SHARED:
            if theirs := getattr(getattr(home, name, None), BEFORE, None):
                setattr(home, name, theirs)
    return len(layers) + len(undone)


def _holders(model: nn.Module) -> Iterator[nn.Module]:
    return (m for m in model.modules() if callable(getattr(m, HOLDS, None)))


def _sharers(model: nn.Module) -> Iterator[tuple[nn.Module, ModuleType]]:
    for layer in model.modules():
        if hasattr(layer, HOLDS):
            continue
        for kind in type(layer).__mro__:  # FSDP2 derives a class of its own from a layer's
            home = sys.modules.get(kind.__module__)
            if home is None or not hasattr(home, SHARES):
                continue
            if kind.__name__.endswith("GatedDeltaNet"):
                yield layer, home
                break


def _in_place_of(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with our implementation that drops keywords which it does not know.

    Layers pass keywords for other implementations as well. Keeps `theirs` in the attribute BEFORE.
    """
    taken = inspect.signature(TAKES[ours]).parameters.values()
    known = [p.name for p in taken if p.kind != p.VAR_KEYWORD]

    @functools.wraps(theirs)
    def run(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **{name: x for name, x in kwargs.items() if name in known})

    setattr(run, BEFORE, theirs)
    return run
