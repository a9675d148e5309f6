"""Gated-delta-net layers of Hugging Face transformers (Qwen3-Next, Qwen3.5, OLMo hybrid).

    from qla_kernels import integrations
    integrations.transformers.swap(model)  # returns the number of layers that run our kernels now
    print(integrations.transformers.status(model))  # which layers call our functions

`swap` replaces the functions that these layers call: the gated delta rule, in one version for
prefill and training and one for decoding, and the convolution before it. Until transformers 5.14
the functions are attributes of each layer. Since 5.15 they are functions of a Python module, which
all models of a kind share; replacing them changes these models too. This file does not import
transformers.

Since 5.15 `swap` also replaces the forward of layers that it knows: in calls without a cache,
`gated_delta_net` then runs everything between the projections, with fewer launches (mixers.py).

In a call of the model with `shared_prefix=`, for a batch that stores shared prompts once, the
functions follow the layout of the batch (linear_layers.py, transformers_dualkv.py). With
`swap(model, batch_invariant=True)`, `generate` gives the same bits as a training forward
(rollouts.py).

If our convolution refuses a call, the layer's own one runs it. The gated delta rule has no
fallback: a call that our functions refuse, such as fp32 on a GPU, raises.
"""

import functools
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qla_kernels.dualkv import SharedLayout
from qla_kernels.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from qla_kernels.gdn.keywords import is_invariant
from qla_kernels.gdn.validate import refusal
from qla_kernels.integrations import mixers, packed_calls, rollouts
from qla_kernels.integrations.layout import readable
from qla_kernels.integrations.linear_layers import (
    KEY,
    OP,
    PACK,
    Held,
    HeldConvolution,
    PackedCall,
    check_apart,
    convolution,
    of_rows,
    rule,
)
from qla_kernels.integrations.our_calls import expect_module
from qla_kernels.integrations.rollouts import LayerCall
from qla_kernels.runtime import device
from qla_kernels.runtime.arguments import flag
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.sm90 import require

# Layers call these two functions. torch's convolution returns q, k and v with a last stride other
# than 1; they are copied then. The functions are top-level, so that layers can be pickled.


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *args: Any,
    shared_prefix: SharedLayout | None = None,
    qla_layer_call: LayerCall | None = None,
    **kwargs: Any,
) -> Any:
    """Gated delta rule in training and prefill; replaces transformers' chunk_gated_delta_rule.

    After `swap`, gated-delta-net layers call this function with the arguments of the original one,
    and get the same results: o [B, T, HV, V], and the final state or None.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        args, kwargs: the other arguments of `chunk_gated_delta_rule`, such as g and beta.
        shared_prefix: the layout of a packed batch that stores shared prompts once; None for any
            other batch.
        qla_layer_call: if not None, runs the rule such that training and `generate` have the same
            bits. None unless `swap` got batch_invariant=True.

    Raises:
        Unsupported: the call has both cu_seqlens and a cache, or is one that this package's
            `chunk_gated_delta_rule` refuses.
    """
    q, k, v = readable(q, k, v)
    if shared_prefix is None:
        _refuse_bounds_and_cache(**kwargs)
    if qla_layer_call is not None:
        return qla_layer_call(q, k, v, *args, shared_prefix=shared_prefix, **kwargs)
    if shared_prefix is not None:
        return rule(q, k, v, *args, layout=shared_prefix, **kwargs)
    return chunk_gated_delta_rule(q, k, v, *args, **kwargs)


def _refuse_bounds_and_cache(
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    initial_state: Tensor | None = None,
    **_: Any,
) -> None:
    """Raises Unsupported for a call with a cache and cu_seqlens, even the bounds of one sequence.

    With a cache, layers prepend its last inputs to those of the call, which would shift the bounds,
    and softmax attention would mix the sequences. The arguments are those of a layer's rule.
    """
    if cu_seqlens is not None and (output_final_state or initial_state is not None):
        fix = "pass use_cache=False, or set model.config.get_text_config().use_cache = False"
        raise Unsupported(need(PACK, "cu_seq_lens_q beside a cache", "no cache", fix))


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *args: Any,
    shared_prefix: SharedLayout | None = None,
    qla_layer_call: LayerCall | None = None,
    **kwargs: Any,
) -> Any:
    """Gated delta rule for decoding; replaces transformers' recurrent_gated_delta_rule.

    After `swap`, gated-delta-net layers call this function with the arguments of the original one,
    and get the same results: o [B, T, HV, V] and the final state.

    Args:
        q, k: [B, T, H, K], with few tokens T, usually 1.
        v: [B, T, HV, V].
        args, kwargs: the other arguments of `fused_recurrent_gated_delta_rule`, such as g and beta.
        shared_prefix: must be None, because packed batches with shared prompts have no cache.
        qla_layer_call: if not None, runs the rule such that `generate` has the bits of a training
            forward. None unless `swap` got batch_invariant=True.

    Raises:
        ValueError: shared_prefix is not None.
        Unsupported: the call has both cu_seqlens and a cache, or is one that this package's
            `fused_recurrent_gated_delta_rule` refuses.
    """
    if shared_prefix is not None:
        raise ValueError(need(OP, "a step of decoding", "a whole batch", "leave shared_prefix out"))
    _refuse_bounds_and_cache(**kwargs)
    return (qla_layer_call or fused_recurrent_gated_delta_rule)(*readable(q, k, v), *args, **kwargs)


