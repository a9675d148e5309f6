"""Cases of each kernel that cuts sequences into segments.

One sequence has three segments of one chunk; segment_scan folds the one in the middle.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qla_kernels.cpu import reference
from qla_kernels.selftest.cases import SIZE, Inputs, Result, error_of, inputs, label

LIMITS = ((torch.bfloat16, 6e-3), (torch.float16, 1e-3))
CHUNK = 64


def _one_sequence() -> Inputs:
    """Returns the inputs' tokens, repeated twice, as one sequence of three chunks."""
    x = inputs()
    twice = {n: torch.cat([getattr(x, n)] * 2, 1) for n in ("q", "k", "v", "g", "beta")}
    bounds = torch.tensor([0, twice["q"].shape[1]], dtype=torch.int32)
    return replace(x, **twice, initial_state=x.initial_state[:1], cu_seqlens=bounds)


def _cut(x: Inputs) -> Any:
    from qla_kernels.gdn.launch import segments

    return segments.cut(x.g.float().cuda(), x.cu_seqlens.cuda(), segment_chunks=1)


def _maps(x: Inputs, cut: Any, dtype: torch.dtype, solves: bool) -> Any:
    from qla_kernels.gdn.launch import segments
    from qla_kernels.gdn.plan import WARM_LOG_BOUND

    made = reference().gdn.chunked(*x.tensors(torch.float64))
    _, k, v, g, beta = x.tensors(dtype, "cuda")
    A = None if solves else made.A.to("cuda", dtype)
    g = g if solves else made.g_cum.float().cuda()
    return segments.maps(k, v, g, beta, A, x.initial_state.float().cuda(), cut, WARM_LOG_BOUND)


def _states(x: Inputs) -> Tensor:
    """Returns the reference's state before each chunk, [chunks, HV, K, V], in fp64."""
    h: Tensor = (
        reference().gdn.chunked(*x.tensors(torch.float64), initial_state=x.initial_state).h[0]
    )
    return h


def _segment_plan() -> list[Result]:
    x = _one_sequence()
    cut = _cut(x)
    want = torch.tensor([0, 64, 128, *[x.q.shape[1]] * (cut.capacity - 2)])
    return [Result("gdn.segment_plan", error_of(cut.bounds, want.double()), 0)]


def _segment_map() -> list[Result]:
    x = _one_sequence()
    want, results = _states(x)[1], []
    for dtype, limit in LIMITS:
        for solves in (True, False):
            left = _maps(x, _cut(x), dtype, solves).left[1].mT
            name = label("gdn.segment_map", dtype, ", solving" * solves)
            results.append(Result(name, error_of(left, want), limit))
    return results


def _segment_scan() -> list[Result]:
    from qla_kernels.gdn.launch import segments

    x = _one_sequence()
    want, results = _states(x), []
    for dtype, limit in LIMITS:
        cut = _cut(x)
        found = _maps(x, cut, dtype, solves=False)
        starts = segments.start_states(found, x.initial_state.float().cuda(), cut)
        name = label("gdn.segment_scan", dtype)
        results.append(Result(name, error_of(starts[: len(want)], want), limit))
    return results


def _segment_map_bwd() -> list[Result]:
    from qla_kernels.gdn.launch import segments
    from qla_kernels.gdn.plan import WARM_LOG_BOUND

    x, scale = _one_sequence(), SIZE**-0.5
    dht, states, results = x.initial_state, _states(x), []
    made = reference().gdn.chunked(*x.tensors(torch.float64))

    def gradient_before(chunk: int) -> Tensor:
        q, k, v, _, beta, g_cum, A = (
            y[:, chunk * CHUNK :] for y in (*x.tensors(torch.float64), made.g_cum, made.A)
        )
        h0 = states[chunk : chunk + 1]  # dO: any values will do
        dh0: Tensor = (
            reference().gdn.chunked_backward(q, k, v, g_cum, beta, A, v, dht, scale, h0).dh0
        )
        return dh0[0]

    want = torch.stack([gradient_before(1), gradient_before(2)])
    for dtype, limit in LIMITS:
        q, k, v, _, beta = x.tensors(dtype, "cuda")
        cut = _cut(x)
        g_cum, A = made.g_cum.float().cuda(), made.A.to("cuda", dtype)
        ends = segments.end_gradients(
            q, k, v, g_cum, beta, A, dht.float().cuda(), scale,
            _maps(x, cut, dtype, solves=False), cut, WARM_LOG_BOUND,
        )  # fmt: skip
        results.append(Result(label("gdn.segment_map_bwd", dtype), error_of(ends[:2], want), limit))
    return results


KERNELS: dict[str, Callable[[], list[Result]]] = {
    "gdn.segment_plan": _segment_plan,
    "gdn.segment_map": _segment_map,
    "gdn.segment_map_bwd": _segment_map_bwd,
    "gdn.segment_scan": _segment_scan,
}
