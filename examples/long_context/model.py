"""The model: a causal language model of transformers, its loss, and its distribution by FSDP2."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from long_context.loss import linear_cross_entropy
from qla_kernels.integrations import transformers_sparse_ring as hook

# Qwen2.5-3B, and one that a CPU trains in a second
SIZES: dict[str, dict[str, Any]] = {
    "qwen2.5-3b": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True, "rope_theta": 1e6,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
        "tie_word_embeddings": True, "rope_theta": 1e4,
    },
}  # fmt: skip


class LanguageModel(nn.Module):
    """A causal language model whose call returns its loss.

    FSDP gathers the output layer's weight when the call of the root module begins. So the loss,
    which reads this weight, is computed inside that call.
    """

    def __init__(self, causal: nn.Module, rows: int) -> None:
        super().__init__()
        self.causal, self._rows = causal, rows

    def forward(
        self, tokens: Tensor, labels: Tensor, positions: Tensor, **attention: Any
    ) -> Tensor:
        """Returns the sum of the losses of this rank's tokens."""
        hidden = self.causal.get_decoder()(
            input_ids=tokens, position_ids=positions, use_cache=False, **attention
        ).last_hidden_state
        weight = self.causal.get_output_embeddings().weight
        return linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten(), self._rows)


def configuration(
    name: str, length: int, layers: int | None, dense_layers: Sequence[int] = ()
) -> Any:
    """Returns the configuration of a model; ends the program if such a model cannot run.

    `layers` keeps only the first ones.
    """
    import transformers

    if name in SIZES:
        config = transformers.Qwen2Config(**SIZES[name], max_position_embeddings=length)
    else:
        config = transformers.AutoConfig.from_pretrained(name)
    text = config.get_text_config()
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    try:
        hook.check(config)
        hook.check_layers(dense_layers, config)
    except ValueError as error:
        raise SystemExit(f"--model {name}: {error}") from None
    return config


def causal_model(name: str, config: Any, attention: str, device: torch.device) -> nn.Module:
    """Returns a model in fp32: one of SIZES with random weights, or a checkpoint in a folder.

    Random weights are made on the device, and are the same on every rank and for any number of
    ranks. A checkpoint is read into the memory of the host.
    """
    import transformers

    made: Any = transformers.AutoModelForCausalLM
    options = {"attn_implementation": attention, "dtype": torch.float32}
    if name in SIZES:
        torch.manual_seed(0)
        with device:
            model = made.from_config(config, **options)
    else:
        model = made.from_pretrained(name, config=config, **options)
    hook.check(model)
    return model


def distributed(
    causal: nn.Module, mesh: DeviceMesh, rows: int, checkpointing: bool
) -> LanguageModel:
    """Shards parameters, gradients and optimizer state over all ranks of a mesh.

    On GPUs a layer's parameters are gathered in bf16, gradients are reduced in fp32, and the shards
    stay in fp32. With `checkpointing` a layer keeps its input alone, and runs again in the
    backward.
    """
    model = LanguageModel(causal, rows)
    on_gpu, layers = mesh.device_type == "cuda", causal.get_decoder().layers
    dtypes = MixedPrecisionPolicy(torch.bfloat16 if on_gpu else None, torch.float32)
    for n in range(len(layers)):
        if checkpointing:
            layers[n] = checkpoint_wrapper(layers[n], preserve_rng_state=False)
        fully_shard(layers[n], mesh=mesh, mp_policy=dtypes)
    fully_shard(model, mesh=mesh, mp_policy=dtypes)
    return model.train()
