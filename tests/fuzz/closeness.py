"""How far a result may be from its definition, from counting roundings.

A definition is run in fp64, and twice more with inputs changed by random parts of 10^-6. What that
does to a result is its *swing*: the error that relative errors of 1 in those inputs would cause, if
they were small enough to be linear. Inputs that are known to one precision are a class, and

    |got - want|  <=  sum over classes of error * swing  +  roundings * unit * |want|  +  least

in L2 norm over a whole tensor. `error` is the relative error of a number inside the computation:
its unit roundoff times how many roundings a number meets on its way. `roundings` counts those of
the result itself, to its dtype of that unit roundoff. The swing sees what a fixed tolerance cannot:
sums that cancel, states that grow or that decay to nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

UNIT = {  # unit roundoff: the most that one rounding to nearest changes a number, relatively
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
LEAST = {  # what underflow costs: a decay below 2^-200 may count as that, and fp32 ends at 2^-149
    torch.float64: 1e-57,
    torch.float32: 1e-35,
    torch.bfloat16: 1e-35,
    torch.float16: 2.0**-24,  # half of it: the spacing of its smallest numbers
}
SWING = 1e-6
FEW = 32  # numbers whose swing, found twice, may be small by luck

# A sum of n terms in any order has an error of about sqrt(n) units of its terms, at most n; no sum
# here has more than some hundred terms that count, and a number passes through a handful of them.
SUMS = 64

Results = Mapping[str, Tensor]


class Inexact(NamedTuple):
    """A class of inputs, and what their relative error may be."""

    inputs: frozenset[str] | None  # None for all
    error: float


class Wanted(NamedTuple):
    value: Tensor  # fp64
    swings: tuple[float, ...]  # L2 norms, of each class


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: fp64 of fp64, fp32 of all others."""
    return torch.promote_types(dtype, torch.float32)


def inside(dtype: torch.dtype) -> float:
    """The error of a computation in `wide(dtype)` that nothing rounds on the way."""
    return SUMS * UNIT[wide(dtype)]


def wanted(
    definition: Callable[[dict[str, Tensor]], Results],
    inputs: dict[str, Tensor],
    noise: Mapping[str, Tensor] | None = None,
    classes: Sequence[Inexact] = (Inexact(None, 0),),
) -> dict[str, Wanted]:
    """Results of the definition and their swings.

    `noise` is how much an input is changed by; one without an entry, in proportion to itself.
    """
    generator = torch.Generator().manual_seed(0)
    noise = noise or {}
    exact = {n: x.detach().cpu().double() for n, x in inputs.items()}
    values = definition(dict(exact))
    swings: dict[str, list[float]] = {n: [] for n in values}
    for those, _ in classes:
        powers = dict.fromkeys(values, 0.0)
        for _ in range(2):
            changed = dict(exact)
            for name, x in exact.items():
                if those is None or name in those:
                    change = torch.randn(x.shape, generator=generator, dtype=torch.float64)
                    change = SWING * change * noise.get(name, x)
                    changed[name] = torch.where(change.isfinite(), x + change, x)
            for name, value in definition(changed).items():
                difference = (value - values[name]).nan_to_num(0, 0, 0).norm().item()
                powers[name] += (difference / SWING) ** 2 / 2
        for name, power in powers.items():
            swings[name].append(math.sqrt(power))
    return {n: Wanted(x.detach(), tuple(swings[n])) for n, x in values.items()}


def close(
    name: str,
    got: Tensor,
    want: Wanted,
    errors: Sequence[float],
    roundings: float = 1,
    operands: torch.dtype | None = None,
) -> None:
    """Fail unless `got` is what is wanted; where that is not finite, it is the same there.

    `errors` are those of each class; `operands` is what kernels round those of products to.
    """
    value = want.value
    assert tuple(got.shape) == tuple(value.shape), f"{name}: {tuple(got.shape)}, {value.shape}"
    got, dtype = got.detach().cpu().double(), got.dtype
    finite = value.isfinite()
    same = torch.where(value.isnan(), got.isnan(), got == value)
    assert (finite | same).all(), f"{name}: not {value[~finite & ~same][:3]}: {got[~finite][:3]}"
    assert got[finite].isfinite().all(), f"{name}: not finite at {_where(~got.isfinite() & finite)}"
    got, value = (x.masked_fill(~finite, 0) for x in (got, value))
    luck = 1 + FEW / max(1, value.numel())
    limit = luck * sum(e * s for e, s in zip(errors, want.swings, strict=True))
    limit += roundings * UNIT[dtype] * value.norm().item()
    least = LEAST[dtype] if operands is None else max(LEAST[dtype], torch.finfo(operands).tiny)
    limit += least * math.sqrt(got.numel())
    error = (got - value).norm().item()
    if not error <= limit:
        off = (got - value).abs()
        where = _where(off == off.max())
        raise AssertionError(
            f"{name}: off by {error:.3g}, allowed {limit:.3g}, of {value.norm().item():.3g};"
            f" most at {where}: got {got[where].item():.9g}, want {value[where].item():.9g}"
        )


def _where(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())
