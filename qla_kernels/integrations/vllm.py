"""vLLM's layers of Qwen3-Next and Qwen3.5 on our kernels: an entry point of vllm.general_plugins.

    VLLM_PLUGINS=qla_kernels vllm serve ...

`register` replaces the layer QwenGatedDeltaNetAttention by ours, which runs prefill, decode and
verification of drafts on our kernels and updates states in the pages of vLLM's cache. Our kernels
also run the convolution in front and the norm behind; the projections and the convolution of drafts
stay vLLM's. Under QLA_BATCH_INVARIANT=1 the layer is that of vllm_bits.py.
"""

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.conv import causal_conv1d_update
from qla_kernels.conv.prefill import prefill_causal_conv1d
from qla_kernels.gdn import (
    packed_decode_gated_delta_rule,
    prefill_gated_delta_rule,
    verify_gated_delta_rule,
)
from qla_kernels.hybrid.step import decode_gated_delta_net
from qla_kernels.integrations.engines import log, refused_layer, say_ran, unknown_version
from qla_kernels.norm.ops import gated_norm_into
from qla_kernels.runtime.arguments import switched_on
from qla_kernels.runtime.errors import Unsupported
from qla_kernels.tile.constants import CHUNK

NAME = "qla_kernels"
LAYER = "QwenGatedDeltaNetAttention"
NULL_SLOT = 0  # vLLM's null block
FLAGS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
    "null_slot": NULL_SLOT,
}


def register() -> None:
    """Makes vLLM's gated-delta-net layers run on this package's kernels.

    vLLM calls this function when it loads plug-ins. It does nothing unless the environment variable
    VLLM_PLUGINS names "qla_kernels". Raises Unsupported if vLLM is not installed, or has a version
    that was not tested.
    """
    if NAME not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    if reason := unknown_version("vllm"):
        raise Unsupported(reason)
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as engine

    if LAYER in op_registry_oot:
        return
    if switched_on("QLA_BATCH_INVARIANT"):
        from qla_kernels.integrations import vllm_bits  # here, because it imports this module

        layer, what = vllm_bits.layer_on(engine), "prefill and decode with the bits of training"
    else:
        layer, what = layer_on(engine), "prefill, decode, verification of drafts"
        from vllm.model_executor.warmup import kernel_warmup

        skip_warmup(kernel_warmup)
    PluggableLayer.register_oot(name=LAYER)(layer)
    log.info("vLLM: %s runs on qla_kernels: %s", LAYER, what)


def skip_warmup(kernel_warmup: Any) -> None:
    """Makes vLLM compile its Triton kernels at start only if layers of ours leave it something.

    `kernel_warmup` is vLLM's module, which calls the function that is replaced.
    """
    usual = kernel_warmup.qwen_triton_warmup

    def warm_up(runner: Any, model_config: Any) -> None:
        layers = runner.compilation_config.static_forward_context.values()
        ours = [x for x in layers if getattr(x, "of_qla_kernels", False)]
        if not ours or not all(map(_runs_alone, ours)):
            usual(runner, model_config)

    kernel_warmup.qwen_triton_warmup = warm_up


def _runs_alone(layer: Any) -> bool:
    """Returns whether our kernels run all that lies between a layer's projections."""
    convolves = layer.kv_cache[0].dtype == layer.model_config.dtype
    return layer.speculative_config is None and _can_norm(layer) and convolves


