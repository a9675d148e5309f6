"""Layers over shared prompts in training: inputs, counted work, truth, and a step that is timed.

A layer is two halves, each of which adds to what it gets: one mixes tokens, by a gated delta net
or by attention as in Qwen3 and Qwen3.5, the other is an MLP. All but the convolution, the gated
delta rule and attention is PyTorch's, and the same for everyone.

Truth without a GPU is every sequence alone in fp64, by the definitions. On a GPU a decoder layer's
is the same in fp32; that of hybrid blocks is whole sequences in a packed batch, by the same kernels
and in the same dtype: what they compute is proven elsewhere, and here two sides have to agree.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu, softplus

from ..attention.problem import Replicas, replicas
from ..attention.workloads import DecoderLayer
from ..gdn.problem import gdn_work
from ..gdn.workloads import Gdn
from ..harness.adapters import Call, Outputs
from ..harness.truth import Truth
from ..harness.workload import Work
from .mixing import Alone, Mixing, OverSequences
from .workloads import HybridPart

EPSILON = 1e-6  # of the norms: as published with the models
# What a forward of a block keeps for its backward, for each token, and the share of a GPU's memory
# that a pass may keep: counted tensor by tensor, and rounded up.
KEPT_BYTES, SHARE = 640 << 10, 0.75

Layered = HybridPart | DecoderLayer
Turns = tuple[Tensor, Tensor]


Weights = dict[str, Tensor]  # by name, of one half of a layer


class LayerInputs(NamedTuple):
    x: Tensor  # [T, hidden], packed
    dy: Tensor  # [T, hidden]
    weights: tuple[Weights, ...]  # of each half


def layer_inputs(
    workload: Layered, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> LayerInputs:
    """Random, of sizes that keep the numbers of a layer near 1."""
    generator, hidden = torch.Generator(device).manual_seed(seed), workload.hidden

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def weight(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 2:
            return torch.mul(normal(*shape), shape[1] ** -0.5).to(dtype)
        return (normal(*shape) if name == "dt_bias" else 1 + 0.1 * normal(*shape)).to(dtype)

    def weights(half: str) -> Weights:
        known = {}
        if half == "linear":  # memories of a few and of hundreds of tokens
            assert isinstance(workload, HybridPart), "a decoder layer has attention"
            decay = torch.rand(workload.linear_heads[1], generator=generator, device=device)
            known["A_log"] = (1 + 15 * decay).log() - 3
        shapes = shapes_of(workload, half)
        return {n: known[n] if n in known else weight(n, shape) for n, shape in shapes.items()}

    x, dy = (normal(workload.tokens, hidden).to(dtype) for _ in range(2))
    return LayerInputs(x, dy, tuple(map(weights, workload.halves)))


def shapes_of(workload: Any, half: str) -> dict[str, tuple[int, ...]]:
    """Of the weights of a half, in the order in which they are drawn."""
    hidden, wide = workload.hidden, workload.intermediate
    if half == "linear":
        HV, (keys, _, values) = workload.linear_heads[1], workload.linear_columns
        columns = 2 * keys + values
        return {
            "norm": (hidden,), "in_qkv": (columns, hidden), "in_z": (values, hidden),
            "in_ba": (2 * HV, hidden), "conv": (columns, workload.width), "A_log": (HV,),
            "dt_bias": (HV,), "out_norm": (workload.linear_dim,), "out": (hidden, values),
        }  # fmt: skip
    if half == "full":
        d, (few, many) = workload.head_dim, (workload.head_dim * n for n in workload.heads)
        queries = (1 + workload.gated) * many  # of each head the query, then the gate
        return {
            "norm": (hidden,), "q_proj": (queries, hidden), "k_proj": (few, hidden),
            "v_proj": (few, hidden), "q_norm": (d,), "k_norm": (d,), "o_proj": (hidden, many),
        }  # fmt: skip
    return {
        "gate_proj": (wide, hidden), "up_proj": (wide, hidden), "norm": (hidden,),
        "down_proj": (hidden, wide),
    }  # fmt: skip


def layer_work(workload: Layered, element_size: int) -> Work:
    """Three products of each weight and token, seven of each visible pair, the gated delta rule's.

    Bytes are x, dy, y and dx, and weights and their gradients: intermediate tensors do not count.
    """
    T, flops, parameters = workload.tokens, 0.0, 0
    for half in workload.halves:
        shapes = shapes_of(workload, half)
        parameters += sum(math.prod(x) for n, x in shapes.items() if len(x) == 2 and n != "conv")
    if isinstance(workload, HybridPart):
        lengths = tuple(n for prompt, responses in workload.groups for n in (prompt, *responses))
        rule = Gdn(workload.linear_heads, lengths, "both", head_dim=workload.linear_dim)
        flops += workload.halves.count("linear") * gdn_work(rule, element_size).flops
    flops += 6.0 * parameters * T
    columns = workload.heads[1] * workload.head_dim
    flops += workload.halves.count("full") * 7 * 2.0 * workload.pairs * columns
    return Work(flops, (4 * T * workload.hidden + 2 * parameters) * element_size)


def rotations(workload: Layered, position: Tensor, dtype: torch.dtype) -> Turns:
    """Cosine and sine [T, 1, rotated] of each position's angles."""
    every = torch.arange(0, workload.rotated, 2, device=position.device)
    angle = position[:, None] * workload.theta ** -(every / workload.rotated)
    angle = angle.repeat(1, 2)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def layers(
    x: Tensor, weights: Sequence[Weights], workload: Layered, turns: Turns, mixing: Mixing
) -> Tensor:
    """[T, hidden] of [T, hidden]."""
    for half, w in zip(workload.halves, weights, strict=True):
        h = rms_norm(x, w["norm"].shape, w["norm"], EPSILON)
        if half == "linear":
            x = x + _linear(h, w, workload, mixing)
        elif half == "full":
            x = x + _full(h, w, workload, turns, mixing)
        else:
            wide = silu(linear(h, w["gate_proj"])) * linear(h, w["up_proj"])
            x = x + linear(wide, w["down_proj"])
    return x


