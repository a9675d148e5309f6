"""Raw gates and betas: activated before the kernels that read them, and the way back.

Casts and packing are part of both. Where there is nothing to do, nothing is launched.
"""

import torch
from torch import Tensor

from qla_kernels import jit
from qla_kernels.gdn.kernels import activate as activate_kernel
from qla_kernels.gdn.kernels import activate_bwd as activate_bwd_kernel
from qla_kernels.gdn.kernels import gate_sums as gate_sums_kernel
from qla_kernels.gdn.kernels.raw_gates import DTYPES
from qla_kernels.gdn.launch.tensors import live_end, of_part, parts_in_reach

_PLACES = {getattr(torch, name): place for place, name in enumerate(DTYPES)}


def beta_range(use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> float:
    """What the sigmoid of beta is multiplied by; 0 where there is no sigmoid."""
    return (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid_in_kernel else 0.0


def activate(
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    beta_range: float,
    as_is: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """g and beta [B, T, HV], contiguous and fp32; a beta without a sigmoid may also be `as_is`."""
    g_out = None if A_log is None and _is_ready(g) else _fp32(g)
    beta_out = None if not beta_range and _is_ready(beta, as_is) else _fp32(beta)
    _activate(g, beta, A_log, dt_bias, beta_range, g_out, beta_out)
    return g if g_out is None else g_out, beta if beta_out is None else beta_out


def activate_beta(beta: Tensor, beta_range: float) -> Tensor:
    """beta [B, T, HV], contiguous and fp32."""
    if not beta_range and _is_ready(beta):
        return beta
    out = _fp32(beta)
    _activate(beta, beta, None, None, beta_range, None, out)
    return out


def _activate(
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    beta_range: float,
    g_out: Tensor | None,
    beta_out: Tensor | None,
) -> None:
    """What is not wanted is None."""
    first = beta_out if g_out is None else g_out
    second = first if beta_out is None else beta_out
    if first is None or second is None or not beta.numel():
        return
    for part in parts_in_reach(g, beta):
        g_b, beta_b, *out_b = of_part(part, g, beta, first, second)
        call, layout = _described(g_b, beta_b, A_log, dt_bias)
        jit.compile(activate_kernel, activate_kernel.Variant("float32"))(
            *call,
            *out_b,
            *layout,
            beta_range,
            _flags(g_out, beta_out, A_log, dt_bias),
            *activate_kernel.shape(*beta.shape[1:]),
        )


def backward(
    g: Tensor | None,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    dg: Tensor,
    dbeta: Tensor,
    beta_range: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of what the caller passed, from those of what `activate` made of it.

    Args:
        g: as passed, together with A_log; None if it was not raw.
        beta: as passed.
        dg, dbeta: [B, T, HV] fp32, contiguous, 0 for tokens of no sequence; may be written to.

    Returns:
        dg, dbeta, dA_log and ddt_bias.
    """
    if g is None and not beta_range and beta.dtype == dbeta.dtype:
        return dg, dbeta, None, None
    assert (g is None) == (A_log is None), "a raw gate comes with its A_log"
    dA_log, ddt_bias = (None if x is None else x.new_empty(x.shape) for x in (A_log, dt_bias))
    dg_out, dbeta_out = dg if g is None else _like(g, dg), _like(beta, dbeta)
    if not beta.numel():
        for x in (dA_log, ddt_bias):
            if x is not None:
                x.zero_()
        return dg_out, dbeta_out, dA_log, ddt_bias
    B, T, HV = beta.shape
    beside, blocks = activate_kernel.shape(T, HV)
    sums = dg.new_empty(B, blocks, 2, HV)
    raw = beta if g is None else g
    for part in parts_in_reach(raw, beta):
        raw_b, beta_b = of_part(part, raw, beta)
        dg_b, dbeta_b, sums_b = of_part(part, dg_out, dbeta_out, sums)
        call, layout = _described(raw_b, beta_b, A_log, dt_bias)
        jit.compile(activate_bwd_kernel, activate_bwd_kernel.Variant("float32"))(
            *call,
            *of_part(part, dg, dbeta),
            dg_b.view(torch.uint8),
            dbeta_b.view(torch.uint8),
            sums_b.view(-1, 2, HV),
            live_end(cu_seqlens, dg),
            *layout,
            beta_range,
            int(cu_seqlens is not None),
            _flags(g, beta, A_log, dt_bias),
            beside,
            blocks,
        )
    if dA_log is not None:
        of_dA_log = dA_log.view(torch.uint8)
        jit.compile(gate_sums_kernel, gate_sums_kernel.Variant("float32"))(
            sums.view(-1, 2, HV),
            of_dA_log,
            of_dA_log if ddt_bias is None else ddt_bias.view(torch.uint8),
            *layout[-2:],
            1 if ddt_bias is None else 2,
        )
    return dg_out, dbeta_out, dA_log, ddt_bias


def _described(
    g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
) -> tuple[list[Tensor], list[int]]:
    """What the kernels read, as bytes; bytes from a head to the next, and dtypes, of each.

    What is absent is not read.
    """
    A_log = g[0, 0] if A_log is None else A_log
    call = (g, beta, A_log, A_log if dt_bias is None else dt_bias)
    heads = [x.stride(-1) * x.element_size() for x in call]
    return [_bytes(x) for x in call], heads + [_PLACES[x.dtype] for x in call]


def _flags(
    g: Tensor | None, beta: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None
) -> int:
    """By what is there."""
    return (
        (0 if g is None else activate_kernel.G)
        | (0 if beta is None else activate_kernel.BETA)
        | (0 if A_log is None else activate_kernel.GATE)
        | (0 if dt_bias is None else activate_kernel.BIAS)
    )


def _is_ready(x: Tensor, as_is: torch.dtype = torch.float32) -> bool:
    return x.dtype in (torch.float32, as_is) and x.is_contiguous()


def _fp32(x: Tensor) -> Tensor:
    """Room for x."""
    return torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)


def _like(x: Tensor, dx: Tensor) -> Tensor:
    """Room for the gradient of x: where it is, if it need not be cast."""
    return dx if x.dtype == dx.dtype else dx.new_empty(dx.shape, dtype=x.dtype)


def _bytes(x: Tensor) -> Tensor:
    """Of x [.., heads]: rows of all its bytes, or of each number's first where they lie apart."""
    return x.view(torch.uint8) if x.stride(-1) == 1 else x[..., None].view(torch.uint8)[..., 0]
