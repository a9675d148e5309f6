"""Gated-delta-net layers of Megatron-Core on our kernels, for training.

    from qla_kernels import integrations
    integrations.megatron.swap(model)  # a model, or the list of its chunks
    integrations.megatron.restore(model)

After `swap`, the forward of a layer calls the layer's projections, and `gated_delta_net` between
them. It works on the heads of its rank, as the layer's own forward does: tensor parallelism splits
the heads over ranks, and context parallelism exchanges tokens for heads. Calls with an inference
context still run the layer's own forward, and so do all calls of a layer whose norm has hooks other
than those of Megatron's DistributedDataParallel.

Layers whose own forward is not known do not change. A forward is known if it, and the methods that
it calls, use exactly the names that they use in one of the `RELEASES`.
"""

import functools
import hashlib
import importlib
import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from qla_kernels.conv.shapes import WIDTHS
from qla_kernels.conv.validate import flattens
from qla_kernels.hybrid import gated_delta_net
from qla_kernels.runtime.arguments import described, flag
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.sm90 import Reason, tma_readable

NAME, HOME = "qla_kernels.integrations.megatron", "megatron.core.ssm.gated_delta_net"
WRAPPER = "megatron.core.distributed.distributed_data_parallel"
REGION = "recompute_of_qla_kernels"  # attribute of layers that `swap` changed: its `recompute`
RELEASES = {"4cf2a84b6ccab767": "0.18", "2fa95ab411ce87f9": "0.19"}  # by `names_of` of the layer

log = logging.getLogger("qla_kernels")


def swap(model: nn.Module | Sequence[nn.Module], *, recompute: bool = False) -> int:
    """Makes the gated-delta-net layers of a Megatron-Core model run on this package's kernels.

    A layer's forward then calls `gated_delta_net` between its projections. Parameters and
    checkpoints do not change. Logs a warning if the model has no such layers, and one that says why
    if some of them stay as they are.

    Args:
        model: a model of Megatron-Core, wrapped or not, or the list of its chunks.
        recompute: True saves memory: q, k and v are not saved, and the backward runs the
            convolution again.

    Returns:
        The number of layers that call `gated_delta_net` now.

    Raises:
        TypeError: `model` is not a module or a sequence of modules.
    """
    recompute = flag(f"{NAME}.swap", "recompute", recompute)
    layers = [*_layers("swap", model)]
    reasons: Counter[Reason] = Counter()
    for layer in layers:
        if (reason := _refused(layer)) is not None:
            reasons[reason] += 1
            continue
        layer.__dict__[REGION] = recompute
        layer.__dict__["forward"] = functools.partial(forward, layer)
    for (got, needs, fix), count in reasons.items():
        got = f"{count} of {len(layers)} layers stay as they are: {got}"
        log.warning("%s", need(NAME, got, needs, fix))
    if not layers:
        got, needs = "no layer is a GatedDeltaNet of Megatron-Core", "a model with such layers"
        log.warning("%s", need(NAME, got, needs, "pass the model that was built"))
    return len(layers) - sum(reasons.values())


def restore(model: nn.Module | Sequence[nn.Module]) -> int:
    """Undoes `swap`: gives the gated-delta-net layers of a model their own forward again.

    Returns the number of layers that `swap` had changed.
    """
    swapped = [layer for layer in _layers("restore", model) if REGION in layer.__dict__]
    for layer in swapped:
        del layer.__dict__[REGION], layer.__dict__["forward"]
    return len(swapped)