def _linear(h: Tensor, w: Weights, workload: Any, mixing: Mixing) -> Tensor:
    qkv = mixing.convolve(linear(h, w["in_qkv"]), w["conv"])
    columns = torch.split(qkv, list(workload.linear_columns), -1)
    q, k, v = (torch.unflatten(x, -1, (-1, workload.linear_dim)) for x in columns)
    b, a = linear(h, w["in_ba"]).chunk(2, -1)
    wide = torch.promote_types(a.dtype, torch.float32)
    g = -w["A_log"].to(wide).exp() * softplus(a.to(wide) + w["dt_bias"])
    o = mixing.delta(q, k, v, g, b.sigmoid())
    o = rms_norm(o, w["out_norm"].shape, w["out_norm"], EPSILON).flatten(1)
    return linear(o * silu(linear(h, w["in_z"])), w["out"])


def _full(h: Tensor, w: Weights, workload: Layered, turns: Turns, mixing: Mixing) -> Tensor:
    d, turning = len(w["q_norm"]), turns[0].shape[-1]

    def heads(name: str, size: int = d) -> Tensor:
        return torch.unflatten(linear(h, w[f"{name}_proj"]), -1, (-1, size))

    def turned(z: Tensor, norm: Tensor) -> Tensor:
        z = rms_norm(z, norm.shape, norm, EPSILON)
        part, rest = z[..., :turning], z[..., turning:]
        a, b = part.chunk(2, -1)
        return torch.cat((part * turns[0] + torch.cat((-b, a), -1) * turns[1], rest), -1)

    q, *gate = torch.split(heads("q", (1 + workload.gated) * d), d, -1)
    o = mixing.attend(turned(q, w["q_norm"]), turned(heads("k"), w["k_norm"]), heads("v"))
    return linear((o * gate[0].sigmoid() if gate else o).flatten(1), w["o_proj"])


# --- a step


