"""Cases of each forward kernel of the gated delta rule, and of the decoding kernel."""

import math
from collections.abc import Callable

import torch

from qla_kernels.cpu import reference
from qla_kernels.selftest.cases import LENGTHS, SIZE, Result, error_of, inputs, label, raw_gates


def _l2norm() -> list[Result]:
    from qla_kernels.gdn.launch import forward as launch

    results = []
    for dtype, limit in ((torch.bfloat16, 3e-3), (torch.float16, 4e-4)):
        x = 4 * inputs().k
        y = launch.l2norm_fwd(x.to("cuda", dtype))
        name = label("gdn.l2norm", dtype)
        results.append(Result(name, error_of(y, reference().gdn.l2norm(x)), limit))
    return results


def _activate() -> list[Result]:
    from qla_kernels.gdn.launch import activations

    g, beta, A_log, dt_bias = raw_gates()
    half = [x.to("cuda", torch.bfloat16) for x in (g, beta, A_log, dt_bias)]
    got_g, got_beta = activations.activate(half[0], half[1], half[2], half[3], 2.0)
    gdn = reference().gdn
    return [
        Result("gdn.activate g", error_of(got_g, gdn.gate(g, A_log, dt_bias)), 1e-6),
        Result("gdn.activate beta", error_of(got_beta, gdn.beta_sigmoid(beta, True)), 1e-6),
    ]


def _chunk_table() -> list[Result]:
    from qla_kernels.gdn.launch import tensors
    from qla_kernels.varlen import chunk_table

    results = []
    for dtype in (torch.int32, torch.int64):
        bounds = inputs().cu_seqlens.to(dtype)
        want = chunk_table(sum(LENGTHS), bounds)
        got = tensors.chunk_table(sum(LENGTHS), bounds.cuda())
        error = max(error_of(a, b.double()) for a, b in zip(got, want, strict=True))
        results.append(Result(label("gdn.chunk_table", dtype), error, 0))
    return results


def _gate() -> list[Result]:
    from qla_kernels.gdn.launch import forward as launch
    from qla_kernels.gdn.launch import tensors

    x = inputs()
    _, _, _, g, beta = x.tensors(torch.float32, "cuda")
    table = tensors.chunk_table(g.shape[1], x.cu_seqlens.cuda())
    g_cum = torch.empty_like(g)
    gates = launch.gate(g, beta, table, g_cum)
    want = reference().gdn.chunked(*x.tensors(torch.float64), cu_seqlens=x.cu_seqlens).g_cum
    tok0, rows = table.chunks[0].tolist()
    gamma = gates[0, :, 0, :rows].T * math.log(2)
    narrow, wide = beta.bfloat16(), torch.zeros_like(beta)
    launch.gate(g, narrow, table, torch.empty_like(g), wide)
    live = int(x.cu_seqlens[-1])
    return [
        Result("gdn.gate g_cum", error_of(g_cum, want), 1e-6),
        Result("gdn.gate gamma", error_of(gamma, want[0, tok0 : tok0 + rows]), 1e-6),
        Result("gdn.gate beta", error_of(wide[:, :live], narrow[:, :live].cpu().double()), 0),
    ]


def _kkt_solve() -> list[Result]:
    from qla_kernels.gdn.launch import forward as launch

    x = inputs()
    want = reference().gdn.chunked(*x.tensors(torch.float64), cu_seqlens=x.cu_seqlens)
    results = []
    for dtype, limit in ((torch.bfloat16, 5e-3), (torch.float16, 2e-3)):
        _, k, _, g, beta = x.tensors(dtype, "cuda")
        g_cum, A = launch.kkt_solve(k, g, beta, x.cu_seqlens.cuda())
        name = label("gdn.kkt_solve", dtype)
        results.append(Result(f"{name} g_cum", error_of(g_cum, want.g_cum), 1e-6))
        results.append(Result(f"{name} A", error_of(A, want.A), limit))
    return results


def _fused_fwd() -> list[Result]:
    from qla_kernels.gdn import heuristics
    from qla_kernels.gdn.launch import forward as launch

    x = inputs()
    h0, cu_seqlens, scale = x.initial_state.float().cuda(), x.cu_seqlens.cuda(), SIZE**-0.5
    want = reference().gdn.chunked(
        *x.tensors(torch.float64), scale, x.initial_state, cu_seqlens=x.cu_seqlens
    )
    results = []
    for dtype, limit in ((torch.bfloat16, 6e-3), (torch.float16, 1e-3)):
        q, k, v, g, beta = x.tensors(dtype, "cuda")
        for plan in heuristics.STEP:
            o, ht = torch.empty_like(v), torch.empty_like(h0)
            saved = (want.g_cum.float().cuda(), want.A.to("cuda", dtype))
            launch.fused_fwd(q, k, v, g, beta, scale, h0, cu_seqlens, o, ht, saved, plan)
            name = label("gdn.fused_fwd", dtype, f", V tile {plan.tile_v}")
            if plan.solves:
                name += ", solving"
                results.append(Result(f"{name} A", error_of(saved[1], want.A), limit))
            results.append(Result(f"{name} o", error_of(o, want.o), limit))
            results.append(Result(f"{name} final state", error_of(ht, want.final_state), limit))
    return results


def _recurrent() -> list[Result]:
    from qla_kernels.gdn import fused_recurrent_gated_delta_rule

    x = inputs()
    cu_seqlens, slots = x.cu_seqlens.cuda(), torch.tensor([2, 0], device="cuda")
    want_o, want_state = reference().gdn.recurrent(
        *x.tensors(torch.float64), initial_state=x.initial_state, cu_seqlens=x.cu_seqlens
    )
    results = []
    for dtype, limit in ((torch.bfloat16, 3e-3), (torch.float16, 4e-4)):
        q, k, v, g, beta = x.tensors(dtype, "cuda")
        pool = torch.zeros(3, *x.initial_state.shape[1:], device="cuda")
        pool[slots] = x.initial_state.float().cuda()
        o, _ = fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=pool, cu_seqlens=cu_seqlens, state_indices=slots
        )
        name = label("gdn.recurrent", dtype)
        results.append(Result(f"{name} o", error_of(o, want_o), limit))
        results.append(Result(f"{name} states", error_of(pool[slots], want_state), 3e-6))
    return results


KERNELS: dict[str, Callable[[], list[Result]]] = {
    "gdn.l2norm": _l2norm,
    "gdn.activate": _activate,
    "gdn.chunk_table": _chunk_table,
    "gdn.gate": _gate,
    "gdn.kkt_solve": _kkt_solve,
    "gdn.fused_fwd": _fused_fwd,
    "gdn.recurrent": _recurrent,
}
