"""Attacks on the causal convolution: of packs and batches, and over trees."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels import causal_conv1d, conv, shared_prefix_conv1d
from tests.fuzz import definitions
from tests.fuzz.closeness import Inexact, close, inside, wanted
from tests.fuzz.draw import FLOATS, Draw
from tests.fuzz.dualkv_attention import Forest, forest
from tests.fuzz.target import Call, Target

LENGTHS = (0, 1, 2, 3, 4, 7, 20, 70)
CHANNELS, KERNEL_CHANNELS = (3, 1, 8), (8, 16, 136)
HEADS, KERNEL_HEADS = (2, 4, 5), (16, 64, 96, 128, 192)  # sizes of normalised heads
LEAVES = ("x", "weight", "bias")
OWN = ("contiguous", "transposed", "sliced", "stepped")  # each number has a place of its own
IN_KERNELS = ("contiguous", "sliced")  # channels are adjacent


def parameters(d: Draw, C: int) -> Call:
    width = d.choose("width", (4, 2, 3))
    its = d.choose("dtype of parameters", FLOATS[1:] if d.kernels else FLOATS)
    x: Call = {"weight": d.strided("weight", d.normal("weight", C, width, dtype=its), OWN)}
    of_bias = d.choose("dtype of bias", (its, torch.float32))
    x["bias"] = d.normal("bias", C, dtype=of_bias) if d.flag("bias") else None
    x["activation"] = d.choose("activation", (None, "silu", "swish"))
    return x


def sized(d: Draw) -> tuple[int, Call]:
    """The channels, and the heads among them if any."""
    C = d.choose("channels", KERNEL_CHANNELS if d.kernels else CHANNELS)
    if not d.flag("heads", 0.4):
        return C, {}
    heads = d.choose("heads", (1, 2, 3)), d.choose("size", KERNEL_HEADS if d.kernels else HEADS)
    return C + heads[0] * heads[1], {"qk_l2norm": heads}


def tokens(d: Draw, C: int, *outer: int) -> Tensor:
    """[.., T, C] in a dtype and layout."""
    dtype = d.choose("dtype", FLOATS[2:] if d.kernels else FLOATS)
    x = d.choose("gain", (1.0, 0.0, 9.0)) * d.normal("x", *outer, C)
    flat = len(outer) == 1 or outer[0] <= 1  # kernels take tokens that are equally far apart
    kinds = OWN if not d.kernels else IN_KERNELS if flat else IN_KERNELS[:1]
    return d.strided("x", x.to(d.device, dtype), kinds)


def learned(d: Draw, x: Call) -> Call:
    for name in LEAVES:
        if x[name] is not None and d.flag(f"gradient of {name}", 0.7):
            x[name] = x[name].detach().requires_grad_()
    return x


def causal_call(d: Draw) -> Call:
    C, heads = sized(d)
    given = parameters(d, C) | heads
    if d.flag("packed", 0.6):
        parts = d.several("lengths", LENGTHS, 6)
        bounds = torch.tensor([0, *parts]).cumsum(0)
        its = d.choose("dtype of bounds", (torch.int64, torch.int32))
        given["cu_seqlens"] = bounds.to(d.device, its)
        rows = tokens(d, C, sum(parts) + d.choose("padding", (0, 1, 9)))
        return learned(d, {"x": rows.T[None] if d.flag("turned") else rows, **given})
    if d.flag("rows", 0.6):
        rows = tokens(d, C, d.choose("batch", (1, 2, 3, 0)), d.choose("tokens", LENGTHS))
        return learned(d, {"x": rows.transpose(1, 2), **given})
    return learned(d, {"x": tokens(d, C, d.choose("tokens", LENGTHS)), **given})


def verify_causal(d: Draw, x: Call, y: Tensor) -> None:
    lengths, rows = None, by_tokens(x["x"])
    if (bounds := x.get("cu_seqlens")) is not None:
        lengths = bounds.diff().tolist()
        assert not by_tokens(y)[:, sum(lengths) :].any(), "tokens of no sequence are not 0"
    sizes = [rows.shape[1]] * rows.shape[0] if lengths is None else lengths
    assert conv.refusal(x["x"], x["weight"], x["bias"], x.get("qk_l2norm")) is None
    compare(d, x, y, (sizes, [-1] * len(sizes)))


def shared_call(d: Draw) -> Call:
    nodes, layout = forest(d, d.choose("made", ("from_lengths", "from_forest")))
    C, heads = sized(d)
    given = parameters(d, C) | heads
    rows = tokens(d, C, layout.num_tokens)
    turned = rows.T[None] if d.flag("turned") else rows
    return learned(d, {"x": turned, **given, "layout": layout, "forest": nodes})


def verify_shared(d: Draw, x: Call, y: Tensor) -> None:
    compare(d, x, y, x["forest"])


def by_tokens(x: Tensor) -> Tensor:
    """[B, T, C] of [T, C] or [B, C, T]."""
    return x[None] if x.dim() == 2 else x.transpose(1, 2)


def compare(d: Draw, x: Call, y: Tensor, nodes: Forest) -> None:
    """y and the gradients that the call asks for; `nodes` are those of all rows."""
    given, its = x["x"], x["x"].dtype
    assert (y.shape, y.dtype) == (given.shape, its)
    names = [n for n in LEAVES if x[n] is not None and x[n].requires_grad]
    results, upstream = {"y": y}, {}
    if names:
        upstream["dy"] = d.strided("dy", d.normal("dy", *y.shape, dtype=its))
        grads = torch.autograd.grad(y, [x[n] for n in names], upstream["dy"])
        results |= {f"d{n}": grad for n, grad in zip(names, grads, strict=True)}

    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        t = {n: value.requires_grad_(n in names) for n, value in t.items()}
        rows = by_tokens(t["x"])
        flat = rows.reshape(rows.shape[0] * rows.shape[1], rows.shape[2])
        end, silu = sum(nodes[0]), x["activation"] is not None
        z = definitions.tree_conv(flat[:end], t["weight"], t.get("bias"), *nodes)
        rest = flat.new_zeros(len(flat) - end, flat.shape[1])
        live = definitions.unit_heads(z * z.sigmoid() if silu else z, x.get("qk_l2norm"))
        value = torch.cat([live, rest]).reshape(rows.shape)
        value = value[0] if given.dim() == 2 else value.transpose(1, 2)
        found = {"y": value}
        if names:
            loss = (value * t["dy"]).sum() + sum(0 * t[n].sum() for n in names)
            grads = torch.autograd.grad(loss, [t[n] for n in names])
            found |= {f"d{n}": grad for n, grad in zip(names, grads, strict=True)}
        return found

    inputs = {n: x[n] for n in LEAVES if x[n] is not None} | upstream
    kinds = [Inexact(None, inside(its))]
    want = wanted(run, inputs, classes=kinds)
    for name, got in results.items():
        assert got.dtype == (its if name == "y" else x[name[1:]].dtype)
        close(name, got, want[name], [kind.error for kind in kinds])


def over_tree(forest: Forest, **x: Any) -> Tensor:
    """`forest` is for the definition."""
    return shared_prefix_conv1d(**x)


TARGETS = {
    "conv.causal": Target(causal_call, causal_conv1d, verify_causal, ("causal_conv1d",)),
    "conv.shared": Target(
        shared_call, over_tree, verify_shared, ("shared_prefix_conv1d",), given=("forest",)
    ),
}