log = logging.getLogger("qla_kernels")

HOLDS, SHARES = "chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"
HELD: dict[str, Callable[..., Any]] = {  # by the attribute of a layer that holds the function
    HOLDS: chunk,
    "recurrent_gated_delta_rule": recurrent,
}
SHARED: dict[str, Callable[..., Any]] = {  # by the function's name in a layer's Python module
    SHARES: chunk,
    "torch_recurrent_gated_delta_rule": recurrent,
}
CONVOLVES = "causal_conv1d_fn"  # the convolution's name, in a layer and in a module
# whether transformers' own convolution keeps sequences apart, by seq_idx
KEEPS_APART = any(map(find_spec, ("causal_conv1d", "kernels")))
TAKES: dict[Callable[..., Any], Callable[..., Any]] = {  # the function whose keywords each takes
    chunk: chunk_gated_delta_rule,
    recurrent: fused_recurrent_gated_delta_rule,
}
NOT_WHOLE = (
    "no layer's forward is one that we know; need layers of transformers from 5.15 on, and no"
    " batch_invariant; leave it out"
)
BEFORE = "before_qla_kernels"  # the attribute that keeps the original functions
# attribute of all modules of a model if its gated-delta-net layers can run shared prompts
BESIDE = "beside_qla_kernels"
PACKED = "packed_call_of_qla_kernels"  # attribute of layers until 5.14: a PackedCall
SIZES = "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim"  # attributes of layers
CALL = "call_of_qla_kernels"  # attribute of layers: a LayerCall, or None without batch_invariant


class SwappedLayers(NamedTuple):
    """Record: how many gated-delta-net layers of a model call this package's functions.

    str(x) is a sentence such as "qla_kernels runs in 36 of 36 Qwen3NextGatedDeltaNet".

    Attributes:
        ours: number of layers that call this package's functions, by the name of the layer's class.
        others: number of layers that do not, by the name of the layer's class.
    """

    ours: dict[str, int]
    others: dict[str, int]

    def __str__(self) -> str:
        swapped, every = Counter(self.ours), Counter(self.ours) + Counter(self.others)
        parts = [f"{swapped[name]} of {count} {name}" for name, count in every.items()]
        layers = ", ".join(parts) or "none: the model has no gated-delta-net layer"
        return f"qla_kernels runs in {layers}"


