"""The gated delta rule made concrete: inputs, counted work, and what a result has to be.

Inputs are gates, keys and states as models make them, reproducible from a seed.

FLOPs are those of the chunked algorithm over the rows that exist, each product once and triangular
tiles in full. Bytes are each input read once and each output written once; when decoding, that is
nearly all states. Waiting for the chunk before is not in it, so a few short sequences cannot come
near the floor on any design.

On the GPU the truth is the chunked algorithm in fp64, over all heads, a few at a time. Without one
it is the definition itself over the first and the last key head: the fp64 token loop, for gradients
autograd through it. Inputs are the rounded ones that the implementation got.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

from ..harness.adapters import Outputs
from ..harness.timing import one_thread
from ..harness.truth import Truth, head_axis
from ..harness.workload import Work
from .workloads import Gdn

CHUNK = 64
STATE_BYTES = 4  # states and log gates are fp32
WORKING_SET = 12 << 30  # bytes of fp64 temporaries of a truth


class GdnInputs(NamedTuple):
    """What every implementation is given; adapters convert outside the timed region."""

    q: Tensor  # [1, T, H, K], unit length
    k: Tensor  # [1, T, H, K], unit length
    v: Tensor  # [1, T, HV, V]
    g: Tensor  # [1, T, HV] fp32, natural log
    beta: Tensor  # [1, T, HV] in (0, 1)
    initial_state: Tensor | None  # [N, HV, K, V] fp32
    cu_seqlens: Tensor  # [N + 1] int32
    lengths: tuple[int, ...]
    do: Tensor | None  # [1, T, HV, V], backward only
    dht: Tensor | None  # [N, HV, K, V] fp32, backward only


def gdn_inputs(workload: Gdn, device: torch.device, dtype: torch.dtype, seed: int = 0) -> GdnInputs:
    num_key_heads, num_value_heads = workload.heads
    tokens, K, V = workload.tokens, workload.head_dim, workload.V
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def state() -> Tensor:
        return normal(len(workload.lengths), num_value_heads, K, V)

    bounds = torch.tensor([0, *workload.lengths]).cumsum(0)
    needs_gradients = workload.direction != "fwd"
    return GdnInputs(
        q=normalize(normal(1, tokens, num_key_heads, K), dim=-1).to(dtype),
        k=normalize(normal(1, tokens, num_key_heads, K), dim=-1).to(dtype),
        v=normal(1, tokens, num_value_heads, V).to(dtype),
        g=_gate(workload, generator, device),
        beta=normal(1, tokens, num_value_heads).sigmoid().to(dtype),
        initial_state=state() if workload.initial_state else None,
        cu_seqlens=bounds.to(device, torch.int32),
        lengths=workload.lengths,
        do=normal(1, tokens, num_value_heads, V).to(dtype) if needs_gradients else None,
        dht=state() if needs_gradients else None,
    )


def _gate(workload: Gdn, generator: torch.Generator, device: torch.device) -> Tensor:
    """Log gates [1, T, HV], fp32.

    `model`: -exp(A_log) softplus(a + dt_bias), per head A uniform in (0, 16) and softplus(dt_bias)
    log-uniform in (0.001, 1.3), the ranges that layers are initialised with: some heads hardly
    forget, others forget within a token.
    `published`: logsigmoid(x) / 16, and exactly 0 for every fourth head, which then never forgets.
    """
    shape = (1, workload.tokens, workload.heads[1])
    x = torch.randn(shape, generator=generator, device=device)
    if workload.gate == "published":
        forgets = torch.arange(workload.heads[1], device=device) % 4 != 3
        return torch.where(forgets, logsigmoid(x) / 16, torch.zeros_like(x))
    uniform = torch.rand((2, workload.heads[1]), generator=generator, device=device)
    step = 1e-3 * torch.exp(uniform[1] * math.log(1300))
    dt_bias = step + torch.log(-torch.expm1(-step))  # inverse of softplus
    return -16 * uniform[0].clamp(min=1e-3) * softplus(x / 2 + dt_bias)


# --- work


def gdn_work(workload: Gdn, element_size: int = 2) -> Work:
    (heads, value_heads), K, V, T = workload.heads, workload.head_dim, workload.V, workload.tokens
    full = [divmod(length, CHUNK) for length in workload.lengths]
    squares = sum(count * CHUNK**2 + tail**2 for count, tail in full)  # of rows, over all chunks
    if workload.kernel:  # K K^T per key head and a 64^3 / 3 inverse per value head
        flops = 2.0 * (heads * squares * K + value_heads * squares * CHUNK / 6)
        per_token = heads * K * element_size  # k, g, beta in, gamma and A out
        per_token += value_heads * (2 * STATE_BYTES + element_size + CHUNK * element_size)
        return Work(flops, T * per_token)
    # K S0, Q S0, K^T V' with the state; A W, P V' of a tile; Q K^T, K K^T once per key head
    forward = 2.0 * (value_heads * (3 * T * K * V + 2 * squares * V) + heads * 2 * squares * K)
    # 11 + 2.5 / r products of 64x128x128 per chunk and value head, r value heads a key head. With a
    # state: K S0, K^T V', K dS, K^T dU, Q^T dO, dO S0^T, V' dS^T, dV S0^T. Of a tile: A W, P^T dO,
    # A^T dV', dO V'^T, dV' W^T and two 64^3 products. Per key head: Q K^T, K K^T, dP K, dP^T Q,
    # (F + F^T) K
    of_values = 8 * T * K * V + 5 * squares * V + 2 * squares * CHUNK
    backward = 2.0 * (value_heads * of_values + heads * 5 * squares * K)
    state = len(workload.lengths) * value_heads * K * V * STATE_BYTES
    per_token = (2 * heads * K + value_heads * V) * element_size  # q, k, v
    per_token += value_heads * (STATE_BYTES + element_size)  # g, beta
    inputs = T * per_token + (state if workload.initial_state else 0)
    outputs = T * value_heads * V * element_size + state  # o and the final states, or do and dht
    if workload.direction == "fwd":
        return Work(forward, inputs + outputs)
    # inputs and the saved A in; a gradient of each input's size out
    moved = 2.0 * inputs + T * value_heads * CHUNK * element_size + outputs
    if workload.direction == "bwd":
        return Work(backward, moved)
    return Work(forward + backward, moved + outputs)


# --- truth


def gradients(
    dq: Tensor, dk: Tensor, dv: Tensor, dg: Tensor, dbeta: Tensor, dh0: Tensor | None = None
) -> Outputs:
    found = {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta, "dh0": dh0}
    return {name: x for name, x in found.items() if x is not None}


def gdn_truth(workload: Gdn, inputs: GdnInputs) -> Truth:
    on_gpu = inputs.q.is_cuda
    truth = truth_by_heads(workload, inputs, lambda some: _evaluate(workload, some, on_gpu))
    # a few tokens change little of a state: bf16's limit would let wrong ones pass
    return truth._replace(in_fp32=("ht",)) if workload.decode else truth


def truth_by_heads(
    workload: Gdn, inputs: GdnInputs, evaluate: Callable[[GdnInputs], Outputs]
) -> Truth:
    """`evaluate` of all key heads, a few at a time; without a GPU of the first and the last."""
    count, on_gpu = workload.heads[0], inputs.q.is_cuda
    heads = tuple(range(count)) if on_gpu else tuple(sorted({0, count - 1}))
    step = heads_at_once(workload) if on_gpu else len(heads)
    parts = []
    for i in range(0, len(heads), step):
        found = evaluate(of_heads(inputs, heads[i : i + step], count))
        parts.append({name: x.float() for name, x in found.items()})
    want = {name: torch.cat([p[name] for p in parts], head_axis(name)) for name in parts[0]}
    return Truth(want, heads, count)


def heads_at_once(workload: Gdn) -> int:
    group = workload.heads[1] // workload.heads[0]
    factor = 12 if workload.direction == "fwd" else 30  # tensors of the size of v alive at once
    chunks = sum(-(-length // CHUNK) for length in workload.lengths)
    per_chunk = (CHUNK * factor + 3 * workload.head_dim) * workload.V
    return max(1, min(workload.heads[0], WORKING_SET // (8 * group * chunks * per_chunk)))


def of_heads(inputs: GdnInputs, heads: tuple[int, ...], num_key_heads: int) -> GdnInputs:
    """The inputs of some key heads and their value heads, in fp64."""
    group = inputs.v.shape[2] // num_key_heads
    keys = torch.tensor(heads, device=inputs.q.device)
    values = (keys[:, None] * group + torch.arange(group, device=keys.device)).flatten()

    wide: dict[str, Any] = {}
    for name, x in inputs._asdict().items():
        if isinstance(x, Tensor) and name != "cu_seqlens":
            axis = 1 if name in ("initial_state", "dht") else 2
            wide[name] = x.index_select(axis, keys if name in ("q", "k") else values).double()
    return inputs._replace(**wide)


def _evaluate(workload: Gdn, inputs: GdnInputs, on_gpu: bool) -> Outputs:
    from reference import gdn

    q, k, v, g, beta, h0, cu, _, do, dht = inputs
    if not (workload.kernel or on_gpu):
        return _define(inputs)
    forward = gdn.chunked(q, k, v, g, beta, initial_state=h0, cu_seqlens=cu)
    if workload.kernel:
        return {"g_cum": forward.g_cum, "A": forward.A}
    if do is None:
        return {"o": forward.o, "ht": forward.final_state}
    back = gdn.chunked_backward(
        q, k, v, forward.g_cum, beta, forward.A, do, dht, initial_state=h0, cu_seqlens=cu
    )
    return gradients(back.dq, back.dk, back.dv, back.dg, back.dbeta, back.dh0)


def _define(inputs: GdnInputs) -> Outputs:
    from reference import gdn

    q, k, v, g, beta, h0, cu, _, do, dht = inputs
    leaves = [x for x in (q, k, v, g, beta, h0) if x is not None]
    for x in leaves:
        x.requires_grad_(do is not None)
    with one_thread():
        o, ht = gdn.recurrent(q, k, v, g, beta, initial_state=h0, cu_seqlens=cu)
        if do is None:
            return {"o": o, "ht": ht}
        return gradients(*torch.autograd.grad((o, ht), leaves, (do, dht)))
