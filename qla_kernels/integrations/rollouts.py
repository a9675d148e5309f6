"""Makes `generate` of transformers compute the same bits as a training forward, in swapped layers.

`swap(model, batch_invariant=True)` of transformers.py gives each gated-delta-net layer a
`LayerCall`, which runs

- calls without a cache, and those with gradients, by `chunk_gated_delta_rule(..,
  batch_invariant=True)`;
- calls with a cache by a `GdnPool`, in which slot n holds row n of the batch.

The pool is an attribute of the layer's part of the cache, so it is copied and freed with the cache.
In place of a recurrent state, transformers stores the numbers of the rows. `Cache.reorder_cache`
reorders these numbers, and the next call reorders the slots of the pool accordingly.

Results have other bits if tokens move within a chunk of 64 tokens. So padding before and after a
sequence, as the layer's mask says, is removed, and each sequence is computed as if it were alone.
Masked tokens between other tokens stay, as in transformers, which sets their inputs to 0.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qla_kernels.dualkv import SharedLayout
from qla_kernels.gdn import GdnPool, chunk_gated_delta_rule
from qla_kernels.gdn.anchored.extend import Tokens
from qla_kernels.gdn.validate import wants_gradients
from qla_kernels.integrations.linear_layers import refuse_replica
from qla_kernels.runtime.errors import Unsupported, need

KEY = "qla_layer_call"  # the keyword by which layers since 5.15 pass a LayerCall to functions
OP = "a gated-delta-net layer with batch_invariant=True"
POOL = "pool_of_qla_kernels"  # the attribute of a layer's part of a cache


class CachedRows(NamedTuple):
    """Record: the recurrent states of one layer for a batch of B rows during `generate`.

    Attributes:
        pool: a `GdnPool` with one slot per row, which holds the states.
        slots: [B], the slot of each row: 0 .. B - 1.
        state: [B, 2], each row's slot number, twice. transformers stores this small tensor as the
            layer's recurrent state. If Cache.reorder_cache (beam search) permutes it, the next call
            permutes the slots of the pool in the same way.
    """

    pool: GdnPool
    slots: Tensor
    state: Tensor


class LayerCall:
    """Callable that replaces a layer's gated delta rule: `generate` then has the bits of training.

    `swap(model, batch_invariant=True)` gives one to each gated-delta-net layer, which calls it with
    q, k, v, g and beta in place of its own function. The layer does not pass its cache and
    attention mask, so `watch` installs two forward hooks: the first stores cache and mask before
    the layer runs, and the second drops them afterwards. The second hook raises Unsupported if the
    layer's forward did not call this object, as when another library has replaced the function.

    Args:
        handed_on: True if the layer passes the keywords of its forward on to the functions that it
            calls, as since transformers 5.15. The first hook then adds this object to them, as
            qla_layer_call.
    """

    def __init__(self, handed_on: bool) -> None:
        self.handed_on = handed_on
        self.cache: Any = None
        self.mask: Tensor | None = None
        self.place = 0
        self.asked = False
        self.hooks: tuple[Any, ...] = ()

    def watch(self, layer: nn.Module) -> None:
        """Installs two forward hooks on `layer`.

        One stores the cache and the mask of a call before the layer runs; the other drops them
        after it.
        """
        begin = layer.register_forward_pre_hook(self._begin, with_kwargs=True)
        self.hooks = begin, layer.register_forward_hook(self._end, always_call=True)

    def forget(self) -> None:
        """Removes the two hooks that `watch` installed on a layer."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = ()

    def _begin(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        refuse_replica(layer)
        self.cache = kwargs.get("cache", kwargs.get("cache_params"))  # new and old name: 5.24
        self.mask = kwargs.get("attention_mask")
        self.place, self.asked = getattr(layer, "layer_idx", 0), False
        return (args, kwargs | {KEY: self}) if self.handed_on else None

    def _end(self, _: nn.Module, __: Any, result: Any) -> None:
        self.cache = self.mask = None
        if result is not None and not self.asked:
            got = "a layer that calls other functions than those which swap() replaced"
            raise Unsupported(need(OP, got, "these", "call swap(model) again"))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        *,
        shared_prefix: SharedLayout | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns o [B, T, HV, V], and the state for transformers to store."""
        self.asked = True
        tokens, order = Tokens(q, k, v, g, beta), None
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        options["scale"] = scale
        learns = wants_gradients(tokens)
        self._check(initial_state, output_final_state, learns, shared_prefix)
        if self.mask is not None and cu_seqlens is None and q.shape[1] > 1:
            tokens, cu_seqlens, order = packed(tokens, self.mask.to(q.device))
        if not output_final_state or learns:
            o, _ = chunk_gated_delta_rule(
                *tokens, **options, cu_seqlens=cu_seqlens, batch_invariant=True
            )
            state = self._without_pool(q) if output_final_state else None
        else:
            o, state = self._cached(tokens, len(q), initial_state, cu_seqlens, options)
        return (o if order is None else o[0, order.argsort()].view(v.shape)), state

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _cached(
        self,
        tokens: Tokens,
        B: int,
        state: Tensor | None,
        bounds: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Extends the sequences of the cache's pool, or begins those of a new one."""
        rows = self._rows(tokens.q, tokens.v, B, state)
        if state is not None and bounds is None and tokens.q.shape[1] == 1:
            return rows.pool.decode(*tokens, rows.slots, **options), rows.state
        goes_on = torch.full_like(rows.slots, state is not None, dtype=torch.bool)
        return rows.pool.prefill(*tokens, rows.slots, bounds, goes_on, **options), rows.state

    def _check(
        self,
        initial_state: Tensor | None,
        output_final_state: bool,
        learns: bool,
        shared_prefix: SharedLayout | None,
    ) -> None:
        """Raises if a call would have other bits, or if its cache cannot hold a pool."""
        if shared_prefix is not None:
            got, needs = "shared_prefix", "whole sequences: the chunks of a tree are others"
            raise Unsupported(need(OP, got, needs, "call swap(model, batch_invariant=False)"))
        if initial_state is None and not output_final_state:
            return
        if learns and initial_state is not None:
            got, fix = "gradients of a call that continues a cache", "use torch.no_grad()"
            raise Unsupported(need(OP, got, "none, or the whole sequence", fix))
        if learns:
            return
        if self.cache is None:
            got, needs = "a state without a cache", "transformers' own call of the layer"
            raise Unsupported(need(OP, got, needs, "pass it by keyword, as cache or cache_params"))
        part = self._part()
        if not hasattr(part, "record_past"):
            needs, fix = "one of transformers 5.14 or later", "install it, or pass use_cache=False"
            raise Unsupported(need(OP, f"a {type(part or self.cache).__name__}", needs, fix))
        if part.record_past:
            got, needs = "a cache that records the past", "one that is not to be cropped"
            raise Unsupported(need(OP, got, needs, "decode without drafts"))
        if initial_state is not None and not hasattr(part, POOL):
            got, needs = "a cache without a pool", "one that began so, and without gradients"
            raise Unsupported(need(OP, got, needs, "begin again with a new cache"))

    def _part(self) -> Any:
        """Returns the layer's part of the cache; None where transformers' caches have no parts."""
        parts = getattr(self.cache, "layers", None)
        return None if parts is None else parts[self.place]

    def _rows(self, q: Tensor, v: Tensor, B: int, state: Tensor | None) -> CachedRows:
        """Returns the pool that holds the rows of the batch, in their order."""
        part = self._part()
        if state is None:
            (H, K), (HV, V) = q.shape[2:], v.shape[2:]
            return _keep(part, GdnPool(B, H, HV, K, V, q.dtype, q.device))
        rows: CachedRows = getattr(part, POOL)
        if state is rows.state:
            return rows
        return _keep(part, _selected(rows.pool, state[:, 0].to(q.device)))

    def _without_pool(self, q: Tensor) -> Tensor:
        """Returns a state from which no call can go on: a pool has no gradients."""
        if (part := self._part()) is not None:
            part.__dict__.pop(POOL, None)
        return _numbers(torch.arange(q.shape[0], device=q.device))


def packed(tokens: Tokens, mask: Tensor) -> tuple[Tokens, Tensor, Tensor]:
    """Packs a padded batch [B, T] into one row: the B sequences end to end, then all padding.

    The sequence of a row runs from the first to the last token that the mask marks.

    Args:
        tokens: the tensors q, k, v, g and beta, each [B, T, ..].
        mask: [B, T], 0 for padding.

    Returns:
        The packed tensors, each [1, B T, ..]; the bounds of the sequences, [B + 1]; and for each
        packed token its index b T + t in the padded batch, [B T].
    """
    there = (mask != 0).int()
    inside = (there.cumsum(1) > 0) & (there.flip(1).cumsum(1) > 0).flip(1)
    order = (~inside).flatten().int().argsort(stable=True)
    bounds = inside.sum(1).cumsum(0)
    pack = Tokens(*(x.flatten(0, 1)[order][None] for x in tokens))
    return pack, torch.cat([bounds.new_zeros(1), bounds]), order


def _keep(part: Any, pool: GdnPool) -> CachedRows:
    """Makes a pool that of a layer's part of a cache, whatever that held before."""
    slots = torch.arange(pool.num_slots, device=pool.lengths.device)
    rows = CachedRows(pool, slots, _numbers(slots))
    part.recurrent_states[0], part.is_recurrent_states_initialized[0] = rows.state, True
    setattr(part, POOL, rows)
    return rows


def _numbers(slots: Tensor) -> Tensor:
    """Returns [B, 2], of which no function makes a state [B, HV, K, V] by broadcasting."""
    return slots[:, None].repeat(1, 2)


def _selected(pool: GdnPool, slots: Tensor) -> GdnPool:
    """Returns a pool of these slots."""
    held = pool.tensors
    k, (HV, V) = held.k_tail, held.v_tail.shape[2:]
    new = GdnPool(len(slots), k.shape[2], HV, k.shape[3], V, k.dtype, k.device)
    for to, of in zip(new.tensors, held, strict=True):
        to[:-1] = of[slots]
    return new