def swap(
    model: nn.Module, batch_invariant: bool | None = None, recompute: bool | None = None
) -> int:
    """Makes the gated-delta-net layers of a transformers model run on this package's kernels.

    Since transformers 5.15, the layers call functions of their Python module. `swap` replaces
    these, so other models with the same class of layer change too. `restore` undoes it; a second
    call of `swap` changes only the settings that it is given.

    Later calls of the model without a cache are checked. A warning is logged if position_ids
    restart within a row but cu_seq_lens_q is missing, because the layers then mix the packed
    sequences of the row. ValueError is raised if cu_seq_lens_q does not end where the row ends.

    Args:
        model: a transformers model, or another module that contains such layers.
        batch_invariant: True gives the gated delta rule of a token the same bits in a training
            forward and in `generate`, whatever else is in the batch; calls for which this is
            impossible raise Unsupported. None: layers that are already swapped keep their setting;
            for others, the environment variable QLA_BATCH_INVARIANT decides.
        recompute: True saves memory in training: the backward recomputes convolutions and gated
            norms. Works only in layers whose whole forward is replaced (`whole` counts them); logs
            a warning if there are none. None: layers that are already swapped keep their setting;
            others get False.

    Returns:
        The number of layers of `model` that call this package's functions; logs a warning if it is
        0.

    Raises:
        TypeError: `model` is not a torch.nn.Module.
        Unsupported: `model` contains a DataParallel, or a layer on a GPU whose head sizes the
            kernels do not have. A layer that moves to a GPU later raises in its first call.
    """
    expect_module("swap", model)
    again = None if recompute is None else flag("swap", "recompute", recompute)
    holders, sharers = list(_holders(model)), list(_sharers(model))
    _check_parallel(model)
    for layer in (*holders, *(layer for layer, _ in sharers)):
        _check_sizes(layer, batch_invariant)
    around = {child: parent for parent in model.modules() for child in parent.children()}
    for layer in holders:
        changed = _set_call(layer, batch_invariant, handed_on=False)
        if changed and BEFORE in layer.__dict__:
            _give_back(layer)
        if BEFORE not in layer.__dict__:
            _take_over(layer, around.get(layer))
    _mark(model)
    for layer, home in sharers:
        _set_call(layer, batch_invariant, handed_on=True)
        for name, ours in (SHARED | {CONVOLVES: convolution}).items():
            theirs = getattr(home, name, None)
            if theirs is not None and not hasattr(theirs, BEFORE):
                setattr(home, name, _in_place_of(theirs, ours))
        _take_region(layer, home, again)
    if again and not whole(model):
        log.warning("swap: recompute=True changes nothing: %s", NOT_WHOLE)
    if holders or sharers:
        packed_calls.watch(model)
    else:
        log.warning(
            "%s has no layer to swap: none holds %s, and none is a %s of a module with %s",
            type(model).__name__, HOLDS, "...GatedDeltaNet", SHARES,
        )  # fmt: skip
    return len(holders) + len(sharers)


def restore(model: nn.Module) -> int:
    """Undoes `swap`: the gated-delta-net layers of a model call transformers' own functions again.

    Since transformers 5.15, these are functions of a Python module, so other models with the same
    class of layer are restored too. The attention that `transformers_dualkv.prepare` selected stays
    selected.

    Returns:
        The number of layers of `model` that were restored, 0 if none was swapped.
    """
    expect_module("restore", model)
    packed_calls.forget(model)
    layers = [layer for layer in _holders(model) if BEFORE in layer.__dict__]
    for layer in layers:
        _give_back(layer)
    for module in model.modules():
        module.__dict__.pop(BESIDE, None)
        if (call := module.__dict__.pop(CALL, None)) is not None:
            call.forget()
    sharers = list(_sharers(model))
    for layer, _ in sharers:
        mixers.give_back(layer)
        mixers.give_norm_back(layer)
    undone = [home for _, home in sharers if hasattr(getattr(home, SHARES), BEFORE)]
    for home in undone:
        for name in (*SHARED, CONVOLVES):
            if theirs := getattr(getattr(home, name, None), BEFORE, None):
                setattr(home, name, theirs)
    return len(layers) + len(undone)


def status(model: nn.Module) -> SwappedLayers:
    """Counts which gated-delta-net layers of a model call this package's functions.

    This package's gated delta rule has no fallback: it raises an error for calls that it cannot
    run. So if a forward of the model raised none, it ran in all layers of the field `ours`, unless
    another library replaced the forward of such a layer.

    Returns:
        A record with the fields `ours` and `others`: numbers of layers, by the name of their class.
    """
    expect_module("status", model)
    layers = [(layer, BEFORE in layer.__dict__) for layer in _holders(model)]
    layers += [(layer, hasattr(getattr(home, SHARES), BEFORE)) for layer, home in _sharers(model)]
    ours, others = (
        dict(Counter(type(layer).__name__ for layer, swapped in layers if swapped is wanted))
        for wanted in (True, False)
    )
    return SwappedLayers(ours, others)


def whole(model: nn.Module) -> dict[str, int]:
    """Counts the layers whose whole forward `swap` replaced; returns the numbers by class name.

    In these layers, one call of `gated_delta_net` computes all that is between the input
    projections and the output projection. They need fewer launches, and `swap(model,
    recompute=True)` saves memory in them. In the other layers that `swap` changed, convolution and
    gated delta rule are replaced one by one. Calls with a cache run the layer's original forward in
    both.
    """
    expect_module("whole", model)
    layers = (layer for layer in model.modules() if mixers.is_taken_over(layer))
    return dict(Counter(type(layer).__name__ for layer in layers))


