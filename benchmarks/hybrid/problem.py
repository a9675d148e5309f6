"""The block and its parts made concrete: inputs, counted work, truth, and a step that is timed.

Truth without a GPU is every sequence alone in fp64, by the definitions. On a GPU it is whole
sequences in a packed batch, by the same kernels and in the same dtype: what they compute is proven
elsewhere, and here the two sides of the comparison have to agree.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..attention.replicas import Replicas, replicas
from ..gdn.work import gdn_work
from ..gdn.workloads import Gdn
from ..harness.adapters import Call, Outputs
from ..harness.floor import Work
from ..harness.truth import Truth
from .halves import Mixing, Weights, layers, rotations, weights_of
from .workloads import HybridPart

# What a forward of a block keeps for its backward, for each token: measured in no run, but counted
# tensor by tensor, and rounded up. It decides how many tokens go through in one pass.
KEPT_BYTES = 640 << 10
SHARE = 0.75  # of a GPU's memory that a pass may keep


class HybridInputs(NamedTuple):
    x: Tensor  # [T, hidden], packed
    dy: Tensor  # [T, hidden]
    weights: tuple[Weights, ...]


def hybrid_inputs(
    workload: HybridPart, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> HybridInputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal() -> Tensor:
        shape = workload.tokens, workload.hidden
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    weights = (weights_of(half, workload, generator, dtype) for half in workload.halves)
    return HybridInputs(normal(), normal(), tuple(weights))


def hybrid_work(workload: HybridPart, element_size: int) -> Work:
    """Three products of each weight and token, seven of each visible pair, the gated delta rule's.

    Bytes are x, dy, y and dx, and weights and their gradients: intermediate tensors do not count.
    """
    sizes = workload.hidden, workload.intermediate
    keys, _, values = workload.linear_columns
    wide = workload.head_dim * workload.heads[1]
    narrow = workload.head_dim * workload.heads[0]
    of_half = {
        "linear": sizes[0] * (2 * keys + 3 * values + 2 * workload.linear_heads[1]),
        "full": sizes[0] * (3 * wide + 2 * narrow),
        "mlp": 3 * sizes[0] * sizes[1],
    }
    parameters = sum(of_half[half] for half in workload.halves)
    lengths = tuple(n for prompt, responses in workload.groups for n in (prompt, *responses))
    delta = gdn_work(
        Gdn(workload.linear_heads, lengths, "both", head_dim=workload.linear_dim), element_size
    )
    flops = 6.0 * parameters * workload.tokens
    flops += workload.halves.count("linear") * delta.flops
    flops += workload.halves.count("full") * 7 * 2.0 * workload.pairs * wide
    num = 4 * workload.tokens * workload.hidden + 2 * parameters
    return Work(flops, num * element_size)


def passes(full: Replicas, most: int) -> list[slice]:
    """Sequences, in passes of equally many: as few passes as leave each about `most` tokens."""
    lengths = full.lengths
    number = min(len(lengths), -(-sum(lengths) // most))
    edges = [len(lengths) * i // number for i in range(number + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def most_tokens(device: torch.device) -> int:
    """Of a pass over whole sequences: they are cut where they do not fit. A packed tree fits."""
    if device.type != "cuda":
        return 1 << 62
    return int(SHARE * torch.cuda.get_device_properties(device).total_memory) // KEPT_BYTES


def step_of(
    workload: HybridPart, inputs: HybridInputs, positions: Sequence[Tensor], mixings: Sequence[Any]
) -> Call:
    """Forward and backward of x, in passes over its tokens, which add to the weights' gradients."""
    starts = [0]
    for position in positions:
        starts.append(starts[-1] + len(position))
    rows = [slice(a, b) for a, b in pairwise(starts)]
    turns = [rotations(p, workload.rotated, inputs.x.dtype) for p in positions]
    weights = [type(w)(*(x.detach().requires_grad_() for x in w)) for w in inputs.weights]
    parameters = [x for w in weights for x in w]

    def one(part: slice, angles: tuple[Tensor, Tensor], mixing: Mixing) -> tuple[Tensor, ...]:
        x = inputs.x[part].detach().requires_grad_()
        y = layers(x, tuple(weights), workload, angles, mixing)
        return y.detach(), *torch.autograd.grad(y, [x, *parameters], inputs.dy[part])

    def run() -> list[tuple[Tensor, ...]]:
        found: list[tuple[Tensor, ...]] = []
        for part, angles, mixing in zip(rows, turns, mixings, strict=True):
            y, dx, *of_weights = one(part, angles, mixing)
            if found:
                torch._foreach_add_(of_weights, list(found[-1][2:]))
                found[-1] = found[-1][:2]
            found.append((y, dx, *of_weights))
        return found

    def collect(raw: list[tuple[Tensor, ...]]) -> Outputs:
        y, dx = (torch.cat([part[i] for part in raw]) for i in (0, 1))
        return named(workload, inputs, y, dx, raw[-1][2:])

    return Call(run, collect, capture=False)


