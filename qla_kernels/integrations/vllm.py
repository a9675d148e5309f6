"""vLLM's layers of Qwen3-Next and Qwen3.5 on our kernels: an entry point of vllm.general_plugins.

    VLLM_PLUGINS=qla_kernels vllm serve ...

`register` replaces the layer QwenGatedDeltaNetAttention by ours, which runs prefill, decode and
verification of drafts on our kernels and updates states in the pages of vLLM's cache. In a decoding
step our kernels also run the convolution and the norm; otherwise these, and always the projections,
stay vLLM's. Other kinds of batches run on vLLM's kernels. Under QLA_BATCH_INVARIANT=1 the layer is
that of vllm_bits.py.
"""

import os
from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn import (
    packed_decode_gated_delta_rule,
    prefill_gated_delta_rule,
    verify_gated_delta_rule,
)
from qla_kernels.hybrid.step import decode_gated_delta_net
from qla_kernels.integrations.engines import log, say_ran, unknown_version
from qla_kernels.integrations.vllm_checks import refused, say_mixed
from qla_kernels.runtime.arguments import switched_on
from qla_kernels.runtime.errors import Unsupported

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
    """Makes vLLM's gated-delta-net layers run on our kernels; vLLM calls it when it loads plug-ins.

    Does nothing unless the environment variable VLLM_PLUGINS names "qla_kernels". Raises
    Unsupported if vLLM is not installed, or has a version that was not tested.
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
    PluggableLayer.register_oot(name=LAYER)(layer)
    log.info("vLLM: %s runs on qla_kernels: %s", LAYER, what)


def layer_on(engine: Any) -> type:
    """Returns a subclass of vLLM's gated-delta-net layer that runs on our kernels.

    `engine` is vLLM's module qwen_gdn_linear_attn, which defines the layer. Constructing the new
    class raises Unsupported if our kernels cannot run the layer's sizes or dtypes.
    """
    base: Any = getattr(engine, LAYER)

    class QlaGatedDeltaNetAttention(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            if reason := refused(self):
                raise Unsupported(reason)
            # vLLM's switch for the operator that has the gate among its arguments
            self.enable_fused_gdn_spec_decode |= _can_norm(self)

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
            if batch is None or not (_only_decodes(batch) and _can_norm(self)):
                super()._forward_core_fused_norm(*tensors[:3], output_gate, core_attn_out)
                return
            n = batch.num_actual_tokens
            rows, b, a, out = (x[:n] for x in tensors)
            _decode(engine, self, batch, rows, b, a, out, output_gate[:n])

        def _forward_core(
            self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor
        ) -> None:
            batch = _batch(engine, self)
            if batch is None:  # while vLLM measures memory
                super()._forward_core(mixed_qkv, b, a, core_attn_out)
                return
            n = batch.num_actual_tokens
            tensors = mixed_qkv[:n], b[:n], a[:n], core_attn_out[:n]
            if batch.spec_sequence_masks is None and batch.num_prefills > 0:
                _prefill(engine, self, batch, *tensors)
            elif _only_decodes(batch):
                _decode(engine, self, batch, *tensors)
            elif batch.spec_sequence_masks is not None and not (
                batch.num_prefills or batch.num_decodes
            ):
                _verify(engine, self, batch, *tensors)
            else:
                if batch.spec_sequence_masks is not None:
                    say_mixed()
                super()._forward_core(mixed_qkv, b, a, core_attn_out)

    return QlaGatedDeltaNetAttention


def _batch(engine: Any, layer: Any) -> Any:
    """Returns the metadata of the batch for this layer, or None while vLLM profiles."""
    metadata = engine.get_forward_context().attn_metadata
    return metadata.get(layer.prefix) if isinstance(metadata, dict) else None


def _only_decodes(batch: Any) -> bool:
    """Returns whether a batch has one token of each sequence, and no drafts."""
    return batch.spec_sequence_masks is None and not batch.num_prefills and batch.num_decodes > 0


def _can_norm(layer: Any) -> bool:
    """Returns whether our decoding step can also run the layer's norm and output gate.

    Not if the next projection is quantised, because vLLM's compiler then fuses it with the norm.
    """
    norm = layer.norm
    return (
        not layer.gqa_interleaved_layout
        and layer.quant_config is None
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
    rows = engine.causal_conv1d_update(
        rows, states, *parameters, conv_state_indices=slots, validate_data=False
    )
    _decode_rows(layer, rows, b, a, slots, out, norm)


def _decode_rows(
    layer: Any,
    rows: Tensor,
    b: Tensor,
    a: Tensor,
    slots: Tensor,
    out: Tensor,
    norm: dict[str, Any] | None = None,
) -> None:
    """Runs the gated delta rule for one token of each sequence, after vLLM's convolution."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    packed_decode_gated_delta_rule(
        rows, a, b, layer.A_log, layer.dt_bias, layer.kv_cache[1], slots,
        null_slot=NULL_SLOT, out=out.unsqueeze(1), **(norm or {}),
    )  # fmt: skip
    say_ran("vLLM", "decode", out.device)


