"""What raw gates and betas must become: shared by the emulated and the device tier."""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.launch import activations
from reference import gdn
from tests.compare import assert_close, relative_l2

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# of g, beta, A_log and dt_bias: as models have them, and each of another kind
MIXES = (
    (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32),
    (torch.float32,) * 4,
    (torch.float16, torch.float64, torch.bfloat16, torch.float16),
    (torch.float64, torch.float16, torch.float16, torch.bfloat16),
)
# B, T and HV: a token, rows shorter and longer than a block, more heads than threads
SHAPES = ((1, 1, 1), (2, 35, 33), (1, 300, 32), (3, 9, 300), (2, 600, 2))
EXACT = 1e-6  # elementwise, relative: what expf and log1pf leave of fp32


class Raw(NamedTuple):
    g: Tensor  # [B, T, HV], a slice of a head-major projection
    beta: Tensor  # [B, T, HV], likewise
    A_log: Tensor  # [HV]
    dt_bias: Tensor | None  # [HV]

    def wide(self) -> list[Tensor | None]:
        return [None if x is None else x.double() for x in self]


def raw(
    shape: tuple[int, int, int], dtypes: tuple[torch.dtype, ...], device: str, with_bias: bool
) -> Raw:
    B, T, HV = shape
    both = 5 * torch.randn(2, B, HV, T, 3)
    g, beta = (x.to(device, dtype)[..., 1].mT for x, dtype in zip(both, dtypes[:2], strict=True))
    A_log, dt_bias = torch.linspace(-4, 2, HV), torch.linspace(-5, 2, HV)
    return Raw(
        g, beta, A_log.to(device, dtypes[2]), dt_bias.to(device, dtypes[3]) if with_bias else None
    )


def check_forward(x: Raw, beta_range: float) -> None:
    g, beta = activations.activate(*x, beta_range)
    assert (g.dtype, beta.dtype) == (torch.float32,) * 2
    assert g.is_contiguous()
    assert beta.is_contiguous()
    wide = Raw(*x.wide())
    assert_close("g", g, gdn.gate(wide.g, *wide[2:]), EXACT)
    want = beta_range * wide.beta.sigmoid() if beta_range else wide.beta
    assert_close("beta", beta, want, EXACT)
    assert torch.equal(activations.activate_beta(x.beta, beta_range), beta)


def check_backward(x: Raw, beta_range: float, lengths: list[int] | None = None) -> None:
    """Gradients, of all tokens or of those of `lengths`: then the others are NaN, and get 0."""
    bounds, live = None, x.g.shape[1]
    if lengths is not None:
        bounds, live = torch.tensor([0, *lengths], device=x.g.device).cumsum(0), sum(lengths)
        x.g[:, live:], x.beta[:, live:] = torch.nan, torch.nan
    dg, dbeta = (torch.randn(x.g.shape, device=x.g.device) for _ in range(2))
    dg[:, live:], dbeta[:, live:] = 0, 0
    got = gradients(x, dg, dbeta, beta_range, bounds)
    wide = Raw(*x.wide())
    g, beta = (t[:, :live] for t in wide[:2])
    want_dg, *want = gdn.gate_backward(g, *wide[2:], dg[:, :live].double())
    want_dbeta = dbeta[:, :live].double()
    if beta_range:
        want_dbeta = gdn.beta_sigmoid_backward(beta, want_dbeta, beta_range == 2)
    for name, a, b, like in zip(
        ("dg", "dbeta", "dA_log", "ddt_bias"), got, (want_dg, want_dbeta, *want), x, strict=True
    ):
        if like is None:
            assert a is None
            continue
        assert (a.dtype, a.shape) == (like.dtype, like.shape), name
        assert a.is_contiguous(), name
        if a.dim() == 3:
            assert not a[:, live:].any(), f"{name}: tokens of no sequence"
            a = a[:, :live]
        assert_close(name, a, b, 2 * relative_l2(b.to(like.dtype), b) + 3 * EXACT)


def gradients(
    x: Raw, dg: Tensor, dbeta: Tensor, beta_range: float, bounds: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    given = dg.clone(), dbeta.clone()  # which may be written over
    return activations.backward(*x, *given, beta_range, bounds)


def check_every_size(device: str) -> None:
    """Elementwise, where sums over a tensor would not show it: from no decay to total decay."""
    z = torch.cat([torch.linspace(-87, 100, 2000), torch.tensor([19.99, 20, 20.01, -1e-30, 0])])
    g = z.to(device)[None, :, None]
    A_log = torch.tensor([0.5], device=device)
    ones = torch.ones_like(g)
    out, beta = activations.activate(g, g, A_log, None, 1.0)
    dg, dbeta, *_ = activations.backward(g, g, A_log, None, ones.clone(), ones.clone(), 1.0, None)
    wide = g.double()
    slope = -A_log.double().exp() * wide.sigmoid()
    for name, got, want in (
        ("g", out, gdn.gate(wide, A_log.double())),
        ("beta", beta, wide.sigmoid()),
        ("dg", dg, slope),
        ("dbeta", dbeta, wide.abs().neg().exp() * wide.abs().sigmoid() ** 2),
    ):
        torch.testing.assert_close(got.double(), want, rtol=EXACT, atol=2e-38, msg=name)


def check_no_nan(device: str) -> None:
    """A rate that overflows, and gates that no number is too large or too small for."""
    g = torch.tensor([-torch.inf, -1e30, 0, 1e30, torch.inf], device=device)[None, :, None]
    A_log, nothing = torch.tensor([200.0], device=device), torch.zeros_like(g)
    out, beta = activations.activate(g, g, A_log, None, 2.0)
    assert not out.isnan().any()
    assert not beta.isnan().any()
    assert (out <= 0).all()
    got = activations.backward(
        g[:, :4], g[:, :4], A_log, None, *(nothing[:, :4].contiguous() for _ in range(2)), 2.0, None
    )
    assert not any(t.any() for t in got[:3])
