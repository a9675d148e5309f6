"""Cases of each backward kernel of the gated delta rule."""

from collections.abc import Callable

import torch

from qla_kernels.cpu import reference
from qla_kernels.selftest.cases import SIZE, Result, error_of, inputs, label, raw_gates


def _chunk_states() -> list[Result]:
    from qla_kernels.gdn.launch import chains, tensors

    x = inputs()
    h0, cu_seqlens = x.initial_state.float().cuda(), x.cu_seqlens.cuda()
    want = reference().gdn.chunked(
        *x.tensors(torch.float64), initial_state=x.initial_state, cu_seqlens=x.cu_seqlens
    )
    results = []
    for dtype, limit in ((torch.bfloat16, 6e-3), (torch.float16, 1e-3)):
        _, k, v, _, beta = x.tensors(dtype, "cuda")
        table = tensors.chunk_table(k.shape[1], cu_seqlens)
        g_cum, A = want.g_cum.float().cuda(), want.A.to("cuda", dtype)
        for tile_v in (128, 64):
            h = chains.chunk_states(
                k, v, g_cum, beta, A, h0, cu_seqlens, table.first_chunk, tile_v=tile_v
            )
            name = label("gdn.chunk_states", dtype, f", V tile {tile_v}")
            results.append(Result(name, error_of(h[: want.h.shape[1]].mT, want.h[0]), limit))
    return results


def _dstate_chain() -> list[Result]:
    from qla_kernels.gdn.launch import chains, tensors

    x = inputs()
    cu_seqlens, scale = x.cu_seqlens.cuda(), SIZE**-0.5
    q, k, v, g, beta = x.tensors(torch.float64)
    made = reference().gdn.chunked(q, k, v, g, beta, scale, cu_seqlens=x.cu_seqlens)
    do, dht = v, x.initial_state  # any values will do
    want = reference().gdn.chunked_backward(
        q, k, v, made.g_cum, beta, made.A, do, dht, scale, dht, x.cu_seqlens
    )
    results = []
    for dtype, limit in ((torch.bfloat16, 6e-3), (torch.float16, 1e-3)):
        q, k, v, _, beta = x.tensors(dtype, "cuda")
        table = tensors.chunk_table(k.shape[1], cu_seqlens)
        g_cum, A = made.g_cum.float().cuda(), made.A.to("cuda", dtype)
        for tile_v in (128, 64):
            dh0 = torch.empty_like(dht, dtype=torch.float32, device="cuda")
            dS = chains.dstate_chain(
                q, k, v, g_cum, beta, A, dht.float().cuda(), scale, cu_seqlens,
                table.first_chunk, dh0, tile_v,
            )  # fmt: skip
            last = dS[table.first_chunk[1:].long() - 1].mT
            name = label("gdn.dstate_chain", dtype, f", V tile {tile_v}")
            results.append(Result(f"{name} dh0", error_of(dh0, want.dh0), limit))
            results.append(Result(f"{name} last chunks", error_of(last, dht), limit))
    return results


def _child_sums() -> list[Result]:
    from qla_kernels.gdn.tree import launch

    children = inputs().initial_state.float()
    into = children[:1].sin()
    want = into.double() + children.double().sum(0)
    runs = torch.tensor([(0, 0, len(children))], dtype=torch.int32)
    got = into.cuda()
    launch.child_sums(children.cuda(), runs.cuda(), got)
    return [Result("gdn.child_sums", error_of(got, want), 1e-6)]


def _chunk_grads() -> list[Result]:
    from qla_kernels.gdn.launch import backward
    from qla_kernels.gdn.launch import states as launch_states

    x = inputs()
    h0, cu_seqlens, scale = x.initial_state, x.cu_seqlens.cuda(), SIZE**-0.5
    q, k, v, g, beta = x.tensors(torch.float64)
    made = reference().gdn.chunked(q, k, v, g, beta, scale, h0, x.cu_seqlens)
    want = reference().gdn.chunked_backward(
        q, k, v, made.g_cum, beta, made.A, v, h0, scale, h0, x.cu_seqlens
    )  # do and dht: any values will do
    results = []
    for dtype, limit in ((torch.bfloat16, 1e-2), (torch.float16, 1.5e-3)):
        q, k, v, g, beta = x.tensors(dtype, "cuda")
        state = h0.float().cuda()
        given = launch_states.BackwardBatch(
            q, k, v, v, made.g_cum.float().cuda(), beta, made.A.to("cuda", dtype),
            scale, cu_seqlens, state, state,
        )  # fmt: skip
        out = tuple(torch.empty_like(like) for like in (q, k, v, g, beta))
        backward.chunk_grads(given, launch_states.chains(given, out[2]), out)
        for name, got in zip(("dq", "dk", "dv", "dg", "dbeta"), out, strict=True):
            error = error_of(got, getattr(want, name))
            results.append(Result(label("gdn.chunk_grads", dtype, f" {name}"), error, limit))
    return results


def _raw_gradients() -> dict[str, float]:
    """Returns errors of the gradients that activate_bwd and gate_sums compute together, by name."""
    from qla_kernels.gdn.launch import activations

    g, beta, A_log, dt_bias = raw_gates()
    dg, dbeta = beta.sin(), g.sin()  # any values will do
    half = [x.to("cuda", torch.bfloat16) for x in (g, beta, A_log, dt_bias)]
    given = dg.float().cuda(), dbeta.float().cuda()
    got = activations.backward(half[0], half[1], half[2], half[3], *given, 2.0, None)
    gdn = reference().gdn
    dx, *of_parameters = gdn.gate_backward(g, A_log, dt_bias, dg)
    want = dx, gdn.beta_sigmoid_backward(beta, dbeta, True), *of_parameters
    names = "dg", "dbeta", "dA_log", "ddt_bias"
    return dict(zip(names, map(error_of, got, want), strict=True))


def _activate_bwd() -> list[Result]:
    errors = _raw_gradients()
    return [Result(f"gdn.activate_bwd {name}", errors[name], 3e-3) for name in ("dg", "dbeta")]


def _gate_sums() -> list[Result]:
    errors = _raw_gradients()
    return [Result(f"gdn.gate_sums {name}", errors[name], 6e-3) for name in ("dA_log", "ddt_bias")]


def _l2norm_bwd() -> list[Result]:
    from qla_kernels.gdn.launch import forward as launch

    results = []
    for dtype, limit in ((torch.bfloat16, 3e-3), (torch.float16, 4e-4)):
        x, dy = 4 * inputs().k, inputs().q
        dx = launch.l2norm_bwd(x.to("cuda", dtype), dy.to("cuda", dtype), None)
        want = reference().gdn.l2norm_backward(x, dy)
        results.append(Result(label("gdn.l2norm_bwd", dtype), error_of(dx, want), limit))
    return results


KERNELS: dict[str, Callable[[], list[Result]]] = {
    "gdn.chunk_states": _chunk_states,
    "gdn.dstate_chain": _dstate_chain,
    "gdn.child_sums": _child_sums,
    "gdn.chunk_grads": _chunk_grads,
    "gdn.activate_bwd": _activate_bwd,
    "gdn.gate_sums": _gate_sums,
    "gdn.l2norm_bwd": _l2norm_bwd,
}
