"""Shared-prompt attention for unchanged models of Hugging Face transformers.

    from qla_kernels import integrations
    integrations.transformers_dualkv.register()
    model.set_attn_implementation("shared_prefix")
    integrations.transformers.swap(model)  # if it has gated-delta-net layers, as Qwen3.5
    integrations.transformers_dualkv.check(model)
    out = model(**batch.model_inputs())
    logprobs = batch.gather_logprobs(out.logits[0])

`prepare(model)` does the first four lines, and makes calls raise that would give wrong results.

The layout is a keyword of the call, which transformers passes to every layer, so activation
checkpointing has it when it recomputes; a global or a context would be gone by then. A call without
the layout raises ValueError. Other attention implementations infer sequence bounds from positions
that restart, which is wrong for packed responses: they would see each other or lose their prompt.
"""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from qla_kernels.dualkv import SharedLayout, shared_prefix_attention
from qla_kernels.integrations.full_attention import (
    LINEAR,
    anything_else,
    layer_kinds,
    looks_ahead,
    other_layers,
    text_config,
)
from qla_kernels.integrations.our_calls import expect_model, expect_model_or_config, watch
from qla_kernels.integrations.positions import check_positions
from qla_kernels.integrations.routers import router_loss
from qla_kernels.integrations.transformers import beside_layers_that_take_layouts, swap
from qla_kernels.integrations.transformers import layers_that_take_layouts as linear_layers
from qla_kernels.runtime.contents import checks_contents
from qla_kernels.runtime.errors import Unsupported, need

__all__ = ["attend", "check", "prepare", "register", "router_loss", "select"]

OP = "shared_prefix attention"
NO_MASK = "leave it out: the layout says who sees whom"
TRANSFORMERS = "4.57 or later"  # tested; it must make no masks for attentions it does not know

_names: set[str] = set()  # under which our attention is registered


def register(name: str = "shared_prefix") -> None:
    """Registers `shared_prefix_attention` with transformers under `name`.

    `model.set_attn_implementation(name)` then works. A second call with the same name changes
    nothing.

    Raises:
        Unsupported: transformers cannot be imported, or is too old.
    """
    try:
        theirs: Any = importlib.import_module("transformers")
        interface, _ = theirs.AttentionInterface, theirs.PreTrainedModel.set_attn_implementation
    except (ImportError, AttributeError) as error:
        got = f"transformers cannot be used ({error})"
        fix = "pip install -U transformers"
        op = "qla_kernels.integrations.transformers_dualkv"
        raise Unsupported(need(op, got, TRANSFORMERS, fix)) from error
    interface.register(name, attend)
    _names.add(name)


def prepare(model: nn.Module, name: str = "shared_prefix") -> None:
    """Prepares a transformers model for packed batches that store each shared prompt once.

    Makes gated-delta-net layers run on this package's kernels (`integrations.transformers.swap`),
    checks with `check` that the model gives right results, and selects this package's attention.
    Then call `model(**batch.model_inputs())` with a `SharedBatch`.

    Such a call raises ValueError if it has an attention_mask, or if another attention was selected
    since. For calls without such a batch, first select another attention by
    `model.set_attn_implementation`.

    Args:
        model: a transformers model, before DataParallel, DDP or FSDP wraps it.
        name: the name under which transformers gets this package's attention.

    Raises:
        TypeError: `model` is not such a model.
        Unsupported: transformers is missing or too old, or `check` refuses the model.
            Gated-delta-net layers may then be swapped already, which does not change their results.
    """
    expect_model(OP, model)
    register(name)
    if LINEAR in layer_kinds(model):
        swap(model)
    check(model)
    select(model, name)
    watch(model, OP, "shared_prefix", _names, NO_MASK)


def select(model: Any, name: str) -> None:
    """Selects an attention that is registered with transformers as `name` for a model's decoder.

    An image tower keeps its attention, while `model.set_attn_implementation(name)` would change it
    too.
    """
    text = text_config(model)
    parts = [
        x for x in getattr(model.config, "sub_configs", ()) if getattr(model.config, x) is text
    ]
    model.set_attn_implementation(dict.fromkeys(parts, name) or name)


