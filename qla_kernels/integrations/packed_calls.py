"""Checks calls of a swapped model for packed sequences that gated-delta-net layers would mix.

A row may hold several packed sequences. Softmax attention of transformers separates them where
position_ids restart. Gated delta nets and their convolutions only know the bounds in cu_seq_lens_q,
which must end where the row ends.
"""

import inspect
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qla_kernels.integrations.linear_layers import KEY, PACK
from qla_kernels.runtime import device
from qla_kernels.runtime.contents import checks_contents
from qla_kernels.runtime.errors import Unsupported, need

CACHES = ("cache", "past_key_values", "cache_params")
COLLATOR = "DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)"
RESTART = need(
    PACK,
    "position_ids that restart without cu_seq_lens_q: its sequences run into each other",
    "their bounds",
    f"pass cu_seq_lens_q, as transformers' {COLLATOR} does",
)

log = logging.getLogger("qla_kernels")


@dataclass(eq=False)
class PackedCalls:
    """A forward pre-hook of a decoder: warns if gated-delta-net layers would mix packed sequences.

    They do if position_ids restart in a row but the call has no cu_seq_lens_q, the bounds of the
    sequences. The hook logs a warning once, or raises Unsupported under QLA_CHECK=1. It raises
    ValueError if cu_seq_lens_q does not end where the row ends. Calls with a cache are not checked.

    On the CPU, and under QLA_CHECK=1, every call is checked. On a GPU, where a check waits for the
    GPU, only the first call with cu_seq_lens_q and the first one with position_ids alone are.

    Attributes:
        names: names of the forward's arguments, in order.
        looked: which of "cu_seq_lens_q" and "position_ids" have been checked on a GPU.
        warned: True after the warning.
    """

    names: tuple[str, ...]
    looked: set[str] = field(default_factory=set)
    warned: bool = False

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        call = dict(zip(self.names, args, strict=False)) | kwargs
        if any(call.get(name) is not None for name in (KEY, *CACHES)):
            return
        bounds, positions = call.get("cu_seq_lens_q"), call.get("position_ids")
        if bounds is not None:
            tokens = call.get("input_ids") if call.get("inputs_embeds") is None else None
            tokens = call.get("inputs_embeds") if tokens is None else tokens
            if tokens is not None and self._looks("cu_seq_lens_q", bounds):
                _check_end(bounds, tokens.shape[1])
        elif positions is not None and call.get("seq_idx") is None:
            mixes = self._looks("position_ids", positions) and restarts(
                positions, call.get("attention_mask")
            )
            if mixes and checks_contents():
                raise Unsupported(RESTART)
            if mixes and not self.warned:
                log.warning(RESTART)
                self.warned = True

    def _looks(self, name: str, x: Tensor) -> bool:
        """Returns whether to check x, the argument `name`; on a GPU that is True only once."""
        if x.is_cpu or checks_contents():
            return True
        if name in self.looked or (x.is_cuda and device.capturing()):
            return False
        self.looked.add(name)
        return True


def restarts(position_ids: Tensor, mask: Any) -> bool:
    """Returns True if position_ids decrease within any row, which shows packed sequences.

    Positions of one sequence never decrease; they fall where the next packed sequence begins. A
    token is compared with the one before it, unless either is padding.

    Args:
        position_ids: [B, T]; or [4, B, T] for RoPE with several axes (text, time, height, width),
            of which only index 0, text, is read. For other shapes the result is False.
        mask: the attention mask [B, T], 0 for padding. A mask of another type or shape, and None,
            are ignored.
    """
    rows = position_ids[0] if position_ids.dim() == 3 and len(position_ids) == 4 else position_ids
    if rows.dim() != 2:
        return False
    less = rows[:, 1:] < rows[:, :-1]
    if isinstance(mask, Tensor) and mask.shape[-1] == rows.shape[1] and mask.dim() == 2:
        is_token = mask != 0
        less = less & (is_token[:, 1:] & is_token[:, :-1]).to(less.device)
    return bool(less.any())


def _check_end(bounds: Tensor, tokens: int) -> None:
    end = int(bounds[-1]) if len(bounds) else 0
    if end != tokens:
        got = f"cu_seq_lens_q that ends at token {end} in a row of {tokens} tokens"
        fix = f"append {tokens}, which makes the padding a sequence, or cut the row"
        raise ValueError(need(PACK, got, "bounds that end where the row ends", fix))


def _decoder(model: nn.Module) -> nn.Module:
    """Returns the module inside a model that all calls of the model run, such as its decoder."""
    base = getattr(model, "base_model", model)
    return base if isinstance(base, nn.Module) else model


def watch(model: nn.Module) -> None:
    """Adds a hook that checks how later calls of a model describe packed sequences.

    The hook, a `PackedCalls`, runs before the model's decoder. In calls without a cache, it logs a
    warning if position_ids restart within a row but cu_seq_lens_q, the bounds of the packed
    sequences, is missing (under QLA_CHECK=1 it raises Unsupported). It raises ValueError if
    cu_seq_lens_q does not end where the row ends. A second call of `watch` changes nothing;
    `forget` removes the hook.
    """
    module = _decoder(model)
    if not any(isinstance(x, PackedCalls) for x in module._forward_pre_hooks.values()):
        names = tuple(inspect.signature(module.forward).parameters)
        module.register_forward_pre_hook(PackedCalls(names), with_kwargs=True)


def forget(model: nn.Module) -> None:
    """Removes the hook that `watch` added: later calls of the model are not checked any more."""
    module = _decoder(model)
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, PackedCalls)]:
        del hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
