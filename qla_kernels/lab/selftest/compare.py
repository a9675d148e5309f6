"""How self-test and tests compare tensors: relative L2 error, bias, where it went wrong.

A largest elementwise difference says little about sums of thousands of rounded products; what
roundings predict is the relative L2 error of a whole tensor, so that is bounded. It is blind to
errors that all point one way (a truncation where a rounding belongs, a missing term), hence the
bias.
"""

import math

import torch
from torch import Tensor

BLOCK = 64  # rows of a chunk: the unit in which kernels go wrong


def relative_l2(got: Tensor, want: Tensor, at_least: float = 0.0) -> float:
    """|got - want| / |want| in fp64; 0 for two zero tensors, inf where only `want` is zero.

    `want` counts as having an RMS size of at least `at_least`.
    """
    error = float((got.double() - want.double()).norm())
    scale = max(float(want.double().norm()), at_least * math.sqrt(want.numel()))
    if scale == 0:
        return 0.0 if error == 0 else math.inf
    return error / scale


def bias_of(got: Tensor, want: Tensor, at_least: float = 0.0) -> float:
    """The part of the error that does not average out, relative to the size of `want`.

    The larger of |mean(error)| / rms(want), an offset, and |<error, want>| / |want|^2, a stretch:
    truncating instead of rounding to nearest looks like the latter when values have both signs.
    """
    got, want = got.double(), want.double()
    error = got - want
    power = max(want.square().sum().item(), at_least**2 * want.numel())
    if error.numel() == 0 or power == 0:
        return 0.0
    offset = abs(error.mean().item()) / math.sqrt(power / error.numel())
    stretch = abs((error * want).sum().item()) / power
    return max(offset, stretch)


def assert_close(
    name: str,
    got: Tensor,
    want: Tensor,
    rel: float,
    bias: float | None = None,
    at_least: float = 0.0,
) -> float:
    """Fail unless `got` is `want` within a relative L2 error of `rel`; return that error.

    `bias` bounds `bias_of`; by default a quarter of `rel`. Independent errors leave a bias of about
    error / sqrt(n), n being the number of elements that carry the tensor's weight; four times that
    is granted on top, so that tensors of few elements, or few large ones, do not fail by chance.
    `at_least` is for results that may vanish by cancellation: their size then says nothing about
    the terms they were summed from, and an error is measured against this RMS size instead.
    """
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}")
    if not want.isfinite().all():
        raise AssertionError(f"{name}: the expected tensor is not finite; the test is wrong")
    if not got.isfinite().all():
        bad = int((~got.isfinite()).sum())
        where = _first(~got.isfinite())
        raise AssertionError(
            f"{name}: {bad} of {got.numel()} not finite, first {got[where]} at {where}"
        )
    error = relative_l2(got, want, at_least)
    if not error <= rel:
        raise AssertionError(
            f"{name}: relative L2 {error:.3e} > {rel:.3e}; {_locate(got, want, rel)}"
        )
    limit = (rel / 4 if bias is None else bias) + 4 * error / math.sqrt(_heavy_elements(want))
    found = bias_of(got, want, at_least)
    if not found <= limit:
        raise AssertionError(
            f"{name}: biased by {found:.3e} > {limit:.3e}, the errors point one way"
            f" (relative L2 {error:.3e} is within {rel:.3e})"
        )
    return error


def _heavy_elements(x: Tensor) -> float:
    """(sum x^2)^2 / sum x^4, the participation ratio: n for n equal elements, n / 3 for normal."""
    power = x.double().square()
    if power.sum() == 0:
        return max(1, x.numel())
    power = power / power.sum()  # first, or the squares of small elements underflow
    return 1 / power.square().sum().item()


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


def _locate(got: Tensor, want: Tensor, rel: float) -> str:
    """The first element that is off, and the block of 64 rows that holds most of the error."""
    got, want = got.double(), want.double()
    error = (got - want).abs()
    typical = want.square().mean().sqrt()
    # An element is off at 4 rel of its own or the tensor's typical size, whichever is larger. An
    # error that is spread thinly may leave none.
    off = error > 4 * rel * torch.maximum(want.abs(), typical)
    label, mask = ("first off", off) if off.any() else ("largest error", error == error.max())
    where = _first(mask)
    text = f"{label} at {where}: got {got[where].item():.6g}, want {want[where].item():.6g}"
    if got.ndim < 2:
        return text
    # Axis 1 is the token axis of every [B, T, ...] tensor; for states it is the head.
    power = error.square().transpose(0, 1).flatten(1).sum(1)
    blocks = torch.stack([rows.sum() for rows in torch.split(power, BLOCK)])
    worst = int(blocks.argmax())
    rows = f"{worst * BLOCK}..{min((worst + 1) * BLOCK, len(power)) - 1}"
    share = (blocks[worst] / blocks.sum()).item()
    return f"{text}; indices {rows} of axis 1 hold {share:.0%} of the squared error"
