"""What raw gates and betas must become, and their gradients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.launch import activations
from qla_kernels.lab.selftest.cases import Cases
from qla_kernels.lab.selftest.compare import assert_close, relative_l2
from qla_kernels.runtime.cpu import reference

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


class RawGates(NamedTuple):
    """Gates and betas before their activations, and the gate's parameters."""

    g: Tensor  # [B, T, HV], a slice of a head-major projection
    beta: Tensor  # [B, T, HV], likewise
    A_log: Tensor  # [HV]
    dt_bias: Tensor | None  # [HV]

    def wide(self) -> "RawGates":
        """Returns fp64 tensors on the CPU."""
        bias = None if self.dt_bias is None else self.dt_bias.double().cpu()
        g, beta, A_log = (x.double().cpu() for x in self[:3])
        return RawGates(g, beta, A_log, bias)


def raw(
    shape: tuple[int, int, int], dtypes: tuple[torch.dtype, ...], device: str, with_bias: bool
) -> RawGates:
    """Returns random gates [B, T, HV] for shape = (B, T, HV)."""
    B, T, HV = shape
    both = 5 * torch.randn(2, B, HV, T, 3)
    g, beta = (x.to(device, dtype)[..., 1].mT for x, dtype in zip(both, dtypes[:2], strict=True))
    A_log, dt_bias = torch.linspace(-4, 2, HV), torch.linspace(-5, 2, HV)
    return RawGates(
        g, beta, A_log.to(device, dtypes[2]), dt_bias.to(device, dtypes[3]) if with_bias else None
    )


def check_forward(x: RawGates, beta_range: float) -> None:
    """Compares the activated gates and betas with fp64."""
    g, beta = activations.activate(*x, beta_range)
    assert (g.dtype, beta.dtype) == (torch.float32,) * 2
    assert g.is_contiguous()
    assert beta.is_contiguous()
    wide = x.wide()
    assert_close("g", g.cpu(), reference().gdn.gate(wide.g, *wide[2:]), EXACT)
    want = beta_range * wide.beta.sigmoid() if beta_range else wide.beta
    assert_close("beta", beta.cpu(), want, EXACT)
    assert torch.equal(activations.activate_beta(x.beta, beta_range), beta)


def check_backward(x: RawGates, beta_range: float, lengths: list[int] | None = None) -> None:
    """Compares gradients, of all tokens or of `lengths`: then others are NaN, and get 0."""
    gdn = reference().gdn
    bounds, live = None, x.g.shape[1]
    if lengths is not None:
        bounds, live = torch.tensor([0, *lengths], device=x.g.device).cumsum(0), sum(lengths)
        x.g[:, live:], x.beta[:, live:] = torch.nan, torch.nan
    dg, dbeta = (torch.randn(x.g.shape, device=x.g.device) for _ in range(2))
    dg[:, live:], dbeta[:, live:] = 0, 0
    got = gradients(x, dg, dbeta, beta_range, bounds)
    wide = x.wide()
    g, beta = wide.g[:, :live], wide.beta[:, :live]
    want_dg, *want = gdn.gate_backward(g, *wide[2:], dg[:, :live].double().cpu())
    want_dbeta = dbeta[:, :live].double().cpu()
    if beta_range:
        want_dbeta = gdn.beta_sigmoid_backward(beta, want_dbeta, beta_range == 2)
    for name, a, b, like in zip(
        ("dg", "dbeta", "dA_log", "ddt_bias"), got, (want_dg, want_dbeta, *want), x, strict=True
    ):
        if like is None or a is None:
            assert a is like is None, name
            continue
        assert (a.dtype, a.shape) == (like.dtype, like.shape), name
        assert a.is_contiguous(), name
        if a.dim() == 3:
            assert not a[:, live:].any(), f"{name}: tokens of no sequence"
            a = a[:, :live]
        assert_close(name, a.cpu(), b, 2 * relative_l2(b.to(like.dtype), b) + 3 * EXACT)


def gradients(
    x: RawGates, dg: Tensor, dbeta: Tensor, beta_range: float, bounds: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the raw gates and of their parameters."""
    given = dg.clone(), dbeta.clone()  # which may be written over
    return activations.backward(*x, *given, beta_range, bounds)


def check_every_size(device: str) -> None:
    """Compares single elements, from no decay to total decay: norms would not show them."""
    z = torch.cat([torch.linspace(-87, 100, 2000), torch.tensor([19.99, 20, 20.01, -1e-30, 0])])
    g = z.to(device)[None, :, None]
    A_log = torch.tensor([0.5], device=device)
    ones = torch.ones_like(g)
    out, beta = activations.activate(g, g, A_log, None, 1.0)
    dg, dbeta, *_ = activations.backward(g, g, A_log, None, ones.clone(), ones.clone(), 1.0, None)
    wide, A_log = g.double().cpu(), A_log.cpu()
    slope = -A_log.double().exp() * wide.sigmoid()
    for name, got, want in (
        ("g", out, reference().gdn.gate(wide, A_log.double())),
        ("beta", beta, wide.sigmoid()),
        ("dg", dg, slope),
        ("dbeta", dbeta, wide.abs().neg().exp() * wide.abs().sigmoid() ** 2),
    ):
        torch.testing.assert_close(got.double().cpu(), want, rtol=EXACT, atol=2e-38, msg=name)


def check_no_nan(device: str) -> None:
    """Checks a rate that overflows, and gates that no number is too large or too small for."""
    g = torch.tensor([-torch.inf, -1e30, 0, 1e30, torch.inf], device=device)[None, :, None]
    A_log, nothing = torch.tensor([200.0], device=device), torch.zeros_like(g)
    out, beta = activations.activate(g, g, A_log, None, 2.0)
    assert not out.isnan().any()
    assert not beta.isnan().any()
    assert (out <= 0).all()
    four, dg, dbeta = g[:, :4], nothing[:, :4].contiguous(), nothing[:, :4].contiguous()
    got = activations.backward(four, four, A_log, None, dg, dbeta, 2.0, None)
    assert not any(t is None or t.any() for t in got[:3])


def _any_dtypes(_: Any, given: tuple[Any, ...], device: str) -> None:
    shape, dtypes = given
    for beta_range in (0.0, 1.0, 2.0):
        x = raw(shape, dtypes, device, with_bias=beta_range < 2)
        check_forward(x, beta_range)
        check_backward(x, beta_range)


def _packed(_: Any, given: tuple[int, list[int]], device: str) -> None:
    tokens, lengths = given
    check_backward(raw((1, tokens, 6), MIXES[0], device, True), 1.0, lengths)


KERNELS = ("gdn.activate", "gdn.activate_bwd", "gdn.gate_sums")
LARGE = ((1, 8192, 32), (1, 40_000, 48), (4, 2048, 8), (700, 3, 16))
CASES = (
    Cases(
        KERNELS,
        _any_dtypes,
        [(shape, dtypes) for shape in SHAPES for dtypes in MIXES],
        [(shape, dtypes) for shape in LARGE for dtypes in MIXES],
    ),
    Cases(
        KERNELS[1:],
        _packed,
        [(100, lengths) for lengths in ([], [0, 0], [1], [20, 0, 50], [96, 4])],
        [(3000, lengths) for lengths in ([2000, 0, 500], [2996, 4])],
    ),
    Cases(KERNELS, lambda _, check, device: check(device), [check_every_size, check_no_nan]),
)
