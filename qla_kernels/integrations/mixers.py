"""Replaces the forward of gated-delta-net layers of transformers, and of their gated norms.

After `take_over`, a layer's forward calls the layer's projections, and `gated_delta_net` between
them. Some calls still run the layer's own forward: those with a cache, those of a layer whose
convolution or norm has hooks, and packed sequences that only the layer's own convolution can keep
apart. After `take_norm`, a norm's forward calls `gated_rms_norm`, or the norm's own forward for
calls that it refuses.

Layers and norms whose own forward is not known here do not change. A forward is known if its code
uses exactly the names that are listed here.
"""

import functools
import inspect
import re
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qla_kernels.conv.shapes import WIDTHS
from qla_kernels.conv.validate import ACTIVATIONS as CONV_ACTIVATIONS
from qla_kernels.hybrid import gated_delta_net
from qla_kernels.integrations.linear_layers import KEY, check_row, refuse_replicas
from qla_kernels.norm import gated_rms_norm, refusal
from qla_kernels.norm.autograd import without_saving
from qla_kernels.runtime.arguments import GATE_ACTIVATIONS

REGION = "region_of_qla_kernels"  # attribute of layers that `take_over` changed: a Region
CACHES = ("cache", "cache_params")  # names of the second argument of a layer's forward
MASKING = "apply_mask_to_padding_states"  # a function of the layer's Python module


class Projected(NamedTuple):
    """A record: the outputs of the input projections of a gated-delta-net layer.

    There are H key heads of size K, and HV value heads of size V.

    Attributes:
        mixed_qkv: [B, T, 2 * H * K + HV * V]: queries, keys and values, before the convolution.
        z: [B, T, HV, V] or [B, T, HV * V], the input of the output gate.
        b: [B, T, HV], the input of beta's sigmoid.
        a: [B, T, HV], the input of the gate, which computes each token's decay.
    """

    mixed_qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


def _qwen(layer: Any, x: Tensor) -> Projected:
    return Projected(
        layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)
    )


def _qwen_next(layer: Any, x: Tensor) -> Projected:
    parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    q, k, v, z, b, a = parts
    return Projected(torch.cat([part.flatten(2) for part in (q, k, v)], -1), z, b, a)


def _olmo(layer: Any, x: Tensor) -> Projected:
    mixed_qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    return Projected(mixed_qkv, layer.g_proj(x), layer.b_proj(x), layer.a_proj(x))


class Kind(NamedTuple):
    """A record: how to run one architecture of gated-delta-net layers of transformers.

    Its last two fields recognise the layer's own forward; a forward that was changed is not
    replaced.

    Attributes:
        project: runs a layer's input projections on hidden states [B, T, hidden size].
        norm: name of the layer's attribute that is its norm.
        out: name of the attribute that is its output projection.
        names: the names that the code of its own forward uses, except those that concern caches.
        numbers: the floating-point constants of that code.
    """

    project: Callable[[Any, Tensor], Projected]
    norm: str
    out: str
    names: frozenset[str]
    numbers: frozenset[float]


EVERYWHERE = """
    A_log F activation bias causal_conv1d_fn conv1d conv_kernel_size dt_bias exp float head_k_dim
    head_v_dim key_dim layer_idx pop reshape shape sigmoid softplus split squeeze torch
    torch_chunk_gated_delta_rule transpose value_dim weight
"""
OF_CACHES = re.compile("cache|state|past|update|recurrent|^layers$")
REPEATS = {"num_k_heads", "num_v_heads", "repeat_interleave"}  # until 5.19 they repeat key heads
NORM = "ACT2FN activation dtype float32 mean pow rsqrt to torch variance_epsilon weight"


def _kind(project: Any, norm: str, out: str, names: str, *numbers: float) -> Kind:
    every = {*EVERYWHERE.split(), norm, out, *names.split()}
    return Kind(project, norm, out, frozenset(every), frozenset(numbers))


KINDS = (
    _kind(_qwen, "norm", "out_proj", "in_proj_qkv in_proj_z in_proj_b in_proj_a"),
    _kind(
        _qwen_next, "norm", "out_proj", "in_proj_qkvz in_proj_ba fix_query_key_value_ordering cat"
    ),
    _kind(
        _olmo, "o_norm", "o_proj",
        "q_proj k_proj v_proj a_proj b_proj g_proj allow_neg_eigval cat view", 2.0,
    ),
)  # fmt: skip