def layers_that_take_layouts(model: nn.Module) -> tuple[int, str | None]:
    """Counts the gated-delta-net layers of a model that can run packed batches with shared prompts.

    Such a batch is one row that stores each prompt once; its `SharedLayout` says which tokens form
    which sequence. Layers follow the layout after `swap`; other layers would take the row as one
    sequence.

    Returns:
        (count, name). `name` is the class of a counted layer whose forward another library
        replaced, so that it may not follow the layout; None if there is no such layer.
    """
    sharers = [(layer, home) for layer, home in _sharers(model) if _takes_layouts(home)]
    layers = [*filter(_follows, _holders(model)), *(layer for layer, _ in sharers)]
    others = [x for x in layers if "forward" in x.__dict__]
    others = [layer for layer in others if not mixers.is_ours(layer.__dict__["forward"])]
    others = [layer for layer in others if not hasattr(layer, "_old_forward")]  # accelerate's
    others += [x for x, home in sharers if type(x).forward.__module__ != home.__name__]
    return len(layers), type(others[0]).__name__ if others else None


def beside_layers_that_take_layouts(attention: nn.Module) -> bool:
    """Returns True if the gated-delta-net layers around an attention layer can run shared prompts.

    A packed batch with shared prompts is one row that stores each prompt once; its `SharedLayout`
    says which tokens form which sequence. Gated-delta-net layers follow the layout after `swap`;
    before, they would take the row as one sequence.

    Args:
        attention: an attention layer of the model.
    """
    home = _home(attention)
    return getattr(attention, BESIDE, False) or (home is not None and _takes_layouts(home))


def _check_parallel(model: nn.Module) -> None:
    """Raises Unsupported if a model has a DataParallel: its threads would share our state."""
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        fix = "use DistributedDataParallel: swap(model), wrap it, and start it by torchrun"
        raise Unsupported(need("swap", "a DataParallel", "one process for each GPU", fix))


def _check_sizes(layer: nn.Module, batch_invariant: bool | None) -> None:
    """Raises Unsupported if a layer is on a GPU and our kernels refuse its sizes or this GPU."""
    capability = _capability(layer)
    H, K, HV, V = (getattr(layer, name, None) for name in SIZES)
    if capability is None or H is None or K is None or HV is None or V is None:
        return
    is_already = batch_invariant is None and layer.__dict__.get(CALL) is not None
    anchored = is_already or is_invariant("swap", batch_invariant)
    q = torch.empty(1, 1, H, K, dtype=torch.bfloat16, device="meta")
    v = torch.empty(1, 1, HV, V, dtype=torch.bfloat16, device="meta")
    op = f"swap of a {type(layer).__name__}"
    require(refusal(q, q, v, anchored=anchored, capability=capability, op=op))


def _capability(layer: nn.Module) -> tuple[int, int] | None:
    """Returns the compute capability of the GPU that holds a layer; None if none does."""
    weight = next(layer.parameters(), None)
    return device.capability(weight.device) if weight is not None and weight.is_cuda else None


def _follows(layer: nn.Module) -> bool:
    """Returns whether a layer whose functions are its attributes can run shared prompts."""
    return isinstance(getattr(layer, CONVOLVES, None), HeldConvolution)


def _takes_layouts(home: ModuleType) -> bool:
    """Returns whether layers that call functions of the module `home` can run shared prompts."""
    return all(hasattr(getattr(home, name, None), BEFORE) for name in (SHARES, CONVOLVES))


def _take_over(layer: nn.Module, decoder_layer: nn.Module | None) -> None:
    """Replaces the functions that are attributes of a layer, as until transformers 5.14.

    The new functions read the layout of a batch with shared prompts from the call of the decoder
    layer. Without a decoder layer around it, or with another convolution than Qwen's, a layer
    cannot run such batches.
    """
    before, bits = layer.__dict__.setdefault(BEFORE, {}), layer.__dict__[CALL]
    follows = decoder_layer is not None and hasattr(layer, CONVOLVES) and hasattr(layer, "conv1d")
    layer.__dict__[PACKED] = call = PackedCall(mixes=not follows)
    for name, ours in HELD.items():
        if hasattr(layer, name):
            before[name] = getattr(layer, name)
            ours = ours if bits is None else functools.partial(ours, **{rollouts.KEY: bits})
            setattr(layer, name, Held(ours, call, packs=name == HOLDS) if follows else ours)
    if decoder_layer is not None:
        call.watch(decoder_layer)
    if follows:
        before[CONVOLVES] = getattr(layer, CONVOLVES)
        conv1d = layer.get_submodule("conv1d")
        setattr(layer, CONVOLVES, HeldConvolution(before[CONVOLVES], conv1d, call))


