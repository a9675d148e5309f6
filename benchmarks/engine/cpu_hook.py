"""Parts of vLLM's CPU engine that our layer needs there: functions of torch for Triton ones."""

# mypy: allow-untyped-defs
import torch
import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn as engine
from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d as conv
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _unpacked_conv_weight

setup = globals()["setup"]
Layer = engine.QwenGatedDeltaNetAttention
start = Layer.__init__


def convolve(x, weight, bias=None, activation=None, conv_states=None, has_initial_state=None,
             cache_indices=None, query_start_loc=None, metadata=None, **_):  # fmt: skip
    return conv.causal_conv1d_fn_cpu(
        x=x, weight=weight, bias=bias, conv_states=conv_states, query_start_loc=query_start_loc,
        cache_indices=cache_indices, has_initial_state=has_initial_state, activation=activation,
    )  # fmt: skip


def update(x, states, weight, bias=None, activation=None, conv_state_indices=None, **_):
    return conv.causal_conv1d_update_cpu(
        x=x, conv_state=states, weight=weight, bias=bias, activation=activation,
        conv_state_indices=conv_state_indices,
    )  # fmt: skip


def init(self, *args, **named):
    start(self, *args, **named)
    if type(self).__name__.startswith("Qla"):
        self._forward_method = self.forward_cuda


def norm(self, x, gate, out):
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.norm.eps) * self.norm.weight.float()
    g = gate.float()
    silu = self.norm.activation in ("silu", "swish")
    out.copy_((y * (g * torch.sigmoid(g) if silu else torch.sigmoid(g))).to(out.dtype))


engine.causal_conv1d_fn, engine.causal_conv1d_update = convolve, update
Layer.__init__, Layer._rms_norm_gated_cuda = init, norm
Layer._warmup_prefill_kernels = lambda *_: None

if setup["who"] == "on":
    from qla_kernels.integrations import vllm as plain

    usual = plain._convolution

    def convolution(module, layer):  # the packed weight of the CPU engine holds other numbers
        states, (_, bias, activation) = usual(module, layer)
        return states, (_unpacked_conv_weight(layer), bias, activation)

    plain._convolution = convolution
    if setup.get("prefill") == "flashinfer":
        from vllm.model_executor.layers.mamba import checkpoint

        def export(self, kept, *, raw_qkv, conv_state, cu_seqlens, recurrent_checkpoint=None,
                   recurrent_state=None, recurrent_rows=None, token_indices=None):  # fmt: skip
            for i, (offset, slot) in enumerate(
                zip(kept.checkpoint_offsets.tolist(), kept.state_indices.tolist(), strict=True)
            ):
                if slot == 0 or offset <= 0:
                    continue
                end = int(cu_seqlens[i]) + offset
                if offset >= self.state_len:
                    conv_state[slot] = raw_qkv[end - self.state_len : end].T
                if recurrent_checkpoint is not None:
                    row = i if recurrent_rows is None else int(recurrent_rows[i])
                    recurrent_state[slot] = recurrent_checkpoint[row].to(recurrent_state.dtype)

        class Workspace:
            def get_simultaneous(self, *specs):
                return [torch.empty(size, dtype=dtype) for size, dtype in specs]

        checkpoint.MambaPrefillCheckpointExporter.export = export
        engine.current_workspace_manager = Workspace
        engine._resolve_gdn_prefill_backend = lambda _: ("auto", "flashinfer")
        engine._log_gdn_backend_decision = lambda *_: None
