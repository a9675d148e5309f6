"""Vertical-slash attention over a ring, for models of Hugging Face transformers.

    from qla_kernels.integrations import transformers_sparse_ring as hook
    model = AutoModelForCausalLM.from_config(config)
    hook.prepare(model)
    settings = hook.SparseRingConfig(group, layout, VerticalSlash())
    model(ids_local, position_ids=layout.positions(T, rank)[None], use_cache=False,
          sparse_ring=settings)

Each rank passes the tokens of its shard. Shift labels before you split them over ranks. The
settings are an argument of the call, because a context manager would not cover the recomputation of
activations. `prepare` selects our attention, checks the model, and makes calls raise that would
give wrong results. Only `register` imports transformers. There is no fallback: a call that cannot
run raises `Unsupported`.
"""

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qla_kernels.integrations.full_attention import anything_else, looks_ahead
from qla_kernels.integrations.our_calls import expect_model, expect_model_or_config, watch
from qla_kernels.runtime.contents import checks_contents
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.sparse_ring import (
    Dense,
    RingGroups,
    VerticalSlash,
    VSIndex,
    sparse_attention,
    sparse_ring_attention,
)
from qla_kernels.sparse_ring.heuristics import Schedule
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.patterns import Pattern

NAME = "sparse_ring"
PAD = "leave it out, pad on the right, and pass SparseRingConfig(seqlen=..)"
APART = "call the model once for each document"
NO_CACHE = "pass use_cache=False; for generation call model.set_attn_implementation('sdpa')"

# Called after each layer's attention with the layer's number, this rank's q [B, L, H, D] and
# k [B, L, Hk, D], and the index, which is the same on every rank; again for a layer that is
# recomputed. sparse_ring.measure has two examples.
OnIndex = Callable[[int | None, Tensor, Tensor, VSIndex], None]


@dataclass(frozen=True)
class SparseRingConfig:
    """Settings of sparse attention for one call: model(.., sparse_ring=SparseRingConfig(..)).

    Without group and layout, this rank has the whole sequence.

    Attributes:
        group: the ranks that share the sequence, from `RingGroups.create`.
        layout: which rank holds which tokens, such as StripedLayout(world).
        pattern: how the mask is chosen; one pattern for all layers, or a dict by layer number.
        schedule: how k and v reach the other ranks: all at once ("allgather"), step by step
            ("ring", "double_ring"), or what suits the group ("auto"). See `sparse_ring_attention`.
        dense_layers: numbers of the layers, from 0, that use full causal attention.
        seqlen: number of tokens of the whole sequence before the padding; None for no padding.
        keep_gathered: with "allgather", save the gathered k and v for the backward, which otherwise
            gathers them again.
        on_index: called after each layer's attention with the layer's number, this rank's q and k,
            and the `VSIndex` of the layer's mask.
    """

    group: RingGroups | None = None
    layout: Layout | None = None
    pattern: Pattern | Mapping[int, Pattern] = field(default_factory=VerticalSlash)
    schedule: Schedule = "auto"
    dense_layers: Sequence[int] = ()
    seqlen: int | None = None
    keep_gathered: bool = False
    on_index: OnIndex | None = None


def register() -> None:
    """Registers `sparse_ring_attention` with transformers under the name "sparse_ring".

    A second call changes nothing.
    """
    importlib.import_module("transformers").AttentionInterface.register(NAME, attention)


def prepare(model: Any) -> None:
    """Prepares a transformers model for calls with the keyword `sparse_ring`, a `SparseRingConfig`.

    Checks the model with `check`, and selects `sparse_ring_attention` as its attention.

    A later call with `sparse_ring` raises ValueError if it has an attention_mask, which
    transformers would drop, or if another attention was selected since. For calls without
    `sparse_ring`, such as generation, first select another attention by
    `model.set_attn_implementation`.

    Args:
        model: a transformers model, before another module such as DDP wraps it.

    Raises:
        TypeError: `model` is not such a model.
        Unsupported: `check` refuses the model, which is then unchanged.
    """
    expect_model(NAME, model)
    register()
    check(model)
    model.set_attn_implementation(NAME)
    watch(model, NAME, NAME, {NAME}, PAD)


