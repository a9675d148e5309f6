"""Layers of models made concrete: modules, inputs, counted work, and truth.

Truth is the same layers in fp32 with PyTorch's definition of the gated delta rule and of the
convolution, in fp64 without a GPU. Embeddings, the head and the optimizer are left out: they are
the same for everyone.
"""

import copy
import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ..gdn.problem import gdn_work
from ..gdn.workloads import Gdn
from ..harness.adapters import Call, Outputs
from ..harness.truth import Truth
from ..harness.workload import Work
from .workloads import FLA, FULL, LINEAR, QWEN, ModelStep

MODULES = {"qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5TextModel"),
           "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridModel")}  # fmt: skip
RULE, STEP, CONVOLUTION = (
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn",
)  # fmt: skip
FUNCTIONS = RULE, STEP, CONVOLUTION  # of a module of transformers, since 5.15
OF_FLA = "chunk_gated_delta_rule"
PROJECTIONS = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"  # of Qwen3.5's mixer


@dataclass
class Layers:
    """A module, the Python module whose functions it calls, and how it is called."""

    module: nn.Module
    home: ModuleType
    forward: Callable[..., Tensor]  # of the module and the tensors of ModelInputs.x

    def parameters(self) -> dict[str, Tensor]:
        return {n: p for n, p in self.module.named_parameters() if "embed_tokens" not in n}


class ModelInputs(NamedTuple):
    x: tuple[Tensor, ...]  # [B, T, hidden], or what a region's projections return
    dy: Tensor  # [B, T, hidden], or of a region [B, T, HV V]
    layers: Layers


