"""Raw gates and betas, activated around the kernels, and the way back.

Small tensors, [B, T, HV]: torch's own kernels do. Sums over tokens have a fixed order.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus


def fp32(x: Tensor) -> Tensor:
    """x.float(), which takes the host a while even where there is nothing to do."""
    return x if x.dtype == torch.float32 else x.float()


def gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """g fp32, activated if there is an A_log: -e^A_log softplus(g + dt_bias)."""
    g = fp32(g)
    if A_log is None:
        return g
    return -A_log.float().exp() * softplus(_shifted(g, dt_bias))


def gate_backward(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None, dg: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the raw gate, A_log and dt_bias from that of the activated gate."""
    z = _shifted(g.float(), dt_bias)
    rate = -A_log.float().exp()
    dx = rate * z.sigmoid() * dg
    dA_log = (dg * rate * softplus(z)).sum((0, 1)).to(A_log.dtype)
    ddt_bias = None if dt_bias is None else dx.sum((0, 1)).to(dt_bias.dtype)
    return dx.to(g.dtype), dA_log, ddt_bias


def beta(x: Tensor, use_sigmoid: bool, allow_neg_eigval: bool) -> Tensor:
    """beta fp32, activated if it is to be."""
    x = fp32(x)
    if use_sigmoid:
        x = x.sigmoid()
    return 2 * x if allow_neg_eigval else x


def beta_backward(x: Tensor, allow_neg_eigval: bool, dbeta: Tensor) -> Tensor:
    """Gradient of a raw beta that went through the sigmoid."""
    s = x.float().sigmoid()
    return (2 if allow_neg_eigval else 1) * dbeta * s * (1 - s)


def live(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """x [B, T, HV] with 0 for tokens of no sequence: they may hold NaN, and 0 times NaN is NaN."""
    if cu_seqlens is None:
        return x
    dead = torch.arange(x.shape[1], device=x.device) >= cu_seqlens[-1]
    return x.masked_fill(dead[:, None], 0)


def _shifted(g: Tensor, dt_bias: Tensor | None) -> Tensor:
    return g if dt_bias is None else g + dt_bias.float()
