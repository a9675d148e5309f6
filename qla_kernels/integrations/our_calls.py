"""Refuses arguments that are no models, and calls of prepared models that would be silently wrong.

A prepared model uses an attention of ours, which reads a keyword of the model's call. Two mistakes
would go unnoticed: an attention_mask, which transformers drops for attentions that it does not know
although linear layers apply it; and a call after another attention was selected, which ignores the
keyword.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qla_kernels.integrations.full_attention import text_config
from qla_kernels.runtime.arguments import described
from qla_kernels.runtime.errors import need


@dataclass(eq=False)
class OurCalls:
    """A forward pre-hook of a decoder: refuses calls whose results would be silently wrong.

    It checks calls with a keyword that only this package's attention reads, such as
    "shared_prefix". Raises ValueError if such a call also has an attention_mask, or if the model
    has selected another attention, which would ignore the keyword.

    Attributes:
        op: the name of the function, for the error.
        keyword: the keyword.
        names: the names under which attentions that read the keyword are registered.
        without_mask: the error's advice: what to do instead of passing a mask.
        mask_at: position of attention_mask among the forward's arguments; -1 if it has none.
    """

    op: str
    keyword: str
    names: set[str]
    without_mask: str
    mask_at: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get(self.keyword) is None:
            return
        by_position = args[self.mask_at] if 0 <= self.mask_at < len(args) else None
        if kwargs.get("attention_mask", by_position) is not None:
            raise ValueError(need(self.op, "an attention_mask", "None", self.without_mask))
        if torch.compiler.is_compiling():
            return
        selected = text_config(module)._attn_implementation
        if selected not in self.names:
            got = f"a call with {self.keyword} and attention {selected!r}, which ignores it"
            needs = " or ".join(map(repr, sorted(self.names)))
            fix = f"call model.set_attn_implementation({min(self.names)!r}) before"
            raise ValueError(need(self.op, got, needs, fix))


LOAD = "load the model first, as by AutoModelForCausalLM.from_pretrained"


def expect_module(op: str, model: Any) -> None:
    """Raises TypeError, which names the function `op`, unless `model` is a torch.nn.Module."""
    if not isinstance(model, nn.Module):
        raise TypeError(need(op, described("model", model), "a torch.nn.Module", LOAD))


def expect_model_or_config(op: str, model: Any) -> None:
    """Raises TypeError if `model` is a builtin value, such as a model's name, a list or None.

    Models, and configs of any class, pass. The error names the function `op`.
    """
    if type(model).__module__ == "builtins":
        raise TypeError(need(op, described("model", model), "a model or its config", LOAD))


def expect_model(op: str, model: Any) -> None:
    """Raises TypeError unless `model` is a model of transformers, without a wrapper such as DDP.

    The error names the function `op`.
    """
    expect_model_or_config(op, model)
    if not hasattr(model, "set_attn_implementation"):
        fix = "pass the model itself, before another module wraps it"
        raise TypeError(need(op, type(model).__name__, "a model of transformers", fix))


def watch(model: nn.Module, op: str, keyword: str, names: set[str], without_mask: str) -> None:
    """Makes a model refuse calls whose results would be silently wrong.

    Installs an `OurCalls` hook on the model's decoder: it raises ValueError for calls with
    `keyword` that also have an attention_mask, or run another attention. If the decoder has such a
    hook for the same keyword, that one stays.

    Args:
        model: a model of transformers.
        op: the name of the function, for errors.
        keyword: the keyword of the model's forward that this package's attention reads, such as
            "shared_prefix".
        names: the names under which attentions that read `keyword` are registered.
        without_mask: the advice in the error for calls with an attention_mask.
    """
    module = getattr(model, "base_model", model)
    parameters = [*inspect.signature(module.forward).parameters]
    mask_at = parameters.index("attention_mask") if "attention_mask" in parameters else -1
    present = [x for x in module._forward_pre_hooks.values() if isinstance(x, OurCalls)]
    if all(hook.keyword != keyword for hook in present):
        hook = OurCalls(op, keyword, names, without_mask, mask_at)
        module.register_forward_pre_hook(hook, with_kwargs=True)
