"""Gated-delta-net layers of vLLM whose results have the bits of training.

They are our plug-in under QLA_BATCH_INVARIANT=1. A page of vLLM's cache belongs to one sequence and
holds the last tokens for the convolution, and a slot of a `GdnPool`: the state after a number of
whole chunks, and the tokens since. Prefill and decoding append to the slot, so that the output o of
a token has the bits of `chunk_gated_delta_rule(.., batch_invariant=True)` over the whole sequence.
The norm stays vLLM's. docs/lessons.md explains the pages.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn import GdnPool, refusal
from qla_kernels.gdn.anchored.pages import Page
from qla_kernels.gdn.shapes import KEY_ROOMS
from qla_kernels.integrations import vllm as plain
from qla_kernels.integrations.engines import log, say_ran
from qla_kernels.runtime.errors import Unsupported, need

NAME = "QLA_BATCH_INVARIANT=1 in vLLM"
SPECS = "get_mamba_specs_from_config"  # method of a model class: tells vLLM the sizes of pages
PER_PAGE = "the gated-delta layers of a sequence take pages of %d bytes each: %d of the convolution"
PER_PAGE += ", %d of the state, %d of the last tokens; vLLM pads them to its block of attention"


def layer_on(engine: Any) -> type:
    """Returns a subclass of vLLM's gated-delta-net layer that computes the same bits as training.

    Prefill and decoding give each token the bits of a training forward over the whole sequence by
    `chunk_gated_delta_rule(.., batch_invariant=True)`, however vLLM batches requests.

    Args:
        engine: vLLM's module qwen_gdn_linear_attn, which defines the layer.

    Constructing the new class raises Unsupported if vLLM's settings (such as speculative decoding)
    or the layer's head sizes do not allow the same bits.
    """
    base: Any = getattr(engine, plain.LAYER)

    class QlaBitsGatedDeltaNetAttention(base):  # type: ignore[misc]
        def __init__(self, config: Any, vllm_config: Any, *args: Any, **named: Any) -> None:
            super().__init__(config, vllm_config, *args, **named)
            if reason := refused(self, vllm_config):
                raise Unsupported(reason)
            say_bytes(tuple(_state_bytes(self)))
            self._profiled_sequences = vllm_config.scheduler_config.max_num_seqs
            size_pages(self, vllm_config)

        def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
            convolution = super().get_state_shape()[0]
            return convolution, (sum(page_of(self).part_bytes()) // 4,)

        def get_state_dtype(self) -> tuple[torch.dtype, ...]:
            return super().get_state_dtype()[0], torch.float32

        def _forward_core(
            self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor
        ) -> None:
            batch = plain._batch(engine, self)
            if batch is None:  # while vLLM measures memory
                super()._forward_core(mixed_qkv, b, a, core_attn_out)
                _profile(self, mixed_qkv, b, a)
                return
            n = batch.num_actual_tokens
            _forward(engine, self, batch, *(x[:n] for x in (mixed_qkv, b, a, core_attn_out)))

    return QlaBitsGatedDeltaNetAttention


def page_of(layer: Any) -> Page:
    """Returns how a page of vLLM's cache stores the gated delta rule's state of one sequence.

    The result, a `Page`, has the head counts and sizes of `layer` on this rank, from which the
    sizes of the parts follow. They are the parts of a `GdnPool` slot: the state after whole chunks
    of 64 tokens, and the tokens after them. The inputs that the convolution caches have a place of
    their own in the page.
    """
    heads = layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size
    return Page(*heads, layer.head_k_dim, layer.head_v_dim, layer.model_config.dtype)


def refused(layer: Any, config: Any) -> str | None:
    """Returns the reason why vLLM cannot compute the same bits as training, or None if it can.

    Reasons are settings such as speculative decoding or prefix caching, and sizes of the layer.

    Args:
        layer: a gated-delta-net layer of vLLM.
        config: vLLM's config.
    """
    cache_config, K = config.cache_config, layer.head_k_dim
    state = cache_config.mamba_ssm_cache_dtype
    if config.speculative_config is not None:
        return need(NAME, "speculative decoding", "none: drafts are not built", "leave it off")
    if cache_config.mamba_cache_mode != "none":
        fix = "pass --no-enable-prefix-caching"
        got = f"prefix caching of states, mode {cache_config.mamba_cache_mode}"
        return need(NAME, got, "none: vLLM would copy parts of a page", fix)
    if state not in ("auto", "float32"):
        fix = "pass --mamba-ssm-cache-dtype float32"
        return need(NAME, f"states in {state}", "float32: others lose bits", fix)
    if config.kv_transfer_config is not None:
        fix = "leave out --kv-transfer-config"
        return need(NAME, "a KV connector", "none: it does not know these pages", fix)
    if K not in KEY_ROOMS[:-1]:
        rooms = " or ".join(map(str, KEY_ROOMS[:-1]))
        return need(NAME, f"head dimension K={K}", rooms, "unset QLA_BATCH_INVARIANT")
    like = torch.empty(0, 1, 1, K, dtype=layer.model_config.dtype)
    values = torch.empty(0, 1, 1, layer.head_v_dim, dtype=like.dtype)
    return refusal(like, like, values, anchored=True, capability=(9, 0), op=NAME)


def size_pages(layer: Any, config: Any) -> None:
    """Tells vLLM the page size of its cache for a layer that computes the bits of training.

    Replaces a method of the model's class. vLLM calls that method when it chooses the block size of
    attention, so call `size_pages` before.

    Args:
        layer: the layer, whose shapes and dtypes of states give the size.
        config: vLLM's config.

    Raises:
        Unsupported: the model's class already has such a method of its own.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.kv_cache_interface import MambaSpec

    model = config.model_config
    cls, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    spec = MambaSpec(shapes=layer.get_state_shape(), dtypes=layer.get_state_dtype(), block_size=-1)
    held = getattr(cls, SPECS, None)
    if held is not None and not hasattr(held, "of_qla_kernels"):
        got, needs = f"{cls.__name__} with states of several kinds", "Qwen3-Next or Qwen3.5"
        raise Unsupported(need(NAME, got, needs, "unset QLA_BATCH_INVARIANT"))

    def specs(_: Any) -> list[Any]:
        return [spec]

    specs.of_qla_kernels = True  # type: ignore[attr-defined]
    setattr(cls, SPECS, staticmethod(specs))


