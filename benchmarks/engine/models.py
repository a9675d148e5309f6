"""Models with random weights, as checkpoints that vLLM and transformers read; prompts."""

import json
import math
import random
import tempfile
import zlib
from pathlib import Path
from typing import Any

VOCAB = 32768
ROOM = Path(tempfile.gettempdir(), "qla_engine_models")
# hidden, layers, attention heads, kv heads, head size, linear key and value heads, MLP
SIZES = {
    "check": (2048, 8, 16, 2, 256, 16, 32, 5120),
    "few": (2048, 4, 16, 2, 256, 16, 32, 1024),
    "small": (256, 4, 4, 2, 64, 2, 4, 512),
    "4b": (2560, 32, 16, 4, 256, 16, 32, 9216),
    "9b": (4096, 32, 16, 4, 256, 16, 32, 12288),
}
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip


def config(kind: str, size: str) -> dict[str, Any]:
    """Returns the configuration of a model: kind "qwen35", "qwen35-moe" or "next-moe"."""
    hidden, layers, heads, kv, head, keys, values, inner = SIZES[size]
    rope: dict[str, Any] = {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    }  # fmt: skip
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    text: dict[str, Any] = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": head, "intermediate_size": inner,
        "vocab_size": 248320 if size[0].isdigit() else VOCAB, "hidden_act": "silu",
        "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": keys,
        "linear_num_value_heads": values, "attention_bias": False, "tie_word_embeddings": False,
        "full_attention_interval": 4, "layer_types": kinds, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 2, "dtype": "bfloat16", "use_cache": True, "rope_parameters": rope,
    }  # fmt: skip
    family, _, moe = kind.partition("-")
    if family == "next":
        name = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
        return text | EXPERTS | name | {"decoder_sparse_step": 1, "mlp_only_layers": [],
                                        "norm_topk_prob": True}  # fmt: skip
    halves = head // 8  # of the quarter of a head that is rotated
    part = halves // 3
    rope |= {"mrope_section": [halves - 2 * part, part, part], "mrope_interleaved": True}
    text |= {"mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    if moe:
        name = {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
        return text | EXPERTS | name
    return text | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}


def folder(kind: str, size: str) -> Path:
    """Returns the folder of a model, in which there is at least its config.json."""
    place = ROOM / f"{kind}-{size}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config(kind, size), indent=1))
    return place


def model_of(kind: str, size: str, dtype: Any, device: str) -> Any:
    """Returns transformers' model with the weights of the checkpoint, which bf16 can represent."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = config(kind, size)
    made = AutoConfig.for_model(**given)
    with torch.device(device):
        build: Any = AutoModelForCausalLM.from_config
        model = build(made, dtype=dtype, attn_implementation="sdpa")
    for name, x in model.named_parameters():
        x.data.copy_(weights(name, x.shape, device))
    return model.eval()


def weights(name: str, shape: Any, device: str) -> Any:
    """Returns a parameter by its name: sublayers add about as much as they get, logits spread."""
    import torch

    draw = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))

    def normal(std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device=device) * std + mean

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=draw, device=device) * (high - low) + low

    if name.endswith("A_log"):
        x = uniform(1.0, 8.0).log()
    elif name.endswith("dt_bias"):
        x = torch.expm1(torch.exp(uniform(math.log(2e-3), math.log(0.1)))).log()
    elif name.endswith("linear_attn.norm.weight"):
        x = normal(0.1, 1.0)
    elif "norm" in name:
        x = normal(0.1)  # the model adds 1
    elif "conv1d" in name:
        x = normal(0.5)
    elif "embed" in name:
        x = normal(1.0)
    elif "lm_head" in name:
        x = normal(3 / math.sqrt(shape[-1]))
    else:
        x = normal(1 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.1)
    return x.bfloat16()


def checkpoint(kind: str, size: str, device: str) -> Path:
    """Writes a model's checkpoint unless it is there, with a layer for MTP drafts; its folder."""
    import torch
    from safetensors.torch import save_file

    place = folder(kind, size)
    if (place / "model.safetensors").exists():
        return place
    out: dict[str, torch.Tensor] = {}
    for name, x in model_of(kind, size, torch.bfloat16, device).named_parameters():
        x = x.data.cpu().contiguous()
        stem, experts, part = name.partition(".experts.")
        if not experts or kind != "next-moe":
            out[name] = x
            continue
        for e, own in enumerate(x):  # as Qwen3-Next's checkpoints have them
            if part == "gate_up_proj":
                for which, half in zip(("gate_proj", "up_proj"), own.chunk(2), strict=True):
                    out[f"{stem}.experts.{e}.{which}.weight"] = half.contiguous()
            else:
                out[f"{stem}.experts.{e}.down_proj.weight"] = own.contiguous()
    attention = next(n for n in out if n.endswith("self_attn.q_proj.weight"))
    layer = attention.partition("self_attn")[0]
    for name in [n for n in out if n.startswith(layer)]:
        own = f"mtp.layers.0.{name.removeprefix(layer)}"
        out[own] = weights(own, out[name].shape, "cpu")
    hidden = config(kind, size)["hidden_size"]
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        out[f"mtp.{name}.weight"] = weights(f"mtp.{name}.weight", (hidden,), "cpu")
    out["mtp.fc.weight"] = weights("mtp.fc.weight", (hidden, 2 * hidden), "cpu")
    part = place / f"model.{random.getrandbits(30)}.part"
    save_file(out, part)
    part.rename(place / "model.safetensors")
    return place


def tokens(seed: int, count: int, vocab: int = VOCAB) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(16, vocab) for _ in range(count)]


def prompts(small: bool) -> dict[str, list[int]]:
    """Prompts of many lengths; some share a beginning, and one repeats itself (n-gram drafts)."""
    lengths = (5, 1, 64, 150) if small else (5, 1, 64, 65, 500, 1000, 2049, 4096)
    out = {f"n{n}": tokens(n, n) for n in lengths}
    begin = tokens(77, 700 if small else 3000)
    for i, (seed, more) in enumerate(((78, 30), (79, 90), (80, 333))):
        out[f"shared{i}"] = begin + tokens(seed, more)
    out["same"] = out["shared0"]
    out["repeat"] = tokens(81, 12) * 10
    if not small:
        out["long"] = tokens(82, 9000)
    return out


def is_layer(module: Any) -> bool:
    return "GatedDeltaNet" in type(module).__name__