def model_inputs(
    workload: ModelStep, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> ModelInputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(columns: int) -> Tensor:
        shape = *rows_of(workload), columns
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    hidden, _, _, (H, HV, K, V) = workload.sizes
    if workload.region:
        x = tuple(map(normal, (2 * H * K + HV * V, HV * V, HV, HV)))
    else:
        x = (normal(hidden),)
    dy = normal(HV * V if workload.region else hidden)
    return ModelInputs(x, dy, layers_of(workload, device, dtype))


def rows_of(workload: ModelStep) -> tuple[int, int]:
    """The sizes B, T of the batch."""
    return (1, workload.tokens) if workload.packed else (len(workload.lengths), workload.lengths[0])


def bounds_of(x: Tensor, workload: ModelStep) -> dict[str, Any]:
    """Where the sequences of x [B, T, ..] are, as transformers' collators say it."""
    if not workload.packed or x.shape[:2] != rows_of(workload):
        return {}
    length, count = workload.lengths[0], len(workload.lengths)
    bounds = torch.arange(count + 1, dtype=torch.int32, device=x.device) * length
    of_token = torch.arange(workload.tokens, device=x.device)[None]
    return {
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": length,
        "max_length_k": length, "seq_idx": (of_token // length).int(),
        "position_ids": of_token % length,
    }  # fmt: skip


class Projection(nn.Module):
    """In place of a layer that projects: returns a given tensor."""

    result: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.result


def layers_of(workload: ModelStep, device: torch.device, dtype: torch.dtype) -> Layers:
    """Random weights of a library's own initialisation, and memories of a few to many tokens."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(0)
        found = _of_fla(workload) if workload.model == FLA else _of_transformers(workload)
        for name, parameter in found.module.named_parameters():
            if name.endswith("A_log"):
                decay = torch.rand(parameter.shape, device=device)
                parameter.data = (1 + 15 * decay).log() - 3
    found.module.to(dtype)
    return found


def _of_transformers(workload: ModelStep) -> Layers:
    name = "qwen3_5" if workload.model == QWEN else "olmo_hybrid"
    configs, models = (
        importlib.import_module(f"transformers.models.{name}.{part}_{name}")
        for part in ("configuration", "modeling")
    )
    sizes, (config, model) = workload.sizes, MODULES[name]
    (kv_heads, heads, size), (H, HV, K, V) = sizes.attention, sizes.linear
    given = {
        "vocab_size": 16, "hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate,
        "num_hidden_layers": LINEAR + FULL, "num_attention_heads": heads,
        "layer_types": ["linear_attention"] * LINEAR + ["full_attention"] * FULL,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 65536,
        "linear_num_key_heads": H, "linear_num_value_heads": HV, "linear_key_head_dim": K,
        "linear_value_head_dim": V, "use_cache": False,
        "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    if workload.model == QWEN:  # heads of others are a share of the hidden size
        given["head_dim"] = size
    module = getattr(models, model)(getattr(configs, config)(**given)).train()

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        bounds = bounds_of(x, workload)
        y: Tensor = module(inputs_embeds=x, use_cache=False, **bounds).last_hidden_state
        return y

    def region(module: nn.Module, *parts: Tensor) -> Tensor:
        for name, part in zip(PROJECTIONS, parts, strict=True):
            getattr(module, name).result = part
        bounds = bounds_of(parts[0], workload)
        bounds.pop("position_ids", None)
        y: Tensor = module(parts[1], **bounds)
        return y

    if not workload.region:
        return Layers(module, models, forward)
    mixer = module.layers[0].linear_attn
    for name in PROJECTIONS:
        setattr(mixer, name, Projection())
    mixer.out_proj = nn.Identity()
    return Layers(mixer, models, region)


def _of_fla(workload: ModelStep) -> Layers:
    home = importlib.import_module("fla.layers.gated_deltanet")
    heads, _, K, V = workload.sizes.linear
    module = home.GatedDeltaNet(
        workload.sizes.hidden, expand_v=V / K, head_dim=K, num_heads=heads
    ).train()

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = module(x)[0]
        return y

    return Layers(module, home, forward)


@contextmanager
def exchanged(home: ModuleType, functions: dict[str, Any]) -> Iterator[None]:
    """A Python module calls these functions in place of its own."""
    before = {name: getattr(home, name) for name in functions}
    for name, function in functions.items():
        setattr(home, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(home, name, function)


def functions_of(home: ModuleType) -> dict[str, Any]:
    return {name: getattr(home, name) for name in FUNCTIONS}


def step_of(inputs: ModelInputs, within: Callable[[], AbstractContextManager[None]]) -> Call:
    """Forward and backward of x and of all weights; `within` selects who computes."""
    layers = inputs.layers
    parameters = layers.parameters()

    def run() -> tuple[Tensor, ...]:
        x = [part.detach().requires_grad_() for part in inputs.x]
        with within():
            y = layers.forward(layers.module, *x)
            grads = torch.autograd.grad(y, [*x, *parameters.values()], inputs.dy)
        return y.detach(), *grads

    def collect(raw: tuple[Tensor, ...]) -> Outputs:
        names = ["y", *(f"dx.{i}" if i else "dx" for i in range(len(inputs.x)))]
        outputs = {n: x.flatten(0, 1)[None, :, None] for n, x in zip(names, raw, strict=False)}
        names = [f"{'dg' if n.endswith(('A_log', 'dt_bias')) else 'dw'}.{n}" for n in parameters]
        of_weights = zip(names, raw[len(outputs) :], strict=True)
        return outputs | {n: x.reshape(1, 1, 1, -1) for n, x in of_weights}

    return Call(run, collect, capture=False)


def definitions(layers: Layers) -> dict[str, Any]:
    """PyTorch's functions, by the name under which `layers` calls them."""
    if hasattr(layers.home, RULE):
        return {name: plain(getattr(layers.home, name)) for name in FUNCTIONS}
    qwen = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    rule = plain(getattr(qwen, RULE))

    def activated(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
        A_log: Tensor, dt_bias: Tensor, **_: Any,
    ) -> Any:  # fmt: skip
        decay = -A_log.exp() * softplus(g + dt_bias)
        return rule(q, k, v, g=decay, beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True)

    return {OF_FLA: activated}


def plain(function: Any) -> Any:
    """The function of PyTorch's that transformers runs where no other library has it."""
    return getattr(function, "__wrapped__", function)


def model_truth(workload: ModelStep, inputs: ModelInputs) -> Truth:
    dtype = torch.float32 if inputs.dy.is_cuda else torch.float64
    wide = Layers(
        copy.deepcopy(inputs.layers.module).to(dtype), inputs.layers.home, inputs.layers.forward
    )
    rows = len(workload.lengths), workload.lengths[0], -1  # of packs, too
    x = tuple(part.to(dtype).reshape(rows) for part in inputs.x)
    exact = ModelInputs(x, inputs.dy.to(dtype).reshape(rows), wide)
    call = step_of(exact, partial(exchanged, wide.home, definitions(wide)))
    want = {name: x.float() for name, x in call.collect(call.run()).items()}
    # layers behind each other round after each half; fp32 itself is what is left on a CPU, whose
    # libraries compute norms and the rule in fp32
    return Truth(want, (0,), 1, slack=math.sqrt(2 * 2 * (LINEAR + FULL)))


def model_work(workload: ModelStep, element_size: int) -> Work:
    """Three products of each weight and token, seven of each visible pair, the gated delta rule's.

    Bytes are x, dy, y and dx, and weights and their gradients: intermediate tensors do not count.
    """
    hidden, wide, (kv_heads, heads, size), (H, HV, K, V) = workload.sizes
    rule = gdn_work(Gdn((H, HV), workload.lengths, "both", head_dim=K, value_dim=V), element_size)
    if workload.region:
        numbers = 2 * H * K + 3 * HV * V + 2 * HV  # in, and out; likewise their gradients
        return Work(rule.flops, 2.0 * element_size * numbers * workload.tokens)
    linear = hidden * (2 * H * K + 3 * HV * V + 2 * HV)
    gate = 2 if workload.model == QWEN else 1  # Qwen's queries have gates
    full = hidden * size * ((gate + 1) * heads + 2 * kv_heads)
    layers = (LINEAR, FULL) if heads else (1, 0)
    parameters = layers[0] * linear + layers[1] * full + sum(layers) * 3 * hidden * wide
    pairs = sum(n * (n + 1) / 2 for n in workload.lengths)
    flops = 6.0 * parameters * workload.tokens + layers[0] * rule.flops
    flops += layers[1] * 7 * 2.0 * pairs * heads * size
    return Work(flops, element_size * (4.0 * workload.tokens * hidden + 2 * parameters))
