"""RMSNorm of each head, times a weight and an output gate.

    r = (mean x^2 + eps)^-1/2        y = x r weight act(gate)        over the last axis, of size V

act is silu, or the logistic function. x, gate, dy [..., V]; weight [V]. fp64 inputs compute in
fp64, all others in fp32.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class NormGradients(NamedTuple):
    """Results of `gated_rms_norm_backward`, each in the dtype of its input."""

    dx: Tensor
    dgate: Tensor
    dweight: Tensor


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6, sigmoid: bool = False
) -> Tensor:
    """y in x's dtype; differentiable by autograd."""
    wide, z = _wide(x), _wide(gate)
    y = wide * _rstd(wide, eps) * weight.to(wide)
    return (y * z.sigmoid() * (1 if sigmoid else z)).to(x.dtype)


def gated_rms_norm_backward(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6, sigmoid: bool = False
) -> NormGradients:
    """The gradients of a loss with gradient dy, written out by hand; r is computed again.

    u = dy act(gate)        dx = r u w - r^3 mean(u w x) x
    dgate = dy act'(gate) w x r        dweight = sum u x r
    """
    wide, z, dy = _wide(x), _wide(gate), _wide(dy)
    w, r, s = weight.to(wide), _rstd(wide, eps), z.sigmoid()
    u = dy * s * (1 if sigmoid else z)
    rest = (-z).sigmoid()  # 1 - s, without its rounding
    slope = s * rest if sigmoid else s * (1 + z * rest)
    dx = r * u * w - r**3 * (u * w * wide).mean(-1, keepdim=True) * wide
    dgate = dy * slope * w * wide * r
    dweight = (u * wide * r).flatten(0, -2).sum(0)
    return NormGradients(dx.to(x.dtype), dgate.to(gate.dtype), dweight.to(weight.dtype))


def _rstd(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
