"""What a result has to be. A wrong one is not timed.

On the GPU the truth is the chunked algorithm in fp64, over all heads, a few at a time. Without one
it is the definition itself over the first and the last key head: the fp64 token loop, for gradients
autograd through it. (tests/maths shows that they agree to 1e-12.) Inputs are the rounded ones that
the implementation got.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..gdn.directions import gradients
from ..gdn.inputs import GdnInputs
from ..gdn.workloads import Gdn
from .adapters import Outputs
from .floor import CHUNK
from .timing import one_thread

# Largest relative L2 error of a whole tensor with bf16 operands. Rounding them costs 3e-3 to 5e-3;
# one wrong chunk in 512 makes 4e-2. Gradients of gates sum terms that cancel.
_BF16_LIMITS = {
    "o": 1e-2, "ht": 1e-2, "A": 1e-2,
    "dq": 1.5e-2, "dk": 1.5e-2, "dv": 1.5e-2, "dh0": 1.5e-2, "dg": 3e-2, "dbeta": 3e-2,
    "y": 1e-2, "dx": 1.5e-2, "dw": 3e-2,  # a layer's, and the gradients of its weights
    "recall": 1e-3,  # of an index: two lines of the same mass may be taken for each other
}  # fmt: skip
_OF_BF16 = {torch.bfloat16: 1.0, torch.float16: 0.25, torch.float32: 1e-2}
_FP32_LIMIT = 1e-5  # of what is computed in fp32 whatever the operands are
WORST_HEAD = 4  # one head may be this much worse than the whole

_WORKING_SET = 12 << 30  # bytes of fp64 temporaries


class Verdict(NamedTuple):
    errors: dict[str, float]  # relative L2 by tensor
    complaint: str | None  # None: the result is right


class Truth(NamedTuple):
    want: Outputs
    key_heads: tuple[int, ...]  # those that were computed
    num_key_heads: int
    in_fp32: tuple[str, ...] = ("g_cum",)

    @torch.no_grad()
    def judge(self, got: Outputs, dtype: torch.dtype) -> Verdict:
        errors: dict[str, float] = {}
        complaint = None
        for name, want in self.want.items():
            if name not in got:
                return Verdict(errors, f"{name} is missing")
            found = self._pick(name, got[name])
            if found.shape != want.shape:
                return Verdict(
                    errors, f"{name} has shape {tuple(found.shape)}, not {tuple(want.shape)}"
                )
            limit = _FP32_LIMIT
            if name not in self.in_fp32:
                limit = _BF16_LIMITS[name.partition(".")[0]] * _OF_BF16[dtype]
            whole, worst, head = head_errors(found, want, _head_axis(name))
            errors[name] = whole
            if not whole <= limit:  # NaN does not pass
                complaint = complaint or f"{name} is off by {whole:.1e}, limit {limit:.0e}"
            elif name in ("o", "ht") and not worst <= WORST_HEAD * limit:
                complaint = complaint or f"{name} of head {head} is off by {worst:.1e}"
        return Verdict(errors, complaint)

    def _pick(self, name: str, got: Tensor) -> Tensor:
        if len(self.key_heads) == self.num_key_heads:
            return got
        axis = _head_axis(name)
        group = got.shape[axis] // self.num_key_heads
        index = [h * group + i for h in self.key_heads for i in range(group)]
        return got.index_select(axis, torch.tensor(index, device=got.device))


def relative_l2(got: Tensor, want: Tensor) -> float:
    error, scale = (got.double() - want.double()).norm(), want.double().norm()
    return float(error / scale) if scale > 0 else float(error)


def head_errors(got: Tensor, want: Tensor, axis: int) -> tuple[float, float, int]:
    """Relative L2 error of the whole, of the worst head, and which head that is."""
    pairs = list(zip(got.unbind(axis), want.unbind(axis), strict=True))
    error = torch.stack([(a.double() - b.double()).norm() for a, b in pairs]).cpu()
    scale = torch.stack([b.double().norm() for _, b in pairs]).cpu()
    each = torch.where(error == 0, 0.0, error / scale)  # a head may be exactly zero
    head = int(each.nan_to_num(nan=math.inf).argmax())
    whole = error.norm() / scale.norm() if scale.norm() > 0 or error.norm() > 0 else error.norm()
    return float(whole), float(each[head]), head


def _head_axis(name: str) -> int:
    return 1 if name in ("ht", "dh0") else 2  # states [N, HV, K, V], the rest [1, T, H, ...]


def gdn_truth(workload: Gdn, inputs: GdnInputs) -> Truth:
    num_key_heads = workload.heads[0]
    on_gpu = inputs.q.is_cuda
    heads = tuple(range(num_key_heads)) if on_gpu else tuple(sorted({0, num_key_heads - 1}))
    step = _heads_at_once(workload) if on_gpu else len(heads)
    parts = []
    for i in range(0, len(heads), step):
        some = _of_heads(inputs, heads[i : i + step], num_key_heads)
        parts.append({name: x.float() for name, x in _evaluate(workload, some, on_gpu).items()})
    want = {name: torch.cat([p[name] for p in parts], dim=_head_axis(name)) for name in parts[0]}
    # a few tokens change little of a state: bf16's limit would let wrong ones pass
    in_fp32 = ("ht",) if workload.decode else ("g_cum",)
    return Truth(want, heads, num_key_heads, in_fp32)


def _heads_at_once(workload: Gdn) -> int:
    group = workload.heads[1] // workload.heads[0]
    factor = 12 if workload.direction == "fwd" else 30  # tensors of the size of v alive at once
    chunks = sum(-(-length // CHUNK) for length in workload.lengths)
    per_chunk = (CHUNK * factor + 3 * workload.head_dim) * workload.head_dim
    return max(1, min(workload.heads[0], _WORKING_SET // (8 * group * chunks * per_chunk)))


def _of_heads(inputs: GdnInputs, heads: tuple[int, ...], num_key_heads: int) -> GdnInputs:
    """The inputs of some key heads and their value heads, in fp64."""
    group = inputs.v.shape[2] // num_key_heads
    keys = torch.tensor(heads, device=inputs.q.device)
    values = (keys[:, None] * group + torch.arange(group, device=keys.device)).flatten()

    def wide(x: Tensor, axis: int, index: Tensor) -> Tensor:
        return x.index_select(axis, index).double()

    h0, do, dht = inputs.initial_state, inputs.do, inputs.dht
    return inputs._replace(
        q=wide(inputs.q, 2, keys),
        k=wide(inputs.k, 2, keys),
        v=wide(inputs.v, 2, values),
        g=wide(inputs.g, 2, values),
        beta=wide(inputs.beta, 2, values),
        initial_state=None if h0 is None else wide(h0, 1, values),
        do=None if do is None else wide(do, 2, values),
        dht=None if dht is None else wide(dht, 1, values),
    )


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