def _state_bytes(layer: Any) -> list[int]:
    """Returns how many bytes of a page the convolution, the state, and the last tokens take."""
    shape, dtype = layer.get_state_shape()[0], layer.get_state_dtype()[0]
    state, *tokens = page_of(layer).part_bytes()
    return [math.prod(shape) * dtype.itemsize, state, sum(tokens)]


@cache
def say_bytes(sizes: tuple[int, ...]) -> None:
    """Logs how many bytes a page of vLLM's cache has, once for all layers with the same sizes.

    `sizes` are the bytes of the convolution, of the state, and of the last tokens.
    """
    log.info(f"vLLM: {PER_PAGE}", sum(sizes), *sizes)


def _options(layer: Any) -> dict[str, Any]:
    """Returns the keywords of `GdnPool.prefill` and `GdnPool.decode` for a layer."""
    return {
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True, "A_log": layer.A_log, "dt_bias": layer.dt_bias,
    }  # fmt: skip


def _forward(
    engine: Any, layer: Any, batch: Any, rows: Tensor, b: Tensor, a: Tensor, out: Tensor
) -> None:
    """Runs a batch: first the sequences that decode one token, then the others; writes `out`.

    Padding has slot 0.
    """
    # views of vLLM's tensors, made anew: vLLM may take its cache back
    pool = GdnPool.of(page_of(layer).slots(layer.kv_cache[1]), plain.NULL_SLOT)
    slots, first = batch.non_spec_state_indices_tensor, len(rows)
    if batch.num_prefills > 0:
        rows, _ = plain._convolved(engine, layer, batch, rows)
        first = batch.num_decode_tokens if batch.num_decodes > 0 else 0
    else:
        rows = plain._updated(engine, layer, rows, slots[:first])
    x = plain._split(layer, rows, b, a)
    if first:
        q, k, v, g, beta = (t[0, :first].unsqueeze(1) for t in x)
        o = pool.decode(q, k, v, g, beta, slots[:first], **_options(layer))
        out[:first] = o.squeeze(1)
        say_ran("vLLM", "decode", out.device)
    if batch.num_prefills > 0:
        q, k, v, g, beta = (t[:, first:] for t in x)
        bounds, has = batch.prefill_query_start_loc, batch.prefill_has_initial_state
        # slots of sequences without tokens are those of others
        named = torch.where(bounds.diff() > 0, batch.prefill_state_indices, plain.NULL_SLOT)
        o = pool.prefill(q, k, v, g, beta, named, bounds, has, **_options(layer))
        out[first:] = o[0]
        say_ran("vLLM", "prefill", out.device)


def _profile(layer: Any, rows: Tensor, b: Tensor, a: Tensor) -> None:
    """Runs a prefill of the largest number of sequences, so that vLLM measures its memory.

    The sequences are padding in a pool of one slot, and take as much memory as real ones.
    """
    count, layer._profiled_sequences = min(layer._profiled_sequences, len(rows)), 0
    if not count:  # done before
        return
    heads = *page_of(layer)[:4], layer.model_config.dtype
    pool, x = GdnPool(1, *heads, rows.device), plain._split(layer, rows, b, a)
    bounds = torch.arange(count + 1, dtype=torch.int32, device=rows.device)
    bounds[-1] = len(rows)
    pool.prefill(*x, torch.full_like(bounds[1:], -1), bounds, **_options(layer))