def check(model: Any) -> None:
    """Raises Unsupported if a model would give wrong results for batches with shared prompts.

    Call it before the first step. A model may have layers with full causal attention, and
    gated-delta-net layers after `integrations.transformers.swap`.

    Args:
        model: a transformers model or its config. A config does not show whether the attention of
            the model can be replaced, and not always whether the model is causal.

    Raises:
        TypeError: `model` is neither a model nor a config.
        Unsupported: layers have sliding windows, capped scores, convolutions, a recurrence that was
            not swapped, or attention to later tokens; or the attention of the model cannot be
            replaced.
    """
    expect_model_or_config(OP, model)
    kinds = layer_kinds(model)
    if LINEAR in kinds and isinstance(model, nn.Module):
        ready, exchanged = linear_layers(model)
        if exchanged is not None:
            _refuse(f"a {exchanged} whose forward was exchanged", "transformers' own")
        if ready < kinds.count(LINEAR):
            got = f"{ready} of {kinds.count(LINEAR)} layers of {LINEAR} that follow layouts"
            fix = (
                "call qla_kernels.integrations.transformers.swap(model) before, and for OLMo "
                "hybrid install transformers 5.15 or later"
            )
            raise Unsupported(need(OP, got, "all of them", fix))
    complaint = anything_else(model, linear=isinstance(model, nn.Module))
    if complaint is not None:
        _refuse(*complaint)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    shared_prefix: SharedLayout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes the attention of a layer over a packed batch with shared prompts.

    transformers calls this function in place of its own attention.

    Args:
        module: the attention layer.
        query: [1, H, T, D], for the T packed tokens.
        key, value: [1, Hk, T, D].
        scaling: factor of the scores; D ** -0.5 if None.
        shared_prefix: the layout of the batch, which says which tokens see each other.

    The other arguments are options of transformers. Those that would change the result must be
    unset.

    Returns:
        (o [1, T, H, D], None): transformers expects a second result.

    Raises:
        ValueError: shared_prefix is missing, or the call has several rows, an attention_mask or a
            cache. On the CPU, and under QLA_CHECK=1, also if position_ids do not fit the layout.
        Unsupported: the layer has dropout, a sliding window, or another option besides causal
            attention; or other layers of the model would ignore the layout.
    """
    if shared_prefix is None:
        got, fix = "a call without shared_prefix", "pass shared_prefix=batch.layout to the model"
        unpacked = 'call model.set_attn_implementation("sdpa") first'
        fix += f", or, to generate or run it unpacked, {unpacked}"
        raise ValueError(need(OP, got, "the layout of the packed batch", fix))
    if query.shape[0] != 1:
        got, fix = f"a batch of {query.shape[0]} rows", "pack them, and pass batch.input_ids[None]"
        raise ValueError(need(OP, got, "one packed row", fix))
    if attention_mask is not None:
        raise ValueError(need(OP, "an attention_mask", "None", NO_MASK))
    if cache is not None or key.shape[2] != query.shape[2]:
        raise ValueError(need(OP, "a cache of keys", "none", "pass use_cache=False"))
    active = {
        "dropout": dropout or None,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "attention sinks": s_aux,
        "position_bias": position_bias,
    }
    for name, option in active.items():
        if option is not None:
            _refuse(name if isinstance(option, Tensor) else f"{name}={option}", "plain attention")
    if (ahead := looks_ahead(module, is_causal)) is not None:
        _refuse(ahead, "causal attention")
    if not torch.compiler.is_compiling():
        _check_neighbours(module)
        if query.is_cpu or checks_contents():
            check_positions(OP, shared_prefix, position_ids)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # norms return q and k in fp32, a projection v in 16 bits
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    return shared_prefix_attention(q, k, v, shared_prefix, scale=scaling)[None], None


def _check_neighbours(attention: nn.Module) -> None:
    """Raises Unsupported if other layers of the model would ignore a batch's shared prompts.

    `attention` is the attention layer that is called.
    """
    if (complaint := other_layers(attention)) is None:
        return
    if other_layers(attention, linear=True) is None:
        if beside_layers_that_take_layouts(attention):
            return
        fix = "call qla_kernels.integrations.transformers.swap(model) before"
        raise Unsupported(need(OP, complaint[0], "layers that follow the layout", fix))
    _refuse(*complaint)


def _refuse(got: str, needs: str) -> None:
    fix = "run such a model on sequences that are not packed, or switch it off in its config"
    raise Unsupported(need(OP, got, needs, fix))