def forward(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    inference_context: Any = None,
    packed_seq_params: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces the forward of a Megatron-Core gated-delta-net layer, after `swap`.

    Runs `gated_delta_net` between the layer's projections. Calls for inference run the layer's own
    forward, and so does a layer with other hooks on its norm than Megatron's. Arguments that are
    not listed are only passed on to that forward.

    Args:
        layer: the layer.
        hidden_states: [T, B, hidden size], the tokens of this rank.
        inference_context: not None for inference.
        packed_seq_params: Megatron's bounds of packed sequences, or None.

    Returns:
        What the layer's output projection returns: its result and its bias.

    Raises:
        ValueError: the bounds do not cover the tokens, or the length of a sequence is not a
            multiple of twice the ranks of context parallelism.
    """
    infers = inference_context is not None or kwargs.get("inference_params") is not None
    if infers or not _has_known_hooks(layer.out_norm):
        others = attention_mask, inference_context, packed_seq_params, *args
        return type(layer).forward(layer, hidden_states, *others, **kwargs)
    for hook in layer.out_norm._forward_pre_hooks.values():
        hook(layer.out_norm, ())  # Megatron's: waits until the weight has been gathered
    group = layer.pg_collection.cp
    tokens = hidden_states.shape[0] * layer.sp_size * group.size()
    bounds, bounds_cpu = _bounds(packed_seq_params, tokens, group.size())
    order = _order(bounds, tokens, group.size(), hidden_states.device)
    keys, values, heads = layer.qk_dim_local_tp, layer.v_dim_local_tp, layer.num_v_heads_local_tp
    x, _ = layer.in_proj(hidden_states)
    x = _heads_of_rank(x, [keys, keys, values, values, heads, heads], order, group)
    sizes = [size // group.size() for size in (2 * keys + values, values, heads, heads)]
    mixed_qkv, z, b, a = torch.split(x.transpose(0, 1), sizes, -1)
    mixed_qkv, z = _readable(mixed_qkv), _readable(z)
    share = functools.partial(_share, group=group)
    weight = layer.out_norm.weight
    y, _ = gated_delta_net(
        mixed_qkv,
        a,
        b,
        share(layer.A_log, [heads]),
        share(layer.dt_bias, [heads]),
        share(layer.conv1d.weight.squeeze(1), [keys, keys, values]),
        None if layer.conv1d.bias is None else share(layer.conv1d.bias, [keys, keys, values]),
        "silu",
        key_heads=keys // layer.key_head_dim // group.size(),
        z=z.view(*z.shape[:2], -1, layer.value_head_dim),
        norm_weight=weight.float() + 1 if layer.config.layernorm_zero_centered_gamma else weight,
        norm_eps=float(layer.config.layernorm_epsilon),
        use_qk_l2norm_in_kernel=layer.use_qk_l2norm,
        cu_seqlens=bounds,
        cu_seqlens_cpu=bounds_cpu,
        recompute=layer.__dict__[REGION],
    )
    return layer.out_proj(_tokens_of_rank(y.flatten(2).transpose(0, 1), order, group))


def _bounds(params: Any, tokens: int, world: int) -> tuple[Tensor | None, Tensor | None]:
    """Returns the bounds of packed sequences, and a copy of them on the CPU.

    Both are None if nothing is packed. Waits for the GPU, as Megatron does. Raises ValueError
    unless the bounds cover the tokens, and unless each sequence can be split over the ranks of
    context parallelism.

    Args:
        params: Megatron's packed_seq_params, or None.
        tokens: number of tokens of a row, on all ranks together.
        world: number of ranks of context parallelism.
    """
    if params is None or params.qkv_format != "thd":
        _check_dealt([tokens], world)
        return None, None
    bounds, others = params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded
    bounds = params.cu_seqlens_q if bounds is None else bounds
    others = params.cu_seqlens_kv if others is None else others
    copy = bounds.cpu()
    ends: list[int] = copy.tolist()
    if others is not None and others is not bounds and others.tolist() != ends:
        got = f"cu_seqlens_q is {ends} and cu_seqlens_kv is {others.tolist()}"
        raise ValueError(need(NAME, got, "the same bounds", "pass one tensor for both"))
    if not ends or ends[0] != 0 or ends[-1] != tokens or ends != sorted(ends):
        got, needs = f"cu_seqlens_q is {ends}", f"to start at 0, never fall, and end at {tokens}"
        raise ValueError(need(NAME, got, needs, "count padding in cu_seqlens_q_padded"))
    _check_dealt([b - a for a, b in itertools.pairwise(ends)], world)
    return bounds, copy


def _check_dealt(lengths: list[int], world: int) -> None:
    """Raises ValueError unless sequences of these lengths can be split over `world` ranks."""
    if world > 1 and any(length % (2 * world) for length in lengths):
        got, needs = f"sequences of {lengths} tokens", f"multiples of {2 * world} on {world} ranks"
        raise ValueError(need(NAME, got, needs, "pad each sequence"))


def _order(bounds: Tensor | None, tokens: int, world: int, device: torch.device) -> Tensor | None:
    """Returns the indices of the tokens that ranks hold, rank after rank; None for one rank.

    Each sequence is cut into 2 * world chunks of equal length. Rank r holds the r-th chunk from the
    start, and the r-th from the end.
    """
    if world == 1:
        return None
    places = torch.arange(tokens, device=device)
    bounds = places.new_tensor([0, tokens]) if bounds is None else bounds.to(places)
    sequence = torch.bucketize(places, bounds[1:], right=True)
    chunk = (places - bounds[sequence]) * 2 * world // bounds.diff()[sequence]
    return torch.minimum(chunk, 2 * world - 1 - chunk).argsort(stable=True)


def _heads_of_rank(x: Tensor, sections: list[int], order: Tensor | None, group: Any) -> Tensor:
    """Exchanges tokens for heads between ranks: returns x [all tokens, B, C / ranks].

    Before the exchange a rank has some of the tokens with all channels, [tokens of this rank, B,
    C]; afterwards it has all tokens with some of the channels.

    Args:
        x: the output of the input projection on this rank.
        sections: channels of queries, keys, values and so on, which add up to C. A rank gets an
            equal part of each.
        order: the result of `_order`; None returns x.
        group: the ranks of context parallelism.
    """
    if order is None:
        return x
    parts = [part.chunk(group.size(), -1) for part in torch.split(x, sections, -1)]
    x = torch.cat([*itertools.chain.from_iterable(zip(*parts, strict=True))], -1)
    home = importlib.import_module(HOME)
    x = home.tensor_a2a_cp2hp(x, 0, -1, group, undo_attention_load_balancing=False)
    return x.index_select(0, order.argsort())


def _tokens_of_rank(y: Tensor, order: Tensor | None, group: Any) -> Tensor:
    """Undoes `_heads_of_rank`: returns y [tokens of this rank, B, C], contiguous."""
    if order is None:
        return y.contiguous()
    home, y = importlib.import_module(HOME), y.index_select(0, order)
    exchanged: Tensor = home.tensor_a2a_hp2cp(y, 0, -1, group, redo_attention_load_balancing=False)
    return exchanged


def _share(x: Tensor, sections: list[int], group: Any) -> Tensor:
    """Returns the part of a parameter that belongs to the heads of this rank.

    `sections` are the lengths of the parameter's parts, such as queries, keys and values, each of
    which is split evenly over the ranks of `group`.
    """
    if group.size() == 1:
        return x
    return torch.cat([part.chunk(group.size())[group.rank()] for part in torch.split(x, sections)])


def _readable(x: Tensor) -> Tensor:
    return x if flattens(x) and tma_readable(x) else x.contiguous()


def _has_known_hooks(norm: nn.Module) -> bool:
    """Returns whether a norm has no hooks, or only those of Megatron's DistributedDataParallel.

    That gathers parameters while other layers compute, and waits for those of a module in a hook.
    """
    others = norm._forward_hooks, norm._backward_hooks, norm._backward_pre_hooks
    before = norm._forward_pre_hooks.values()
    return not any(others) and all(hook.__module__ == WRAPPER for hook in before)


def _layers(verb: str, model: Any) -> Iterator[Any]:
    """Returns the gated-delta-net layers of a model, or of a list of its chunks.

    Raises TypeError, which names the function `verb`, for anything else.
    """
    chunks = model if isinstance(model, list | tuple) else [model]
    for chunk in chunks:
        if not isinstance(chunk, nn.Module):
            needs = "a torch.nn.Module, or a list of them"
            fix = "pass the model that was built"
            raise TypeError(need(f"{NAME}.{verb}", described("model", chunk), needs, fix))
    modules = itertools.chain.from_iterable(chunk.modules() for chunk in chunks)
    return (module for module in modules if _is_gated_delta_net(type(module)))


def _is_gated_delta_net(kind: type) -> bool:
    """Returns whether a class is Megatron's GatedDeltaNet, or derived from it."""
    return any(
        c.__name__ == "GatedDeltaNet" and c.__module__.startswith(HOME) for c in kind.__mro__
    )


def _refused(layer: Any) -> Reason | None:
    """Returns None if `swap` can change a layer, else the reason why it does not.

    A reason is (got, needs, fix), three texts for `errors.need`.
    """
    stays = "integrations.fla.register() serves its rule"
    if REGION not in layer.__dict__ and "forward" in layer.__dict__:
        return "another library replaced their forward", "Megatron's", "undo that, or swap before"
    layer_class: Any = type(layer)
    if names_of(layer_class) not in RELEASES:
        needs = f"that of Megatron-Core {' or '.join(RELEASES.values())}"
        return "their forward is of another release", needs, stays
    norm, config = layer.out_norm, layer.config
    if config.normalization != "RMSNorm" or getattr(norm, "bias", None) is not None:
        return f"their output norm is {type(norm).__name__}", "an RMSNorm", stays
    if not isinstance(getattr(norm, "weight", None), Tensor):
        return f"their output norm is {type(norm).__name__}", "a norm with a weight", stays
    if layer.activation not in ("silu", "swish"):
        return f"their activation is {layer.activation}", "silu", stays
    if layer.conv1d.weight.shape[-1] not in WIDTHS:
        needs = f"a width from {WIDTHS[0]} to {WIDTHS[-1]}"
        return f"their convolution has width {layer.conv1d.weight.shape[-1]}", needs, stays
    if getattr(layer, "recompute_norm_out", False):
        fix = "leave it out; swap(model, recompute=True) saves other memory"
        return "recompute_modules has gdn_norm_out", "none: we cannot run the norm again", fix
    key_heads = layer.qk_dim_local_tp // layer.key_head_dim
    ranks = layer.pg_collection.cp.size()
    if not key_heads or key_heads % ranks:
        got, needs = f"a rank has {key_heads} key heads", f"a multiple of the {ranks} ranks"
        return got, f"{needs} of context parallelism", "lower one of the two parallelisms"
    return None


@functools.cache
def names_of(layer_class: Any) -> str:
    """Returns a digest of the forward of a layer class, by which its release is recognised.

    The digest is of the names and floating-point constants that the code of the forward uses, with
    the methods of the same module that it calls.
    """
    names: set[str] = set()
    codes: list[Any] = [getattr(inspect.unwrap(layer_class.forward), "__code__", None)]
    while codes:
        if (code := codes.pop()) is None:
            continue
        new = {*code.co_names, *(repr(x) for x in code.co_consts if isinstance(x, float))} - names
        names |= new
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
        methods = [
            inspect.unwrap(x) for name in new if callable(x := getattr(layer_class, name, 0))
        ]
        codes += [f.__code__ for f in methods if getattr(f, "__module__", "").startswith(HOME)]
    return hashlib.sha256(" ".join(sorted(names)).encode()).hexdigest()[:16]