def step_of(
    workload: Layered, inputs: LayerInputs, positions: Sequence[Tensor], mixings: Sequence[Any]
) -> Call:
    """Forward and backward of x, in passes over its tokens, which add to the weights' gradients.

    A decoder layer, which is one pass, is captured in a graph.
    """
    edges = torch.tensor([0, *map(len, positions)]).cumsum(0).tolist()
    turns = [rotations(workload, p, inputs.x.dtype) for p in positions]
    weights = [{n: x.detach().requires_grad_() for n, x in w.items()} for w in inputs.weights]
    parameters = [x for w in weights for x in w.values()]

    def one(part: slice, angles: Turns, mixing: Mixing) -> tuple[Tensor, ...]:
        x = inputs.x[part].detach().requires_grad_()
        y = layers(x, weights, workload, angles, mixing)
        return y.detach(), *torch.autograd.grad(y, [x, *parameters], inputs.dy[part])

    def run() -> list[tuple[Tensor, ...]]:
        found: list[tuple[Tensor, ...]] = []
        for (a, b), angles, mixing in zip(pairwise(edges), turns, mixings, strict=True):
            y, dx, *of_weights = one(slice(a, b), angles, mixing)
            if found:
                torch._foreach_add_(of_weights, list(found[-1][2:]))
                found[-1] = found[-1][:2]
            found.append((y, dx, *of_weights))
        return found

    def collect(raw: list[tuple[Tensor, ...]]) -> Outputs:
        """As a truth has them: tokens second, heads third, of which there is one."""
        y, dx = (torch.cat([x[i] for x in raw]) if len(raw) > 1 else raw[0][i] for i in (0, 1))
        names = [
            f"{'dg' if name in ('A_log', 'dt_bias') else 'dw'}.{i}.{half}.{name}"
            for i, (half, w) in enumerate(zip(workload.halves, weights, strict=True))
            for name in w
        ]
        grads = zip(names, raw[-1][2:], strict=True)
        named = {name: x.reshape(1, 1, 1, -1) for name, x in grads}
        return {"y": y[None, :, None], "dx": dx[None, :, None], **named}

    captured = isinstance(workload, DecoderLayer)
    return Call(run, collect, (lambda: run) if captured else None, capture=captured)


def packed(workload: Layered, inputs: LayerInputs, mixing: Any) -> Call:
    full = replicas(workload, inputs.x.device)
    return step_of(workload, inputs, [full.once(full.position)], [mixing])


def whole(
    workload: Layered,
    inputs: LayerInputs,
    mixing: Callable[[tuple[int, ...]], Any],
    most: int | None = None,
) -> Call:
    """Every sequence in full, in passes of about `most` tokens.

    `mixing` makes the functions for sequences of given lengths.
    """
    full = replicas(workload, inputs.x.device)
    lengths = [full.lengths[cut] for cut in passes(full, most or sum(full.lengths))]
    positions = torch.split(full.position, [sum(of_pass) for of_pass in lengths])
    of_all = inputs._replace(x=inputs.x[full.source], dy=full.upstream(inputs.dy))
    call = step_of(workload, of_all, positions, [mixing(of_pass) for of_pass in lengths])

    def collect(raw: list[tuple[Tensor, ...]]) -> Outputs:
        found = call.collect(raw)
        y, dx = full.once(found["y"][0]), full.summed(found["dx"][0])
        return {**found, "y": y[None], "dx": dx[None]}

    return Call(call.run, collect, call.eager, call.capture)


def passes(full: Replicas, most: int) -> list[slice]:
    """Sequences, in passes of equally many: as few passes as leave each about `most` tokens."""
    count = len(full.lengths)
    number = min(count, -(-sum(full.lengths) // most))
    return [slice(count * i // number, count * (i + 1) // number) for i in range(number)]


def most_tokens(device: torch.device) -> int | None:
    """Of a pass over whole sequences: they are cut where they do not fit. A packed tree fits."""
    if device.type != "cuda":
        return None
    return int(SHARE * torch.cuda.get_device_properties(device).total_memory) // KEPT_BYTES


def whole_by_ours(workload: HybridPart, inputs: LayerInputs) -> Call:
    """In passes, if a step of all sequences would not fit into the memory of the GPU."""
    device = inputs.x.device
    return whole(
        workload, inputs, lambda n: OverSequences(n, workload, device), most_tokens(device)
    )


def layer_truth(workload: Layered, inputs: LayerInputs) -> Truth:
    on_gpu, slack = inputs.x.is_cuda, 1.0
    if on_gpu and isinstance(workload, HybridPart):
        call = whole_by_ours(workload, inputs)
        # each side rounds after each half of a layer, if not in the same way
        slack = (2 * len(workload.halves)) ** 0.5
    else:
        dtype = torch.float32 if on_gpu else torch.float64
        wide = tuple({n: x.to(dtype) for n, x in w.items()} for w in inputs.weights)
        exact = LayerInputs(inputs.x.to(dtype), inputs.dy.to(dtype), wide)
        call = whole(workload, exact, lambda _: Alone(), 1)
    return Truth(call.collect(call.run()), (0,), 1, slack=slack)
