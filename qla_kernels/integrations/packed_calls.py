"""Refuses packed calls of a prepared model that would run, with wrong results.

transformers drops a two-dimensional mask for attentions that it does not know, while linear layers
multiply it in; and an attention that is not ours ignores the layout.
"""

import inspect
from typing import Any

import torch
from torch import nn

from qla_kernels.errors import need
from qla_kernels.integrations.full_attention import text_config

OP = "shared_prefix attention"


class PackedCalls:
    """A hook before the forward of a model's decoder.

    Attributes:
        names: attentions that follow layouts.
    """

    def __init__(self, module: nn.Module, names: set[str]) -> None:
        self.names = names
        parameters = [*inspect.signature(module.forward).parameters]
        self.mask_at = parameters.index("attention_mask") if "attention_mask" in parameters else -1

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("shared_prefix") is None:
            return
        by_position = args[self.mask_at] if 0 <= self.mask_at < len(args) else None
        if kwargs.get("attention_mask", by_position) is not None:
            fix = "leave it out: the layout says who sees whom"
            raise ValueError(need(OP, "an attention_mask", "None", fix))
        if torch.compiler.is_compiling():
            return
        selected = text_config(module)._attn_implementation
        if selected not in self.names:
            got = f"a packed call with attention {selected!r}, which ignores the layout"
            needs = " or ".join(map(repr, sorted(self.names)))
            fix = f"call model.set_attn_implementation({min(self.names)!r}) before"
            raise ValueError(need(OP, got, needs, fix))


def watch(model: nn.Module, names: set[str]) -> None:
    """Installs the hook, on the module through which all calls of the model go; once."""
    module = getattr(model, "base_model", model)
    if not any(isinstance(hook, PackedCalls) for hook in module._forward_pre_hooks.values()):
        module.register_forward_pre_hook(PackedCalls(module, names), with_kwargs=True)