def named(
    workload: HybridPart, inputs: HybridInputs, y: Tensor, dx: Tensor, of_weights: Sequence[Tensor]
) -> Outputs:
    """As a truth has them: tokens second, heads third, of which there is one."""
    names = [
        f"{'dg' if name in ('A_log', 'dt_bias') else 'dw'}.{i}.{half}.{name}"
        for i, (half, w) in enumerate(zip(workload.halves, inputs.weights, strict=True))
        for name in w._fields
    ]
    found = {name: x.reshape(1, 1, 1, -1) for name, x in zip(names, of_weights, strict=True)}
    return {"y": y[None, :, None], "dx": dx[None, :, None], **found}


def packed(workload: HybridPart, inputs: HybridInputs, mixing: Any) -> Call:
    full = replicas(workload, inputs.x.device)
    return step_of(workload, inputs, [full.once(full.position)], [mixing])


def whole(workload: HybridPart, inputs: HybridInputs, mixing: Any, most: int) -> Call:
    """Every sequence in full; `mixing` makes the functions for sequences of given lengths."""
    full = replicas(workload, inputs.x.device)
    cuts = passes(full, most)
    lengths = [full.lengths[cut] for cut in cuts]
    positions = torch.split(full.position, [sum(of_pass) for of_pass in lengths])
    of_all = inputs._replace(x=inputs.x[full.source], dy=full.upstream(inputs.dy))
    call = step_of(workload, of_all, positions, [mixing(of_pass) for of_pass in lengths])

    def collect(raw: list[tuple[Tensor, ...]]) -> Outputs:
        found = call.collect(raw)
        y, dx = full.once(found["y"][0]), full.summed(found["dx"][0])
        return {**found, "y": y[None], "dx": dx[None]}

    return Call(call.run, collect, capture=False)


class Alone:
    """The definitions, for one sequence."""

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        from reference import conv

        return conv.alone(x, weight, None, True)

    def delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        from reference import gdn

        q, k, v, g, beta = (x[None] for x in (gdn.l2norm(q), gdn.l2norm(k), v, g, beta))
        return gdn.recurrent(q, k, v, g, beta)[0][0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        o = scaled_dot_product_attention(q.transpose(0, 1), keys, values, is_causal=True)
        return o.transpose(0, 1)


def hybrid_truth(workload: HybridPart, inputs: HybridInputs) -> Truth:
    if inputs.x.is_cuda:
        from .rivals import Whole

        call = Whole().prepare(workload, inputs)
    else:
        wide = (type(w)(*(x.double() for x in w)) for w in inputs.weights)
        exact = HybridInputs(inputs.x.double(), inputs.dy.double(), tuple(wide))
        call = whole(workload, exact, lambda _: Alone(), 1)
    # each side of the comparison rounds after each half of a layer, if not in the same way
    slack = (2 * len(workload.halves)) ** 0.5 if inputs.x.is_cuda else 1.0
    return Truth(call.collect(call.run()), (0,), 1, slack=slack)