def check(model: Any) -> None:
    """Raises Unsupported if a model has layers other than full causal attention.

    Call it before the first step. Sparse attention over several ranks replaces full causal
    attention; other layers would silently treat the tokens of one rank as a whole sequence.

    Args:
        model: a transformers model or its config. A config does not show whether the attention of
            the model can be replaced, and not always whether the model is causal.

    Raises:
        TypeError: `model` is neither a model nor a config.
        Unsupported: layers have sliding windows, capped scores, a recurrence, convolutions or
            attention to later tokens; or the attention of the model cannot be replaced.
    """
    expect_model_or_config(NAME, model)
    complaint = anything_else(model)
    if complaint is not None:
        fix = "run such a model without a ring, or switch it off in its config"
        raise Unsupported(need(NAME, *complaint, fix))


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    sparse_ring: SparseRingConfig | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes the sparse attention of a layer, over one rank or a ring of ranks.

    transformers calls this function in place of its own attention.

    Args:
        module: the attention layer.
        query: [B, H, L, D], for the L tokens of this rank.
        key, value: [B, Hk, L, D].
        scaling: factor of the scores; D ** -0.5 if None.
        sparse_ring: the settings that the model's call passed.

    The other arguments are options of transformers. Those that would change the result must be
    unset.

    Returns:
        (o [B, L, H, D], None): transformers expects a second result.

    Raises:
        Unsupported: sparse_ring is missing or has no pattern for this layer, or the call has a
            mask, a cache or another option besides causal attention.
        ValueError: sparse_ring names a layer that the model does not have. On the CPU, and under
            QLA_CHECK=1, also if position_ids restart within the sequence or do not fit the layout;
            every rank of a ring raises this error.
    """
    if sparse_ring is None:
        fix = "pass sparse_ring=SparseRingConfig(...) to the model's call"
        fix += "; for generation call model.set_attn_implementation('sdpa')"
        raise Unsupported(need(NAME, "no settings", "them in every call of the model", fix))
    ahead = looks_ahead(module, is_causal)
    other = "change the model's configuration, or use another attn_implementation"
    cached = cache is not None or key.shape[2] != query.shape[2]
    for name, option, fix in (
        (ahead, ahead, other),
        ("an attention mask", attention_mask, PAD),
        ("packed documents (cu_seq_lens_q)", cu_seq_lens_q, APART),
        ("dropout", dropout or None, other),
        ("a sliding window", sliding_window, other),
        ("softcap", softcap, other),
        ("attention sinks", s_aux, other),
        ("position_bias", position_bias, other),
        ("a cache of keys", cached or None, NO_CACHE),
    ):
        if option is not None:
            raise Unsupported(need(NAME, f"got {name}", "plain causal attention", fix))
    if not torch.compiler.is_compiling() and (query.is_cpu or checks_contents()):
        _check_positions(sparse_ring, position_ids, query.shape[2])
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # norms return q and k in fp32, a projection v in 16 bits
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    if not torch.compiler.is_compiling():
        _check_numbers(sparse_ring, getattr(module, "config", None))
    pattern = _pattern(sparse_ring, getattr(module, "layer_idx", None))
    common: dict[str, Any] = {"pattern": pattern, "seqlen": sparse_ring.seqlen, "scale": scaling}
    group, layout = sparse_ring.group, sparse_ring.layout
    common["return_index"] = sparse_ring.on_index is not None
    if group is None and layout is None:
        result = sparse_attention(q, k, v, **common)
    else:
        # k and v are sent, so they have to be contiguous; copied only if the model transposed them
        common |= {"group": group, "layout": layout, "schedule": sparse_ring.schedule}
        common["keep_gathered"] = sparse_ring.keep_gathered
        result = sparse_ring_attention(q, k.contiguous(), v.contiguous(), **common)
    if sparse_ring.on_index is None:
        return result, None
    o, index = result
    sparse_ring.on_index(getattr(module, "layer_idx", None), q.detach(), k.detach(), index)
    return o, None


def _check_numbers(settings: SparseRingConfig, config: Any) -> None:
    check_layers(settings.dense_layers, config)
    if isinstance(settings.pattern, Mapping):
        check_layers(settings.pattern, config, "pattern")


def check_layers(layers: Iterable[int], config: Any, option: str = "dense_layers") -> None:
    """Raises ValueError if a number in `layers` is not the number of a layer of the model.

    Args:
        layers: layer numbers, which count from 0.
        config: the model's config. If it does not say how many layers there are, nothing is
            checked.
        option: the option that the error names.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", None)
    if count is None:
        return
    for number in layers:
        if not 0 <= number < count:
            needs = f"0 to {count - 1} for a model of {count} layers"
            fix = "count layers from 0, and leave out the others"
            raise ValueError(need(NAME, f"{option} has {number}", needs, fix))


def _check_positions(settings: SparseRingConfig, position_ids: Any, tokens: int) -> None:
    """Raises ValueError unless position_ids are the tokens' places in the whole sequence.

    In a ring every rank raises, if one rank has wrong positions: without position_ids transformers
    counts from 0 on each rank. Without a ring, positions must rise. Those of padding may be
    anything.
    """
    group, layout = settings.group, settings.layout
    if group is None and layout is None:
        _check_rising(position_ids, tokens, settings.seqlen)
        return
    if not isinstance(group, RingGroups) or not isinstance(layout, Layout):
        return  # the call itself refuses half a ring
    problem = None
    if isinstance(position_ids, Tensor) and position_ids.shape[-1:] == (tokens,):
        with suppress(ValueError):  # the layout does not fit: the call itself raises that
            places = layout.positions(tokens * group.world, group.rank)
            wrong = (position_ids.cpu() != places) & (places < (settings.seqlen or math.inf))
            if wrong.any():
                token = int(wrong.nonzero()[0, -1])
                got = f"token {token} of rank {group.rank} has a wrong position"
                needs = f"{int(places[token])}, its place in the whole sequence"
                fix = "pass position_ids=layout.positions(T, rank)[None]"
                problem = ValueError(need(NAME, got, needs, fix))
    group.agree(f"{NAME}: position_ids", {}, problem, again=True)


def _check_rising(position_ids: Any, tokens: int, seqlen: int | None) -> None:
    """Raises ValueError if positions restart within a row.

    Positions of several axes, as for images, are not checked.
    """
    if not isinstance(position_ids, Tensor) or position_ids.dim() > 2:
        return
    if position_ids.shape[-1] == tokens:
        falls = (position_ids[..., :seqlen].diff() <= 0).nonzero()
        if len(falls):
            got = f"position_ids restart at token {int(falls[0, -1]) + 1}"
            fix = f"{APART}, or pass seqlen if padding begins there"
            raise ValueError(need(NAME, got, "one sequence in a row", fix))


def _pattern(settings: SparseRingConfig, layer: int | None) -> Pattern:
    """Returns the pattern of a layer; raises Unsupported if the settings have none for it."""
    if layer is not None and layer in settings.dense_layers:
        return Dense()
    if not isinstance(settings.pattern, Mapping):
        return settings.pattern
    if layer is None or layer not in settings.pattern:
        fix = "add it, or name it in dense_layers"
        got = f"no pattern for layer {layer}"
        raise Unsupported(need(NAME, got, "one for each layer", fix))
    return settings.pattern[layer]