def layer_on(engine: Any) -> type:
    """Returns a subclass of vLLM's gated-delta-net layer that runs on this package's kernels.

    `engine` is vLLM's module qwen_gdn_linear_attn, which defines the layer. Constructing the new
    class raises Unsupported if the kernels cannot run the layer's head sizes or dtypes.
    """
    base: Any = getattr(engine, LAYER)

    class QlaGatedDeltaNetAttention(base):  # type: ignore[misc]
        of_qla_kernels = True

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            layer = self.head_k_dim, self.head_v_dim, self.model_config.dtype
            if reason := refused_layer(*layer, self.get_state_dtype()[1]):
                raise Unsupported(reason)
            # vLLM's switch for the operator that has the gate among its arguments
            self.enable_fused_gdn_spec_decode |= _can_norm(self)

        def _warmup_prefill_kernels(self, *_: Any) -> None:
            """Does nothing: our kernels are built ahead, and no batch runs on vLLM's prefill."""

        def forward_cuda(self, hidden_states: Tensor) -> Tensor:
            if not _can_norm(self):
                return super().forward_cuda(hidden_states)  # type: ignore[no-any-return]
            mixed, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
            if self.gqa_interleaved_layout:
                *parts, b, a = self.fix_query_key_value_ordering(mixed, ba)
                mixed = torch.cat([x.reshape(x.shape[0], -1) for x in parts], -1)
                ba = torch.cat([b, a], -1)
            heads = self.num_v_heads // self.tp_size
            out = hidden_states.new_empty(hidden_states.shape[0], heads, self.head_v_dim)
            torch.ops.vllm.qwen_gdn_attention_core_fused_norm_packed(
                mixed, ba, out, layer_name=engine._encode_layer_name(self.prefix)
            )
            y: Tensor = self.out_proj(out.flatten(-2))[0]
            return y

        def _forward_core_fused_norm_packed(
            self, mixed_qkvz: Tensor, ba: Tensor, core_attn_out: Tensor
        ) -> None:
            batch = _batch(engine, self)
            _clear(core_attn_out, batch)
            if batch is not None:  # it is None while vLLM measures memory
                base._forward_core_fused_norm_packed(self, mixed_qkvz, ba, core_attn_out)

        def _forward_core_fused_norm(
            self,
            mixed_qkv: Tensor,
            b: Tensor,
            a: Tensor,
            output_gate: Tensor,
            core_attn_out: Tensor,
        ) -> None:
            tensors = mixed_qkv, b, a, core_attn_out
            batch = _batch(engine, self)
            if batch is None or not _can_norm(self) or _verifies_by_vllm(self, batch):
                super()._forward_core_fused_norm(*tensors[:3], output_gate, core_attn_out)
                return
            n = batch.num_actual_tokens
            rows, b, a, out = (x[:n] for x in tensors)
            gate = output_gate[:n]
            if _only_decodes(batch):
                _decode(engine, self, batch, rows, b, a, out, gate)
                return
            _run(engine, self, batch, rows, b, a, out)
            silu = self.norm.activation == "silu"
            norm = self.norm.weight, self.layer_norm_epsilon, silu
            gated_norm_into.replayed(out, gate, *norm, out)

        def _forward_core(
            self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor
        ) -> None:
            batch = _batch(engine, self)
            if batch is None:  # while vLLM measures memory
                return
            n = batch.num_actual_tokens
            _run(engine, self, batch, *(x[:n] for x in (mixed_qkv, b, a, core_attn_out)))

    return QlaGatedDeltaNetAttention


def _run(
    engine: Any, layer: Any, batch: Any, rows: Tensor, b: Tensor, a: Tensor, out: Tensor
) -> None:
    """Runs any batch without the norm."""
    tensors = rows, b, a, out
    if _only_decodes(batch):
        _decode(engine, layer, batch, *tensors)
    elif batch.spec_sequence_masks is None:
        _prefill(engine, layer, batch, *tensors)
    elif batch.num_prefills or batch.num_decodes:
        parts: Any = (_verify, batch.spec_token_indx), (_prefill, batch.non_spec_token_indx)
        for run, index in parts:
            mine = [x.index_select(0, index) for x in tensors[:3]]
            o = out.new_empty(len(index), *out.shape[1:])
            run(engine, layer, batch, *mine, o)
            out.index_copy_(0, index.long(), o)
    else:
        _verify(engine, layer, batch, *tensors)


def _clear(out: Tensor, batch: Any) -> None:
    """Sets the rows of no token to 0: vLLM's projections run on them, too."""
    live = 0 if batch is None else batch.num_actual_tokens
    if live < len(out):
        out[live:].zero_()


def _batch(engine: Any, layer: Any) -> Any:
    """Returns the metadata of the batch for this layer, or None while vLLM profiles."""
    metadata = engine.get_forward_context().attn_metadata
    return metadata.get(layer.prefix) if isinstance(metadata, dict) else None


def _only_decodes(batch: Any) -> bool:
    """Returns whether a batch has one token of each sequence, and no drafts."""
    return batch.spec_sequence_masks is None and not batch.num_prefills and batch.num_decodes > 0


def _verifies_by_vllm(layer: Any, batch: Any) -> bool:
    """Returns whether vLLM's fused kernel verifies drafts; our layer leaves them to it."""
    return (
        batch.spec_sequence_masks is not None
        and not batch.num_prefills
        and layer._can_use_fused_gdn_mtp_decode(batch)
    )


def _can_norm(layer: Any) -> bool:
    """Returns whether our kernels can run the layer's norm and output gate.

    Not if the next projection is quantised, because vLLM's compiler then fuses it with the norm.
    """
    norm = layer.norm
    return (
        layer.quant_config is None
        and layer.head_k_dim == layer.head_v_dim
        and norm.norm_before_gate
        and norm.group_size is None
        and norm.bias is None
        and norm.activation in ("silu", "sigmoid")
    )


