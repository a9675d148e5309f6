"""What a gated delta net's result has to be.

On the GPU the truth is the chunked algorithm in fp64, over all heads, a few at a time. Without one
it is the definition itself over the first and the last key head: the fp64 token loop, for gradients
autograd through it. (tests/maths shows that they agree to 1e-12.) Inputs are the rounded ones that
the implementation got.
"""

from typing import Any

import torch
from torch import Tensor

from ..harness.adapters import Outputs
from ..harness.timing import one_thread
from ..harness.truth import Truth, head_axis
from .directions import gradients
from .inputs import GdnInputs
from .work import CHUNK
from .workloads import Gdn

_WORKING_SET = 12 << 30  # bytes of fp64 temporaries


def gdn_truth(workload: Gdn, inputs: GdnInputs) -> Truth:
    num_key_heads = workload.heads[0]
    on_gpu = inputs.q.is_cuda
    heads = tuple(range(num_key_heads)) if on_gpu else tuple(sorted({0, num_key_heads - 1}))
    step = heads_at_once(workload) if on_gpu else len(heads)
    parts = []
    for i in range(0, len(heads), step):
        some = of_heads(inputs, heads[i : i + step], num_key_heads)
        parts.append({name: x.float() for name, x in _evaluate(workload, some, on_gpu).items()})
    want = {name: torch.cat([p[name] for p in parts], dim=head_axis(name)) for name in parts[0]}
    # a few tokens change little of a state: bf16's limit would let wrong ones pass
    in_fp32 = ("ht",) if workload.decode else ("g_cum",)
    return Truth(want, heads, num_key_heads, in_fp32)


def heads_at_once(workload: Gdn) -> int:
    group = workload.heads[1] // workload.heads[0]
    factor = 12 if workload.direction == "fwd" else 30  # tensors of the size of v alive at once
    chunks = sum(-(-length // CHUNK) for length in workload.lengths)
    per_chunk = (CHUNK * factor + 3 * workload.head_dim) * workload.V
    return max(1, min(workload.heads[0], _WORKING_SET // (8 * group * chunks * per_chunk)))


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
