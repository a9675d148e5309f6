"""Activates raw gates and betas for the other kernels, and computes the gradients of raw values.

Both directions also cast and pack. Nothing is launched where there is nothing to do.
"""

import torch
from torch import Tensor

from qla_kernels.gdn.kernels import activate as activate_kernel
from qla_kernels.gdn.kernels import activate_bwd as activate_bwd_kernel
from qla_kernels.gdn.kernels import gate_sums as gate_sums_kernel
from qla_kernels.gdn.kernels.raw_gates import DTYPES
from qla_kernels.gdn.launch.tensors import num_live_tokens, of_part, parts_in_reach
from qla_kernels.runtime import jit

_PLACES = {getattr(torch, name): place for place, name in enumerate(DTYPES)}


def activate(
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    beta_range: float,
    as_is: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Returns the activated g and beta [B, T, HV], contiguous and in fp32.

    g or beta is returned itself if it has no activation and is contiguous fp32 already; so is a
    contiguous beta in the dtype `as_is`.
    """
    g_out = None if A_log is None and _is_ready(g) else _fp32(g)
    beta_out = None if not beta_range and _is_ready(beta, as_is) else _fp32(beta)
    _activate(g, beta, A_log, dt_bias, beta_range, g_out, beta_out)
    return g if g_out is None else g_out, beta if beta_out is None else beta_out


def activate_beta(beta: Tensor, beta_range: float) -> Tensor:
    """Returns the activated beta [B, T, HV], contiguous and in fp32; beta itself if it is ready."""
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
    """Writes the activated g to g_out and beta to beta_out; one that is None is not computed."""
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
    """Computes the gradients of the caller's tensors from those of the results of `activate`.

    Args:
        g: the caller's raw gate, together with A_log; None if the caller's g was not raw.
        beta: the caller's beta.
        dg, dbeta: [B, T, HV] fp32, contiguous, 0 for tokens of no sequence; may be overwritten.
        beta_range: as in Options.

    Returns:
        dg in g's dtype, dbeta in beta's, and dA_log and ddt_bias, None if there is no such
        parameter. dg is in fp32 if g is None.
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
            num_live_tokens(cu_seqlens, dg),
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
    """Returns byte views of g, beta, A_log and dt_bias, then their head strides and dtype ids.

    The second list has the four strides in bytes from a head to the next, then the four ids. An
    absent parameter is replaced by another tensor, which the kernels do not read.
    """
    A_log = g[0, 0] if A_log is None else A_log
    call = (g, beta, A_log, A_log if dt_bias is None else dt_bias)
    heads = [x.stride(-1) * x.element_size() for x in call]
    return [_bytes(x) for x in call], heads + [_PLACES[x.dtype] for x in call]


def _flags(
    g: Tensor | None, beta: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None
) -> int:
    """Returns the kernel's bit mask: one bit for each of the four that is not None."""
    return (
        (0 if g is None else activate_kernel.ASKS_G)
        | (0 if beta is None else activate_kernel.ASKS_BETA)
        | (0 if A_log is None else activate_kernel.HAS_A_LOG)
        | (0 if dt_bias is None else activate_kernel.HAS_DT_BIAS)
    )


def _is_ready(x: Tensor, as_is: torch.dtype = torch.float32) -> bool:
    return x.dtype in (torch.float32, as_is) and x.is_contiguous()


def _fp32(x: Tensor) -> Tensor:
    """Returns an uninitialised contiguous fp32 tensor of x's shape."""
    return torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)


def _like(x: Tensor, dx: Tensor) -> Tensor:
    """Returns memory for the gradient of x: dx itself, or a new tensor if dtypes differ."""
    return dx if x.dtype == dx.dtype else dx.new_empty(dx.shape, dtype=x.dtype)


def _bytes(x: Tensor) -> Tensor:
    """Returns a byte view of x [.., heads] whose rows begin with the first byte of a head's number.

    If heads are adjacent, rows have all bytes of x; otherwise they have each number's first byte.
    """
    return x.view(torch.uint8) if x.stride(-1) == 1 else x[..., None].view(torch.uint8)[..., 0]