def _convolution(engine: Any, layer: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """Returns the states of the convolution [slots, channels, width - 1], and its parameters."""
    states = layer.kv_cache[0]
    if not engine.is_conv_state_dim_first():
        states = states.transpose(-1, -2)
    weight = layer.conv1d.weight
    return states, (weight.view(weight.shape[0], -1), layer.conv1d.bias, layer.activation)


def _split(
    layer: Any, rows: Tensor, b: Tensor, a: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, v [1, T, heads, size], g and beta [1, T, HV] of packed rows, as views."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    q, k, v = torch.split(rows, [keys, keys, values], -1)
    q, k = (x.view(1, len(x), -1, layer.head_k_dim) for x in (q, k))
    return q, k, v.view(1, len(v), -1, layer.head_v_dim), a[None], b[None]


def _decode(
    engine: Any,
    layer: Any,
    batch: Any,
    rows: Tensor,
    b: Tensor,
    a: Tensor,
    out: Tensor,
    gate: Tensor | None = None,
) -> None:
    """Runs convolution and gated delta rule for one token of each sequence; writes `out`.

    With `gate`, the input of the output gate, also runs the norm. Rows of padding may follow.
    """
    slots = batch.non_spec_state_indices_tensor[: len(rows)]
    states, parameters = _convolution(engine, layer)
    norm: dict[str, Any] = {}
    if gate is not None:
        norm = {"z": gate, "norm_weight": layer.norm.weight, "norm_eps": layer.layer_norm_epsilon}
        norm["z_activation"] = layer.norm.activation
    if states.dtype == rows.dtype:
        decode_gated_delta_net(
            rows if rows.stride(-1) == 1 else rows.contiguous(), a, b, layer.A_log, layer.dt_bias,
            layer.kv_cache[1], slots, states, *parameters, null_slot=NULL_SLOT,
            out=out.unsqueeze(1), **norm,
        )  # fmt: skip
        say_ran("vLLM", "decode", out.device)
        return
    _decode_rows(layer, _updated(engine, layer, rows, slots), b, a, slots, out, norm)


def _updated(engine: Any, layer: Any, rows: Tensor, slots: Tensor) -> Tensor:
    """Returns one row of each sequence after the convolution; see `_convolved`."""
    states, parameters = _convolution(engine, layer)
    if states.dtype == rows.dtype:
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        kept: dict[str, Any] = {"conv_state_indices": slots, "null_slot": NULL_SLOT}
        return causal_conv1d_update(rows, states, *parameters, **kept)
    updated: Tensor = engine.causal_conv1d_update(
        rows, states, *parameters, conv_state_indices=slots, validate_data=False
    )
    return updated


def _decode_rows(
    layer: Any,
    rows: Tensor,
    b: Tensor,
    a: Tensor,
    slots: Tensor,
    out: Tensor,
    norm: dict[str, Any] | None = None,
    normalised: bool = False,
) -> None:
    """Runs the gated delta rule for one token of each sequence, after the convolution."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    packed_decode_gated_delta_rule(
        rows, a, b, layer.A_log, layer.dt_bias, layer.kv_cache[1], slots,
        use_qk_l2norm_in_kernel=not normalised, null_slot=NULL_SLOT, out=out.unsqueeze(1),
        **(norm or {}),
    )  # fmt: skip
    say_ran("vLLM", "decode", out.device)


class _Tables(NamedTuple):
    """Slots of the sequences that draft nothing, [N] each; a sequence without tokens has none."""

    starts: Tensor
    ends: Tensor
    kept: Tensor | None  # the slot of a state on the way
    offsets: Tensor | None  # the tokens before it, or 0
    first: int  # sequences that decode one token, which come first
    decoding: Tensor  # their slots
    others: dict[str, Any]  # of the others, arguments of prefill_gated_delta_rule


def _tables(batch: Any) -> _Tables:
    """Returns the tables of a batch; computed once, for all layers."""
    tables: _Tables | None = getattr(batch, "qla_tables", None)
    if tables is None:
        bounds, slots = batch.non_spec_query_start_loc, batch.non_spec_state_indices_tensor
        ends = torch.where(bounds.diff() > 0, slots, NULL_SLOT).int()  # others may have its slot
        starts = torch.where(batch.has_initial_state, ends, NULL_SLOT)
        kept = offsets = chunks = None
        if batch.flashinfer_checkpoint_plan is not None:
            kept, offsets = batch.checkpoint.state_indices, batch.checkpoint.checkpoint_offsets
            kept, used = kept.int(), (offsets > 0) & (kept > NULL_SLOT)
            chunks = torch.where(used, offsets // CHUNK, -1).int()
        first = batch.num_decode_tokens if batch.num_decodes > 0 else 0
        others: dict[str, Any] = {
            "state_indices": ends[first:], "start_indices": starts[first:],
            "checkpoint_starts": None if kept is None else kept[first:],
            "first_checkpoints": None if chunks is None else chunks[first:],
        }  # fmt: skip
        parts = first, ends[:first], others
        tables = batch.qla_tables = _Tables(starts, ends, kept, offsets, *parts)
    return tables


def _convolved(
    engine: Any, layer: Any, batch: Any, rows: Tensor, normalise: bool = False
) -> tuple[Tensor, bool]:
    """Returns the rows of a batch with prefill after the convolution.

    It is ours if the pool has the rows' dtype, otherwise vLLM's. Also returns whether it normalised
    q and k, if it is asked to.
    """
    states, (weight, bias, activation) = _convolution(engine, layer)
    tables = _tables(batch)
    if states.dtype == rows.dtype:
        norm = 2 * (layer.key_dim // layer.tp_size) // layer.head_k_dim, layer.head_k_dim
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        return prefill_causal_conv1d(
            rows, states, weight, bias, activation, batch.non_spec_query_start_loc, tables.ends,
            start_indices=tables.starts, checkpoint_offsets=tables.offsets,
            checkpoint_indices=tables.kept, qk_l2norm=norm if normalise else None,
            null_slot=NULL_SLOT,
        ), normalise  # fmt: skip
    before = rows
    convolved: Tensor = engine.causal_conv1d_fn(
        rows.transpose(0, 1),
        weight,
        bias,
        activation=activation,
        conv_states=states,
        has_initial_state=batch.has_initial_state,
        cache_indices=batch.non_spec_state_indices_tensor,
        query_start_loc=batch.non_spec_query_start_loc,
        metadata=batch,
    )
    if tables.kept is not None:
        layer._checkpoint_exporter.export(
            batch.checkpoint,
            raw_qkv=before,
            conv_state=states,
            cu_seqlens=batch.non_spec_query_start_loc,
        )
    return convolved.transpose(0, 1), False


def _prefill(
    engine: Any, layer: Any, batch: Any, rows: Tensor, b: Tensor, a: Tensor, out: Tensor
) -> None:
    """Runs a batch with prefill: first the sequences that decode one token, then the others.

    States on the way, for vLLM's prefix cache, go to their slots.
    """
    rows, normalised = _convolved(engine, layer, batch, rows, normalise=True)
    tables, pool = _tables(batch), layer.kv_cache[1]
    if first := tables.first:
        _decode_rows(
            layer, rows[:first], b[:first], a[:first], tables.decoding, out[:first],
            normalised=normalised,
        )  # fmt: skip
        rows, b, a, out = (x[first:] for x in (rows, b, a, out))
    q, k, v, g, beta = _split(layer, rows, b, a)
    flags = FLAGS | {"use_qk_l2norm_in_kernel": not normalised}
    prefill_gated_delta_rule(
        q, k, v, g, beta, pool, **tables.others, cu_seqlens=batch.prefill_query_start_loc,
        checkpoints=None if tables.kept is None else pool, A_log=layer.A_log,
        dt_bias=layer.dt_bias, out=out.unsqueeze(0), **flags,
    )  # fmt: skip
    say_ran("vLLM", "prefill", out.device)


def _verify(
    engine: Any, layer: Any, batch: Any, rows: Tensor, b: Tensor, a: Tensor, out: Tensor
) -> None:
    """Runs a batch of drafts, whose states are saved so that drafts can be rejected later."""
    count = batch.num_spec_decodes
    slots, bounds = batch.spec_state_indices_tensor, batch.spec_query_start_loc
    states, parameters = _convolution(engine, layer)
    rows = engine.causal_conv1d_update(
        rows,
        states,
        *parameters,
        conv_state_indices=slots[:count, 0],
        num_accepted_tokens=batch.num_accepted_tokens,
        query_start_loc=bounds,
        max_query_len=slots.shape[-1],
        validate_data=False,
    )
    q, k, v, g, beta = _split(layer, rows, b, a)
    verify_gated_delta_rule(
        q, k, v, g, beta, layer.kv_cache[1], slots[:count],
        num_accepted_tokens=batch.num_accepted_tokens[:count], cu_seqlens=bounds[: count + 1],
        A_log=layer.A_log, dt_bias=layer.dt_bias, out=out.unsqueeze(0), **FLAGS,
    )  # fmt: skip
    say_ran("vLLM", "verification of drafts", out.device)
