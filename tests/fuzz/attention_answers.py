"""What attention under a mask has to give: results, gradients, and how far they may be off."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.fuzz import definitions
from tests.fuzz.closeness import SUMS, UNIT, Inexact, Wanted, close, inside, wanted, wide
from tests.fuzz.draw import Draw

# 16 bits: o is kept rounded for the backward, which reads it in sum do o; kernels round P and dS,
# too, before the products that read them.
KEPT, OPERANDS = 4, 12
OF_O = frozenset({"rounding of do o"})


def answers(
    d: Draw, x: dict[str, Tensor], names: Sequence[str], mask: Tensor, scale: float
) -> dict[str, Wanted]:
    """o [B, Tq, H, D], lse [B, H, Tq], and gradients of `names`.

    x has q, k and v [B, T, heads, D], and of do and dlse those that are not 0; mask is
    [B, H or 1, Tq, T].
    """

    (B, Tq, H, _), T = x["q"].shape, x["k"].shape[1]
    off = torch.zeros(B, H, Tq, T, dtype=torch.float64)

    def forward(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        rows = [
            definitions.attention(
                *(t[n][b] for n in "qkv"), mask[b], scale, t.get("rounding of scores", off)[b]
            )
            for b in range(len(mask))
        ]
        o, lse = zip(*rows, strict=True)
        return torch.stack(o), torch.stack(lse)

    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in names:
            t[name].requires_grad_()
        o, lse = forward(t)
        found = {"o": o * (1 + t["rounding of lse"].mT[..., None]), "lse": lse}
        if names:
            seen = found["lse"].masked_fill(found["lse"] == -torch.inf, 0)
            loss = (seen * t["rounding of do o"]).sum()
            loss = loss + sum((t[n] * 0).sum() for n in names)  # one may be unused
            for name, value in (("o", found["o"]), ("lse", seen)):
                if f"d{name}" in t:
                    off_by = 1 + t["rounding of lse"] if name == "lse" else 1  # o has it already
                    loss = loss + (value * off_by * t[f"d{name}"]).sum()
            grads = torch.autograd.grad(loss, [t[n] for n in names])
            found |= {f"d{n}": grad for n, grad in zip(names, grads, strict=True)}
        return found

    # P = e^(S - lse) has the absolute rounding of S and of lse, and a gradient of scores subtracts
    # sum do o, whose terms may cancel.
    exact = {n: t.detach().cpu().double() for n, t in x.items()}
    o, lse = forward(exact)
    do = exact.get("do", torch.zeros_like(o))
    noise = {
        "rounding of lse": lse.masked_fill(lse == -torch.inf, 0),
        "rounding of do o": (o * do).abs().sum(-1).mT,
        "rounding of scores": torch.ones_like(off),
    }
    zeros = {n: torch.zeros_like(size) for n, size in noise.items()}
    return wanted(run, x | zeros, noise, classes(d, x["q"].dtype))


def classes(d: Draw, its: torch.dtype) -> list[Inexact]:
    found = [Inexact(None, inside(its))]
    if wide(its) != its:
        found += [
            Inexact(None, OPERANDS * UNIT[its]) if d.kernels else Inexact(OF_O, KEPT * UNIT[its])
        ]
    return found


def verify(
    d: Draw,
    x: dict[str, Tensor],
    o: Tensor,
    lse: Tensor | None,
    mask: Tensor,
    scale: float | None,
    seen: slice = slice(None),
    batched: bool = True,
) -> None:
    """A call's results and its gradients, which are asked for here; other rows see nothing.

    Shapes as in `answers`; results and arguments of a call without a batch lack the first axis.
    """
    its, results = x["q"].dtype, {"o": o} | ({} if lse is None else {"lse": lse})
    assert o.dtype == its
    assert lse is None or lse.dtype == wide(its)
    names = [n for n in "qkv" if x[n].requires_grad]
    upstream = {}
    if names:
        use = "o" if lse is None else d.choose("results that are used", ("both", "o", "lse"))
        for name, got in results.items():
            if use in ("both", name):
                value = d.normal(f"d{name}", *got.shape, dtype=got.dtype)
                if name == "lse":  # of a row that sees nothing it is a constant
                    rest = torch.zeros_like(value)
                    rest[..., seen] = value[..., seen]
                    value = rest
                kinds = ("contiguous",) if d.kernels or name == "lse" else None
                upstream[f"d{name}"] = d.strided(f"d{name}", value, kinds)
        grads = torch.autograd.grad(
            [results[n] for n in results if f"d{n}" in upstream],
            [x[n] for n in names],
            list(upstream.values()),
        )
        results |= {f"d{n}": grad for n, grad in zip(names, grads, strict=True)}
    scale = x["q"].shape[-1] ** -0.5 if scale is None else float(scale)
    given = {n: x[n] for n in "qkv"} | upstream
    want = answers(d, {n: t if batched else t[None] for n, t in given.items()}, names, mask, scale)
    for name, got in results.items():
        compare(d, name, got if batched else got[None], want[name], its)


def compare(d: Draw, name: str, got: Tensor, want: Wanted, its: torch.dtype) -> None:
    backward = name not in ("o", "lse")
    assert not backward or got.dtype == its, f"{name} is {got.dtype}, not {its}"
    errors = [one.error for one in classes(d, its)]
    if name == "lse":  # a score may be a sum of terms of one sign, and no operand of it is rounded
        close(name, got, want, [errors[0], *[0.0] * len(errors[1:])], SUMS)
        return
    close(name, got, want, errors, operands=its if d.kernels else None)
