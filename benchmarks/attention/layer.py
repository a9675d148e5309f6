"""One decoder layer as a model runs it in training: packed by us, every sequence in full by others.

It is Qwen3's: y = x' + MLP(norm(x')), x' = x + attention(norm(x)), with norms of query and key
heads and rotations by position. All but attention is PyTorch's, and the same for everyone; the
rotations' angles are a model's, made before.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from ..harness.adapters import Call, Outputs
from ..harness.floor import Work
from ..harness.truth import Truth
from .replicas import Replicas, replicas
from .workloads import DecoderLayer

EPSILON, THETA = 1e-6, 1e6  # of the norms, of the rotations: as published with the model

# o [T, H, D] of q [T, H, D] and of k, v [T, Hk, D]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Weights(NamedTuple):
    q_proj: Tensor  # [H D, hidden]
    k_proj: Tensor  # [Hk D, hidden]
    v_proj: Tensor  # [Hk D, hidden]
    o_proj: Tensor  # [hidden, H D]
    gate_proj: Tensor  # [intermediate, hidden]
    up_proj: Tensor  # [intermediate, hidden]
    down_proj: Tensor  # [hidden, intermediate]
    attention_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    q_norm: Tensor  # [D]
    k_norm: Tensor  # [D]


class LayerInputs(NamedTuple):
    x: Tensor  # [T, hidden], packed
    dy: Tensor  # [T, hidden]
    weights: Weights


def layer_inputs(
    workload: DecoderLayer, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> LayerInputs:
    generator = torch.Generator(device).manual_seed(seed)
    kv_heads, heads = workload.heads
    hidden, wide, d = workload.hidden, workload.intermediate, workload.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def product(rows: int, columns: int) -> Tensor:
        return torch.mul(normal(rows, columns), columns**-0.5).to(dtype)

    def norm(size: int) -> Tensor:
        return (1 + 0.1 * normal(size)).to(dtype)

    return LayerInputs(
        x=normal(workload.tokens, hidden).to(dtype),
        dy=normal(workload.tokens, hidden).to(dtype),
        weights=Weights(
            product(heads * d, hidden), product(kv_heads * d, hidden),
            product(kv_heads * d, hidden), product(hidden, heads * d),
            product(wide, hidden), product(wide, hidden), product(hidden, wide),
            norm(hidden), norm(hidden), norm(d), norm(d),
        ),
    )  # fmt: skip


def layer_work(workload: DecoderLayer, element_size: int) -> Work:
    """Three products of each weight and token, seven of each visible pair; weights and x once."""
    pairs = 2.0 * workload.pairs * workload.head_dim * workload.heads[1]
    flops = 6.0 * workload.parameters * workload.tokens + 7 * pairs
    # x, dy in and y, dx out; weights in and their gradients out
    num = 4 * workload.tokens * workload.hidden + 2 * workload.parameters
    return Work(flops, num * element_size)


def rotations(position: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, 1, D] of each position's angles."""
    frequency = THETA ** -(torch.arange(0, head_dim, 2, device=position.device) / head_dim)
    angle = (position[:, None] * frequency).repeat(1, 2)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def decoder_layer(x: Tensor, w: Weights, turns: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
    """[T, hidden] of [T, hidden]."""

    def heads(of: Tensor, projection: Tensor) -> Tensor:
        return torch.unflatten(linear(of, projection), -1, (-1, len(w.q_norm)))

    def turned(z: Tensor, norm: Tensor) -> Tensor:
        z = rms_norm(z, norm.shape, norm, EPSILON)
        a, b = z.chunk(2, -1)
        return z * turns[0] + torch.cat((-b, a), -1) * turns[1]

    h = rms_norm(x, w.attention_norm.shape, w.attention_norm, EPSILON)
    q, k = turned(heads(h, w.q_proj), w.q_norm), turned(heads(h, w.k_proj), w.k_norm)
    x = x + linear(attend(q, k, heads(h, w.v_proj)).flatten(1), w.o_proj)
    h = rms_norm(x, w.mlp_norm.shape, w.mlp_norm, EPSILON)
    return x + linear(silu(linear(h, w.gate_proj)) * linear(h, w.up_proj), w.down_proj)


def packed(workload: DecoderLayer, inputs: LayerInputs, attend: Attend) -> Call:
    full = replicas(workload, inputs.x.device)
    return _call(inputs, full.once(full.position), attend)


def replicated(inputs: LayerInputs, full: Replicas, attend: Attend) -> Call:
    of_all = inputs._replace(x=inputs.x[full.source], dy=full.upstream(inputs.dy))
    call = _call(of_all, full.position, attend)

    def collect(raw: tuple[Tensor, ...]) -> Outputs:
        y, dx, *of_weights = raw
        return call.collect((full.once(y), full.summed(dx), *of_weights))

    return Call(call.run, collect, call.eager)


def _call(inputs: LayerInputs, position: Tensor, attend: Attend) -> Call:
    leaves = [z.detach().requires_grad_() for z in (inputs.x, *inputs.weights)]
    weights = Weights(*leaves[1:])
    turns = rotations(position, len(weights.q_norm), inputs.x.dtype)

    def run() -> tuple[Tensor, ...]:
        y = decoder_layer(leaves[0], weights, turns, attend)
        return y.detach(), *torch.autograd.grad(y, leaves, inputs.dy)

    return Call(run, lambda raw: _named(*raw), lambda: run)


def _named(y: Tensor, dx: Tensor, *of_weights: Tensor) -> Outputs:
    """As a truth has them: tokens second, heads third, of which there is one."""
    found = {
        f"dw.{n}": x.view(1, 1, 1, -1) for n, x in zip(Weights._fields, of_weights, strict=True)
    }
    return {"y": y[None, :, None], "dx": dx[None, :, None], **found}


def layer_truth(workload: DecoderLayer, inputs: LayerInputs) -> Truth:
    """Every sequence alone; fp64 on a CPU, else fp32."""
    dtype = torch.float32 if inputs.x.is_cuda else torch.float64
    x, dy = inputs.x.to(dtype), inputs.dy.to(dtype)
    weights = Weights(*(w.to(dtype).requires_grad_() for w in inputs.weights))
    y, dx = torch.empty_like(x), torch.zeros_like(x)
    of_weights = [torch.zeros_like(w) for w in weights]
    full = replicas(workload, x.device)
    for bounds in zip(full.cu_seqlens[:-1].tolist(), full.cu_seqlens[1:].tolist(), strict=True):
        rows = slice(*bounds)
        alone = x[full.source[rows]].requires_grad_()
        turns = rotations(full.position[rows], workload.head_dim, dtype)
        out = decoder_layer(alone, weights, turns, _causal)
        new = full.first[rows]
        upstream = torch.where(new[:, None], dy[full.source[rows]], 0)
        gradients = torch.autograd.grad(out, (alone, *weights), upstream)
        y[full.source[rows][new]] = out.detach()[new]
        dx.index_add_(0, full.source[rows], gradients[0])
        for total, part in zip(of_weights, gradients[1:], strict=True):
            total += part
    return Truth(_named(y, dx, *of_weights), (0,), 1)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    o = scaled_dot_product_attention(q.transpose(0, 1), keys, values, is_causal=True)
    return o.transpose(0, 1)
