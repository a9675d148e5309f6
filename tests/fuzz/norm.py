"""Attacks on the gated norm: of packs, batches and rows."""

import torch
from torch import Tensor

from qla_kernels import gated_rms_norm, norm
from tests.fuzz.closeness import Inexact, close, inside, wanted
from tests.fuzz.draw import FLOATS, Draw
from tests.fuzz.target import Call, Target

LENGTHS = (0, 1, 2, 7, 40, 130)
SIZES, KERNEL_SIZES = (3, 2, 8), (8, 64, 96, 136, 264)  # of one column, dx is 0 but for rounding
LEAVES = ("x", "gate", "weight")
OWN = ("contiguous", "transposed", "sliced", "stepped")  # each number has a place of its own
IN_KERNELS = ("contiguous", "sliced")  # columns are adjacent


def norm_call(d: Draw) -> Call:
    V, heads = d.choose("V", KERNEL_SIZES if d.kernels else SIZES), d.choose("heads", (2, 1, 3))
    outer, packed = d.choose("batch", ((), (1,), (2,))), d.flag("packed", 0.4)
    tokens = d.choose("tokens", LENGTHS)
    shape = (*((1,) if packed and outer else outer), tokens, heads, V)
    if not packed and d.flag("rows", 0.3):
        shape = tokens, V
    dtype = d.choose("dtype", FLOATS[2:] if d.kernels else FLOATS)
    layouts = IN_KERNELS if d.kernels else OWN
    if d.kernels and len(shape) == 4 and shape[0] > 1:
        layouts = layouts[:1]  # tokens of several rows lie a constant distance apart
    x: Call = {
        name: d.strided(name, (gain * d.normal(name, *shape)).to(d.device, dtype), layouts)
        for name, gain in (
            ("x", d.choose("gain", (1.0, 0.1, 9.0))), ("gate", d.choose("slope", (1.0, 30.0)))
        )
    }  # fmt: skip
    its = d.choose("dtype of the weight", FLOATS[1:] if d.kernels else FLOATS)
    x["weight"] = d.normal("weight", V, dtype=its)
    x["eps"] = d.choose("eps", (1e-6, 1e-2))
    x["activation"] = d.choose("activation", ("silu", "swish", "sigmoid"))
    if packed:
        end = d.choose("padding", (0, 1, 9))
        bounds = torch.tensor([0, max(0, tokens - end)])
        its = d.choose("dtype of bounds", (torch.int64, torch.int32))
        x["cu_seqlens"] = bounds.to(d.device, its)
    for name in LEAVES:
        if d.flag(f"gradient of {name}", 0.7):
            x[name] = x[name].detach().requires_grad_()
    return x


def verify(d: Draw, x: Call, y: Tensor) -> None:
    """y and the gradients that the call asks for."""
    assert norm.refusal(x["x"], x["gate"], x["weight"]) is None
    assert (y.shape, y.dtype) == (x["x"].shape, x["x"].dtype)
    names = [name for name in LEAVES if x[name].requires_grad]
    results, upstream = {"y": y}, {}
    if names:
        upstream["dy"] = d.strided("dy", d.normal("dy", *y.shape, dtype=y.dtype))
        grads = torch.autograd.grad(y, [x[name] for name in names], upstream["dy"])
        results |= {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
    live = torch.ones(y.shape[:-1], dtype=torch.float64)[..., None]
    if (bounds := x.get("cu_seqlens")) is not None:
        live[..., int(bounds[-1]) :, :, :] = 0

    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        t = {name: value.requires_grad_(name in names) for name, value in t.items()}
        z, wide = t["gate"], t["x"]
        r = (wide.pow(2).mean(-1, keepdim=True) + x["eps"]).pow(-0.5)
        logistic = 1 / (1 + (-z).exp())  # torch's derivative of sigmoid cancels
        act = logistic if x["activation"] == "sigmoid" else z * logistic
        value = wide * r * t["weight"] * act * live
        found = {"y": value}
        if names:
            loss = (value * t["dy"]).sum() + sum(0 * t[name].sum() for name in names)
            grads = torch.autograd.grad(loss, [t[name] for name in names])
            found |= {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
        return found

    kinds = [Inexact(None, inside(y.dtype))]
    want = wanted(run, {name: x[name] for name in LEAVES} | upstream, classes=kinds)
    for name, got in results.items():
        assert got.dtype == (y.dtype if name == "y" else x[name[1:]].dtype)
        close(name, got, want[name], [kind.error for kind in kinds])


TARGETS = {"norm.gated": Target(norm_call, gated_rms_norm, verify, ("gated_rms_norm",))}