def _give_back(layer: nn.Module) -> None:
    """Undoes `_take_over`: restores the functions of a layer."""
    layer.__dict__.pop(PACKED).forget()
    for name, theirs in layer.__dict__.pop(BEFORE).items():
        setattr(layer, name, theirs)


def _set_call(layer: nn.Module, batch_invariant: bool | None, handed_on: bool) -> bool:
    """Makes a layer batch invariant or undoes that; returns whether this changed the layer.

    A batch-invariant layer has a LayerCall. `handed_on` is True if the layer passes its keywords on
    to the functions that it calls.
    """
    keeps = batch_invariant is None and CALL in layer.__dict__
    call = layer.__dict__.setdefault(CALL, None)
    wanted = call is not None if keeps else is_invariant("swap", batch_invariant)
    if wanted == (call is not None):
        return False
    if call is not None:
        call.forget()
    layer.__dict__[CALL] = call = LayerCall(handed_on) if wanted else None
    if call is not None:
        call.watch(layer)
    return True


def _take_region(layer: nn.Module, home: ModuleType, recompute: bool | None) -> None:
    """Replaces the forward of a layer and of its norm by ours.

    A batch-invariant layer keeps its own forward: `generate` runs the functions of the Python
    module, and a training forward must have the same bits.
    """
    mixers.take_norm(layer)
    if layer.__dict__[CALL] is not None:
        mixers.give_back(layer)
        return
    before = layer.__dict__.get(mixers.REGION)
    again = before is not None and before.recompute if recompute is None else recompute
    mixers.take_over(layer, home, again)


def _mark(model: nn.Module) -> None:
    """Marks all modules of a model if all its gated-delta-net layers can run shared prompts."""
    holders = list(_holders(model))
    if holders and all(map(_follows, holders)):
        for module in model.modules():
            setattr(module, BESIDE, True)


def _holders(model: nn.Module) -> Iterator[nn.Module]:
    """Returns the gated-delta-net layers whose functions are attributes, as until 5.14."""
    return (m for m in model.modules() if callable(getattr(m, HOLDS, None)))


def _sharers(model: nn.Module) -> Iterator[tuple[nn.Module, ModuleType]]:
    """Yields the layers that call functions of a Python module, as since 5.15, with the module."""
    for layer in model.modules():
        if not hasattr(layer, HOLDS) and (home := _home(layer, "GatedDeltaNet")) is not None:
            yield layer, home


def _home(module: nn.Module, ending: str = "") -> ModuleType | None:
    """Returns the Python module whose functions a layer calls: that of its class, or None.

    None if that module has no such functions, or if the class's name does not end with `ending`.
    """
    for kind in type(module).__mro__:  # FSDP2 derives a class of its own from a layer's
        home = sys.modules.get(kind.__module__)
        if hasattr(home, SHARES) and kind.__name__.endswith(ending):
            return home
    return None


def _in_place_of(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that replaces transformers' function `theirs` and calls `ours`.

    It drops keywords that `ours` does not know, because layers also pass keywords for other
    implementations. If `ours` is the convolution, it calls `theirs` for calls that `ours` refuses.
    Its attribute BEFORE stores `theirs`.
    """
    taken = inspect.signature(TAKES.get(ours, ours)).parameters.values()
    known = {KEY, rollouts.KEY, *(p.name for p in taken if p.kind != p.VAR_KEYWORD)}

    @functools.wraps(theirs)
    def run(*args: Any, **kwargs: Any) -> Any:
        if ours is convolution:
            kwargs.pop(rollouts.KEY, None)
            if kwargs.get(KEY) is None:
                kwargs.pop(KEY, None)
                if (y := of_rows(*args, **kwargs)) is not None:
                    return y
                activation, seq_idx = kwargs.get("activation"), kwargs.get("seq_idx")
                bounds = kwargs.get("cu_seq_lens_q")
                weight = args[1] if len(args) > 1 else kwargs["weight"]  # OLMo's layers name it
                check_apart(args[0], weight, activation, seq_idx, bounds, follows=KEEPS_APART)
                return theirs(*args, **kwargs)
        return ours(*args, **{name: x for name, x in kwargs.items() if name in known})

    setattr(run, BEFORE, theirs)
    return run