def _convolved(engine: Any, layer: Any, batch: Any, rows: Tensor) -> Tensor:
    """Runs vLLM's convolution on a batch with prefill; returns the rows of all its tokens."""
    states, (weight, bias, activation) = _convolution(engine, layer)
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
    return convolved.transpose(0, 1)


def _prefill(
    engine: Any, layer: Any, batch: Any, rows: Tensor, b: Tensor, a: Tensor, out: Tensor
) -> None:
    """Runs a batch with prefill: first the sequences that decode one token, then the others."""
    before = rows
    rows = _convolved(engine, layer, batch, rows)
    first = batch.num_decode_tokens if batch.num_decodes > 0 else 0
    if first:
        slots = batch.non_spec_state_indices_tensor[:first]
        _decode_rows(layer, rows[:first], b[:first], a[:first], slots, out[:first])
    keep: dict[str, Any] = {}
    plan = batch.flashinfer_checkpoint_plan
    if plan is not None:
        workspace = engine.current_workspace_manager()
        (room,) = workspace.get_simultaneous(layer._checkpoint_buffer_spec)
        keep["checkpoints"] = room[: plan.num_checkpoints]
        keep |= {"checkpoint_every": plan.every_n_tokens, "checkpoint_starts": plan.cu_starts}
    q, k, v, g, beta = _split(layer, rows[first:], b[first:], a[first:])
    prefill_gated_delta_rule(
        q, k, v, g, beta, layer.kv_cache[1], batch.prefill_state_indices,
        start_indices=_starts(batch), cu_seqlens=batch.prefill_query_start_loc,
        A_log=layer.A_log, dt_bias=layer.dt_bias, out=out[first:].unsqueeze(0), **keep, **FLAGS,
    )  # fmt: skip
    say_ran("vLLM", "prefill", out.device)
    if plan is not None:
        layer._checkpoint_exporter.export(
            batch.checkpoint,
            raw_qkv=before,
            conv_state=_convolution(engine, layer)[0],
            recurrent_checkpoint=keep["checkpoints"],
            recurrent_state=layer.kv_cache[1],
            cu_seqlens=batch.non_spec_query_start_loc,
            recurrent_rows=plan.rows,
        )


def _starts(batch: Any) -> Tensor:
    """Returns the slot from whose state each sequence of a prefill starts; new ones have slot 0.

    Computed once per batch, by the first layer.
    """
    starts: Tensor | None = getattr(batch, "qla_start_indices", None)
    if starts is None:
        slots, has = batch.prefill_state_indices, batch.prefill_has_initial_state
        starts = batch.qla_start_indices = torch.where(has, slots, NULL_SLOT).int()
    return starts


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