class Region(NamedTuple):
    """A record that the replacement forward of a gated-delta-net layer reads.

    `take_over` installs this forward on a layer of transformers, and stores the record beside it.

    Attributes:
        kind: the architecture of the layer: its projections and the names of its attributes.
        masked: transformers' function that sets hidden states of padding to 0.
        recompute: True if the backward runs convolution and norm again, to save memory.
        theirs: the forward that the layer object had before; None if it was that of its class.
    """

    kind: Kind
    masked: Callable[[Tensor, Tensor | None], Tensor]
    recompute: bool
    theirs: Any


def forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The replacement forward that `take_over` installs on a gated-delta-net layer of transformers.

    Runs `gated_delta_net` between the layer's projections. Arguments and result are those of the
    layer's own forward, which runs calls with a cache, calls whose packed sequences only it keeps
    apart, layers with hooks on their convolution or norm, and all calls after `give_back`.
    """
    region: Region | None = getattr(layer, REGION, None)
    if region is None or not _runs(layer, region, hidden_states, args, kwargs):
        if region is None or region.theirs is None:
            return type(layer).forward(layer, hidden_states, *args, **kwargs)
        return region.theirs(hidden_states, *args, **kwargs)
    if hidden_states.device != layer.A_log.device:  # a replica calls the forward of its original
        refuse_replicas(f"inputs on {hidden_states.device}, weights on {layer.A_log.device}")
    mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
    x, layout = region.masked(hidden_states, mask), kwargs.get(KEY)
    if layout is not None:
        check_row(x.shape[0], x.shape[1], layout)
    inputs, norm = region.kind.project(layer, x), getattr(layer, region.kind.norm)
    mixed_qkv, z = _readable(inputs.mixed_qkv), _readable(inputs.z).to(inputs.mixed_qkv.dtype)
    y, _ = gated_delta_net(
        mixed_qkv,
        inputs.a,
        inputs.b,
        layer.A_log,
        layer.dt_bias,
        layer.conv1d.weight.squeeze(1),
        layer.conv1d.bias,
        layer.activation,
        key_heads=layer.num_k_heads,
        z=z.view(*z.shape[:2], -1, layer.head_v_dim),
        norm_weight=norm.weight,
        norm_eps=norm.variance_epsilon,
        z_activation=norm.activation,
        allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
        cu_seqlens=kwargs.get("cu_seq_lens_q"),
        layout=layout,
        recompute=region.recompute,
    )
    out = getattr(layer, region.kind.out)
    return without_saving(y.flatten(2), out) if region.recompute else out(y.flatten(2))


def _runs(
    layer: Any,
    region: Region,
    hidden_states: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    """Returns True if `gated_delta_net` can run a call, False if the layer's own forward must."""
    if any(x is not None for x in (*args[:1], *(kwargs.get(name) for name in CACHES))):
        return False
    bounds, seq_idx, layout = (kwargs.get(name) for name in ("cu_seq_lens_q", "seq_idx", KEY))
    if layout is not None and (bounds is not None or seq_idx is not None):
        return False
    if bounds is None and seq_idx is not None:
        return False
    if bounds is not None and hidden_states.shape[0] != 1:
        return False
    return not any(map(_has_hooks, (layer.conv1d, getattr(layer, region.kind.norm))))


