"""Layers of Megatron-Core on CPUs, with stand-ins for FLA's kernels; on four ranks, if run.

Megatron makes parameters on the current GPU, and FLA's kernels need one. The stand-ins are written
with torch and Megatron's own torch rule, sequence by sequence.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import (
    GatedDeltaNet,
    GatedDeltaNetSubmodules,
    torch_chunk_gated_delta_rule,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import conv1d, rms_norm, silu

from qla_kernels.integrations import megatron
from tests.ranks import serve

HIDDEN = 32
SIZES = {
    "hidden_size": HIDDEN, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip


class Norm(nn.Module):
    """As Transformer Engine's RMSNorm."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(hidden_size)), eps
        self.first = 1 if config.layernorm_zero_centered_gamma else 0

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight + self.first, self.eps)


def by_sequence(function: Callable[..., Tensor], cu_seqlens: Tensor | None, *xs: Tensor) -> Tensor:
    """Returns function(*xs), or of xs [1, T, ..] of each sequence."""
    if cu_seqlens is None:
        return function(*xs)
    parts = zip(*(x.split(cu_seqlens.diff().tolist(), 1) for x in xs), strict=True)
    return torch.cat([function(*part) for part in parts], 1)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    initial_state: None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, None]:
    """As fla.modules.convolution.causal_conv1d."""
    assert (activation, initial_state, output_final_state) == ("silu", None, False)

    def of_sequence(x: Tensor) -> Tensor:
        W = weight.shape[1]
        y = conv1d(x.mT, weight[:, None], bias, padding=W - 1, groups=len(weight))
        return silu(y[..., : x.shape[1]].mT)

    return by_sequence(of_sequence, cu_seqlens, x), None


def rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """As fla.ops.gated_delta_rule.chunk_gated_delta_rule."""

    def of_sequence(*xs: Tensor) -> Tensor:
        return torch_chunk_gated_delta_rule(*xs, **more)[0]

    return by_sequence(of_sequence, cu_seqlens, q, k, v, g, beta), None


def l2norm(x: Tensor) -> Tensor:
    """As fla.modules.l2norm.l2norm."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def stand_in(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Puts the stand-ins where Megatron looks for kernels and for the current GPU."""
    put(torch.cuda, "current_device", lambda: "cpu")
    theirs = {"causal_conv1d": convolution, "l2norm": l2norm, "chunk_gated_delta_rule": rule}
    for name, module in [*sys.modules.items()]:
        if name.startswith(megatron.HOME):
            for attribute in theirs.keys() & vars(module).keys():
                put(module, attribute, theirs[attribute])


def submodules(out_norm: Any) -> GatedDeltaNetSubmodules:
    return GatedDeltaNetSubmodules(ColumnParallelLinear, out_norm, RowParallelLinear)


def layer(
    tp: Any = None,
    cp: Any = None,
    conv_bias: bool = False,
    use_qk_l2norm: bool = True,
    kind: Any = GatedDeltaNet,
    out_norm: Any = Norm,
    **more: Any,
) -> Any:
    """Returns a layer with random parameters, the same on all ranks; groups are the world's."""
    groups = ProcessGroupCollection()
    groups.tp, groups.cp = tp or dist.group.WORLD, cp or dist.group.WORLD
    groups.pp = dist.group.WORLD  # transformer layers ask for their number in it
    options = {"normalization": "RMSNorm", "activation_func": silu, "add_bias_linear": False}
    options |= {"perform_initialization": False, "gradient_accumulation_fusion": False}
    options |= {"num_layers": 1, "num_attention_heads": 4, **SIZES, **more}
    options["tensor_model_parallel_size"] = groups.tp.size()
    options["context_parallel_size"] = groups.cp.size()
    made = kind(
        TransformerConfig(**options), submodules(out_norm), 1, conv_bias=conv_bias,
        use_qk_l2norm=use_qk_l2norm, pg_collection=groups,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return made


def pack(*lengths: int, padded: bool = False) -> PackedSeqParams:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    if not padded:
        return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    actual = bounds - torch.arange(len(bounds)).int()
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=actual, cu_seqlens_kv=actual,
        cu_seqlens_q_padded=bounds, cu_seqlens_kv_padded=bounds.clone(),
    )  # fmt: skip


def step(
    layer: Any, tokens: int = 80, batch: int = 1, params: PackedSeqParams | None = None, **more: Any
) -> dict[str, Tensor]:
    """Returns a layer's result and all gradients."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, batch, HIDDEN, generator=generator, requires_grad=True)
    layer.zero_grad()
    y, bias = layer(x, attention_mask=None, packed_seq_params=params, **more)
    assert bias is None
    y.backward(torch.randn(y.shape, generator=generator))
    grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Returns the largest relative distance."""
    assert got.keys() == want.keys()
    return max(float((got[name] - x).norm() / x.norm()) for name, x in want.items())


CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {  # tp, cp, layer, call
    "tp 2": (2, 1, {}, {}),
    "tp 4, sequence parallel": (4, 1, {"sequence_parallel": True}, {"tokens": 16}),
    "tp 2, pack": (2, 1, {}, {"params": pack(30, 1, 49)}),
    "cp 2": (1, 2, {}, {}),
    "cp 4, two rows": (1, 4, {"conv_bias": True}, {"tokens": 12, "batch": 2}),
    "cp 2, pack": (1, 2, {}, {"params": pack(20, 4, 40, 16), "tokens": 40}),
    "cp 4, pack": (1, 4, {}, {"params": pack(40, 8, 64, padded=True), "tokens": 28}),
    "tp 2, cp 2, pack": (2, 2, {}, {"params": pack(20, 4, 40, 16), "tokens": 40}),
}


def results(rank: int) -> Iterator[tuple[str, Any]]:
    stand_in()
    parallel_state._set_global_memory_buffer()  # of sequence parallelism
    for name, (tp, cp, options, call) in CASES.items():
        groups = [dist.new_group([*range(x, x + tp)]) for x in range(0, tp * cp, tp)]
        across = [dist.new_group([*range(x, tp * cp, tp)]) for x in range(tp)]
        if rank >= tp * cp:
            continue
        made = layer(groups[rank // tp], across[rank % tp], **options)
        want = step(made, **call)
        number = megatron.swap(made)
        yield name, (number, distance(step(made, **call), want))


if __name__ == "__main__":
    torch.compiler.set_stance("force_eager")
    serve(results)
