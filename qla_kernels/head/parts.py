"""Takes the weights out of the module of a head: an nn.Linear, or PEFT's adapters around one."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qla_kernels.runtime.errors import Unsupported, need

FIX = "pass a weight [V, D], or compute logits and call gather_logprobs"


class Parts(NamedTuple):
    """The tensors from which logits are computed: hidden weight^T + bias + low up^T."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    low: Tensor | None = None  # [N, r] hidden times LoRA's first factor; None without LoRA
    up: Tensor | None = None  # [V, r] LoRA's second factor


def parts_of(op: str, head: nn.Module, hidden: Tensor) -> Parts:
    """Returns the tensors from which a head's module computes the logits of `hidden` [N, D].

    LoRA's first factor, dropout and scaling are applied here, differentiably: the result is the
    field `low`. Raises Unsupported, which names `op`, for modules other than nn.Linear and PEFT's
    LoRA around one.
    """
    if hasattr(head, "modules_to_save"):  # PEFT: a copy that is trained
        return parts_of(op, _saved_module(head), hidden)
    if hasattr(head, "base_layer"):
        return _with_adapters(op, head, hidden)
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(head, nn.Linear):
        got = f"a head of type {type(head).__name__}"
        raise Unsupported(need(op, got, "nn.Linear, LoRA around it, or a weight", FIX))
    return Parts(weight, bias)


def _saved_module(head: Any) -> nn.Module:
    active = head.active_adapters
    trained = bool(active) and not head.disable_adapters and active[0] in head.modules_to_save
    module: nn.Module = head.modules_to_save[active[0]] if trained else head.original_module
    return module


def _with_adapters(op: str, head: Any, hidden: Tensor) -> Parts:
    """Returns the tensors of a LoRA layer of PEFT; active adapters become one of higher rank."""
    base = parts_of(op, head.get_base_layer(), hidden)
    if head.disable_adapters:
        if head.merged:
            fix = "call model.unmerge_adapter() before"
            raise Unsupported(need(op, "a head with merged, disabled adapters", "one", fix))
        return base
    if head.merged:
        return base
    names = [name for name in head.active_adapters if name in getattr(head, "lora_A", ())]
    other = [name for name in names if name in getattr(head, "lora_variant", ())]
    if other or not hasattr(head, "lora_A"):
        got = f"a head with adapters of type {type(head).__name__}, {', '.join(other)}"
        raise Unsupported(need(op, got.rstrip(", "), "plain LoRA", FIX))
    lows, ups = [], []
    for name in names:
        down, up = head.lora_A[name], head.lora_B[name]
        if up.bias is not None:
            raise Unsupported(need(op, "a head with lora_bias", "LoRA without bias", FIX))
        x = hidden.to(down.weight.dtype)
        lows.append(down(head.lora_dropout[name](x)) * head.scaling[name])
        ups.append(up.weight)
    if not names:
        return base
    return base._replace(low=torch.cat(lows, 1), up=torch.cat(ups, 1))