def _has_hooks(module: nn.Module) -> bool:
    """Returns whether a call of a module runs hooks besides its forward."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_hooks
    return any(hooks) or hasattr(module, "_hf_hook")


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def take_over(layer: nn.Module, home: ModuleType, recompute: bool) -> bool:
    """Installs a forward that runs `gated_delta_net` on a gated-delta-net layer of transformers.

    If accelerate has wrapped the layer's forward, its wrapper stays, and calls the new one.

    Args:
        layer: the layer.
        home: transformers' module that defines the layer's class.
        recompute: True saves memory: the backward runs convolution and norm again. A later call may
            change it.

    Returns:
        True if the layer has the new forward now. False, and the layer is unchanged, if its own
        forward is not a known one, or if another library replaced it.
    """
    if (region := layer.__dict__.get(REGION)) is not None:
        layer.__dict__[REGION] = region._replace(recompute=recompute)
        return True
    layer_class: Any = type(layer)
    kind = _kind_of(layer_class, home)
    if kind is None or not _fits(layer, kind):
        return False
    slot = "_old_forward" if "_old_forward" in layer.__dict__ else "forward"
    theirs = layer.__dict__.get(slot)
    if slot == "forward" and theirs is not None and not is_ours(theirs):
        return False
    theirs = None if is_ours(theirs) else theirs
    layer.__dict__[REGION] = Region(kind, getattr(home, MASKING), recompute, theirs)
    layer.__dict__[slot] = functools.partial(forward, layer)
    return True


def give_back(layer: nn.Module) -> None:
    """Undoes `take_over`: a gated-delta-net layer runs its own forward again.

    Does nothing if `take_over` did not change the layer.
    """
    region = layer.__dict__.pop(REGION, None)
    if region is None:
        return
    for slot in ("forward", "_old_forward"):
        if is_ours(layer.__dict__.get(slot)):
            if region.theirs is None and slot == "forward":
                del layer.__dict__[slot]
            else:  # accelerate calls this attribute
                theirs = functools.partial(type(layer).forward, layer)
                layer.__dict__[slot] = theirs if region.theirs is None else region.theirs


def is_ours(function: Any) -> bool:
    """Returns whether a function is the replacement forward that `take_over` installs."""
    return isinstance(function, functools.partial) and function.func is forward


def is_taken_over(layer: nn.Module) -> bool:
    """Returns whether `take_over` has installed its replacement forward on a layer."""
    return layer.__dict__.get(REGION) is not None


def take_norm(layer: nn.Module) -> None:
    """Makes the gated RMSNorm of a layer run on this package's kernel, `gated_rms_norm`.

    Installs `normalised` as the norm's forward. Does nothing if the layer has no gated norm, if the
    norm's own forward is not a known one, or if another library replaced it.
    """
    for name in ("norm", "o_norm"):
        norm = getattr(layer, name, None)
        if isinstance(norm, nn.Module) and "forward" not in norm.__dict__ and _is_gated(norm):
            norm.__dict__["forward"] = functools.partial(normalised, norm)


def give_norm_back(layer: nn.Module) -> None:
    """Undoes `take_norm`: the gated RMSNorm of a layer runs its own forward again."""
    for name in ("norm", "o_norm"):
        norm = getattr(layer, name, None)
        function = norm.__dict__.get("forward") if isinstance(norm, nn.Module) else None
        if isinstance(function, functools.partial) and function.func is normalised:
            del norm.__dict__["forward"]


def normalised(norm: Any, hidden_states: Tensor, gate: Tensor) -> Any:
    """The replacement forward that `take_norm` installs on a gated RMSNorm: runs `gated_rms_norm`.

    Runs the norm's own forward if `gated_rms_norm` refuses the tensors.

    Args:
        norm: the module.
        hidden_states: its input, [N, V] or with more dimensions before V.
        gate: the input of its gate, of the same shape.
    """
    x, z = _readable(hidden_states), _readable(gate)
    same = x.dtype == z.dtype and x.shape == z.shape
    if not same or x.dim() not in (2, 3, 4) or refusal(x, z, norm.weight) is not None:
        return type(norm).forward(norm, hidden_states, gate)
    return gated_rms_norm(x, z, norm.weight, norm.variance_epsilon, norm.activation)


def _fits(layer: Any, kind: Kind) -> bool:
    """Returns whether a layer's norm, convolution and activation are ones that our forward runs."""
    norm = getattr(layer, kind.norm, None)
    width = layer.conv1d.weight.shape[-1]
    return (
        isinstance(norm, nn.Module)
        and _is_gated(norm)
        and width in WIDTHS
        and layer.activation in CONV_ACTIVATIONS
    )


def _is_gated(norm: nn.Module) -> bool:
    known = _names(type(norm).forward) == (frozenset(NORM.split()), frozenset())
    return (
        known
        and getattr(norm, "activation", None) in GATE_ACTIVATIONS
        and type(getattr(norm, "variance_epsilon", None)) is float
    )


@functools.cache
def _kind_of(layer_class: Any, home: ModuleType) -> Kind | None:
    """Returns the kind of a layer class, or None if its forward is not one that we know.

    `home` is transformers' module that defines the class.
    """
    if not hasattr(home, MASKING) or not _is_of(layer_class.forward, home):
        return None
    names, numbers = _names(layer_class.forward)
    names = frozenset(name for name in names - REPEATS if OF_CACHES.search(name) is None)
    matches = (kind for kind in KINDS if (kind.names, kind.numbers) == (names, numbers))
    return next(matches, None)


def _is_of(function: Any, home: ModuleType) -> bool:
    """Returns whether a function, and those that it wraps, are defined in the package of `home`.

    They are not if another library wrapped or replaced a forward.
    """
    package = home.__name__.partition(".")[0]
    while function is not None:
        if getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0] != package:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


@functools.cache
def _names(function: Any) -> tuple[frozenset[str], frozenset[float]]:
    """Returns the names and the floating-point constants of a function's code."""
    names: set[str] = set()
    numbers: set[float] = set()
    codes: list[Any] = [getattr(inspect.unwrap(function), "__code__", None)]
    while codes:
        if (code := codes.pop()) is not None:
            names.update(code.co_names)
            numbers.update(x for x in code.co_consts if isinstance(x, float))
            codes += [x for x in code.co_consts if isinstance(x, CodeType)]
    return frozenset(names), frozenset(numbers)
