"""Random calls of the gated delta rule, and the definition's answer to them."""

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tests.fuzz import definitions
from tests.fuzz.closeness import UNIT, Inexact, Wanted, inside, wanted, wide
from tests.fuzz.draw import FLOATS, Draw
from tests.fuzz.target import Call

LENGTHS = (0, 1, 2, 3, 30, 63, 64, 65, 100, 130)
HEADS = ((1, 1), (2, 2), (1, 2), (2, 4), (1, 3), (2, 6))  # H, HV
SIZES = ((8, 8), (16, 8), (2, 1), (5, 3), (8, 24), (32, 32), (64, 64))  # K, V
KERNEL_SIZES = ((64, 64), (128, 128), (64, 128), (128, 64), (96, 192), (48, 64))
GATES = ("usual", "zero", "strong", "minus infinity", "positive", "all of them")
KEYS = ("unit", "short", "dependent", "some zero")
TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
NORM = "use_qk_l2norm_in_kernel"
ACTIVATED = {
    "use_gate_in_kernel": ("g", "A_log", "dt_bias", "rounding of g"),
    "use_beta_sigmoid_in_kernel": ("beta", "rounding of beta"),
}

# What 16 bits cost a backward on the CPU: A and the normalised q and k are kept rounded, and so is
# the gradient that the norm's backward reads. A stands in five products of a gradient, at three
# standard deviations. Kernels round every operand of every product.
KEPT, OPERANDS = 16, 24
ROUNDED = frozenset(("q", "k", "v", "initial_state", "do", "dht")) | {
    f"rounding of {what}" for what in ("q", "k", "states")
}
DEEPEST = 200 * math.log(2)  # a gate below -DEEPEST counts as that: a decay of 2^-200
OWN = ("contiguous", "transposed", "sliced", "stepped")  # each number has a place of its own


def tensors(
    d: Draw,
    lengths: tuple[int, ...] = LENGTHS,
    beta_columns: bool = False,
    activations: bool = True,
    norm: bool = True,
    of_tree: int | None = None,
) -> Call:
    """q, k, v, g, beta, their lengths and activations; tokens of no sequence are NaN.

    With `of_tree` there are so many tokens, those of a tree.
    """
    dtype = d.choose("dtype", FLOATS[2:] if d.kernels else FLOATS)
    gates = d.choose("dtype of gates", (dtype, *FLOATS))
    (H, HV), (K, V) = d.choose("heads", HEADS), d.choose("sizes", _sizes(d))
    x: Call = {}
    B, T, end = d.choose("rows", (1, 2, 3, 0)), d.choose("tokens", lengths), None
    if of_tree is not None:
        B, T = 1, of_tree
    elif d.flag("packed", 0.6):
        parts = d.several("lengths", lengths, 5)
        B, end = 1, sum(parts)
        T = end + d.choose("padding", (0, 1, 70))
        bounds = torch.tensor([0, *parts]).cumsum(0)
        wide = d.choose("dtype of bounds", (torch.int64, torch.int32))
        x["cu_seqlens"] = d.strided("bounds", bounds.to(d.device, wide), _BOUNDS)
        if d.flag("bounds on the CPU", 0.3):
            x["cu_seqlens_cpu"] = bounds
    x |= {"q": _keys(d, "q", B, T, H, K), "k": _keys(d, "k", B, T, H, K)}
    x["v"] = d.normal("v", B, T, HV, V)
    x["g"] = _gates(d, B, T, HV)
    x["beta"] = d.uniform("beta", B, T, HV, *((V,) if beta_columns else ()))
    x["beta"] = x["beta"] * d.choose("largest beta", (1.0, 0.0, 1.9))
    if activations:
        _activate(d, x, norm)
    for name, its in (("q", dtype), ("k", dtype), ("v", dtype), ("g", gates), ("beta", gates)):
        value = x[name].to(d.device, its)
        if end is not None:
            value[:, end:] = math.nan
        kinds = OWN if end != T and end is not None and not d.kernels else None
        x[name] = d.strided(name, value, kinds, name in "qk")
    scale = d.choose("scale", ("default", 1.0, 0.3, 0.0, -0.7))
    return x if scale == "default" else {**x, "scale": scale}


def states(d: Draw, x: Call, slots: int | None = None) -> None:
    """With a chance an initial state for each sequence, or a pool of them."""
    HV, V, K = *x["v"].shape[2:], x["q"].shape[3]
    N = x["q"].shape[0] if "cu_seqlens" not in x else x["cu_seqlens"].shape[0] - 1
    x["state_v_first"] = d.flag("V first")
    x["output_final_state"] = d.flag("final state", 0.7)
    if slots is None and not d.flag("initial state", 0.6):
        return
    size = (V, K) if x["state_v_first"] else (K, V)
    allowed = (torch.float32,) if d.kernels and slots is not None else FLOATS
    its = d.choose("dtype of states", allowed)
    h0 = d.normal("initial state", N if slots is None else slots, HV, *size, dtype=its)
    kinds = ("contiguous",) if d.kernels and slots is not None else None
    if slots is not None and kinds is None:
        kinds = OWN
    x["initial_state"] = d.strided("states", h0, kinds)


def live(x: Call) -> int:
    return x["q"].shape[1] if x.get("cu_seqlens") is None else int(x["cu_seqlens"][-1])


def bounds_of(x: Call) -> list[int] | None:
    """Of sequences, or of the nodes of a tree."""
    if "forest" in x:
        return [0, *accumulate(x["forest"][0])]
    return None if x.get("cu_seqlens") is None else x["cu_seqlens"].tolist()


def definition(x: Call, t: dict[str, Tensor]) -> definitions.Rule:
    """Of the call's settings and the fp64 tensors t; o ends with the last sequence."""
    end = live(x)
    q, k, v, g, beta = (t[n][:, :end] for n in ("q", "k", "v", "g", "beta"))
    if x.get("use_qk_l2norm_in_kernel"):
        q, k = definitions.unit_rows(q), definitions.unit_rows(k)
        if "rounding of q" in t:
            q, k = q * (1 + t["rounding of q"][:, :end]), k * (1 + t["rounding of k"][:, :end])
    if x.get("use_gate_in_kernel"):
        g = definitions.gate(g, t["A_log"], t.get("dt_bias"))
    if "rounding of g" in t:
        g = g + t["rounding of g"][:, :end]
    if x.get("use_beta_sigmoid_in_kernel"):
        beta = (2 if x.get("allow_neg_eigval") else 1) * beta.sigmoid()
        if "rounding of beta" in t:
            beta = beta * (1 + t["rounding of beta"][:, :end])
    h0 = t.get("initial_state")
    h0 = h0.mT if h0 is not None and x.get("state_v_first") else h0
    scale = x.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    left = t.get("rounding of states")
    if "forest" in x:
        return definitions.gated_delta_tree(q, k, v, g, beta, scale, *x["forest"], left)
    return definitions.gated_delta_rule(q, k, v, g, beta, scale, h0, bounds_of(x), left)


def answers(d: Draw, x: Call, upstream: dict[str, Tensor], names: list[str]) -> dict[str, Wanted]:
    """o, final_state, and the gradients of `names` from those of `upstream`."""
    inputs, noise = rounded_inputs(x)
    padding, tokens = x["q"].shape[1] - live(x), slice(None, live(x))

    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        t = {n: value.requires_grad_(n in names) for n, value in t.items()}
        done = definition(x, {n: value for n, value in t.items() if n not in ("do", "dht")})
        final = done.final.mT if x.get("state_v_first") else done.final
        found = {"o": done.o, "final_state": final}
        if names:
            loss = sum(
                (found[n] * t[d][:, tokens] if n == "o" else found[n] * t[d]).sum()
                for n, d in (("o", "do"), ("final_state", "dht"))
                if d in t
            )
            leaves = [t[n] for n in names]
            loss = loss + sum(
                0 * leaf.nan_to_num(0, 0, 0).sum() for leaf in leaves
            )  # if it is unused
            grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            found |= {f"d{n}": grad for n, grad in zip(names, grads, strict=True)}
        found["o"] = torch.nn.functional.pad(found["o"], (0, 0, 0, 0, 0, padding))
        return found

    return wanted(run, inputs | upstream, noise, classes(d, x))


def rounded_inputs(x: Call) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The call's tensors, zeros that stand where something is rounded inside, and the noise there.

    A gate is known as the difference of two sums of up to 64 gates, and has their rounding. What a
    chunk takes from a state is known to the rounding of that state.
    """
    inputs = {n: x[n] for n in TENSORS if isinstance(x.get(n), Tensor)}
    noise = {}
    if x.get("use_qk_l2norm_in_kernel"):  # between the norm and the rest, in both directions
        noise = {f"rounding of {n}": torch.ones(x[n].shape) for n in "qk"}
    if x.get("use_beta_sigmoid_in_kernel"):
        noise["rounding of beta"] = torch.ones(x["beta"].shape)
    g = x["g"].detach().cpu().double()
    if x.get("use_gate_in_kernel"):
        parameters = (x.get(n) for n in ("A_log", "dt_bias"))
        A_log, dt_bias = (p if p is None else p.detach().cpu().double() for p in parameters)
        g = definitions.gate(g, A_log, dt_bias)
    total = torch.nn.functional.pad(
        g.abs().clamp(max=DEEPEST).nan_to_num().cumsum(1), (0, 0, 64, 0)
    )
    noise["rounding of g"] = total[:, 64:] - total[:, : g.shape[1]]
    (B, _, HV), chunks = g.shape, len(definitions.chunk_bounds(live(x), bounds_of(x)))
    noise["rounding of states"] = torch.ones(B, chunks, HV, x["q"].shape[-1], x["v"].shape[-1])
    return inputs | {n: torch.zeros_like(size) for n, size in noise.items()}, noise


def classes(d: Draw, x: Call, backward: bool = True, rounded: bool = True) -> list[Inexact]:
    """Who is known how well: see `closeness`. `rounded`: there may be products of 16 bits.

    Activations are computed in the wide dtype of what they read, all else in that of q.
    """
    its, found = x["q"].dtype, [Inexact(None, inside(x["q"].dtype))]
    for flag, read in ACTIVATED.items():
        given = x.get(read[0])
        if x.get(flag) and given is not None and inside(given.dtype) > inside(its):
            found.append(Inexact(frozenset(read), inside(given.dtype)))
    if wide(its) != its:
        times = OPERANDS if d.kernels else KEPT if backward else 2 * bool(x.get(NORM))
        found.append(Inexact(ROUNDED, times * rounded * UNIT[its]))
    return found


def errors(d: Draw, x: Call, backward: bool = True, rounded: bool = True) -> list[float]:
    return [one.error for one in classes(d, x, backward, rounded)]


def _sizes(d: Draw) -> Any:
    return KERNEL_SIZES if d.kernels else SIZES


def _keys(d: Draw, name: str, *shape: int) -> Tensor:
    x = normalize(d.normal(name, *shape), dim=-1)
    kind = d.choose(f"kind of {name}", KEYS)
    if kind == "short":
        return 0.2 * x
    if kind == "dependent":
        return normalize(x[:, :1].expand(shape) + 0.02 * x, dim=-1)
    if kind == "some zero":
        return x * (d.uniform(f"zero {name}", *shape[:-1], 1) < 0.7)
    return x


def _gates(d: Draw, *shape: int) -> Tensor:
    z = d.uniform("g", *shape)
    kinds = {
        "usual": -(4 * z - 5).exp(),
        "zero": torch.zeros_like(z),
        "strong": -20 - 200 * z,
        "minus infinity": torch.where(z < 0.2, -math.inf, -z),
        "positive": 0.04 * z,
    }
    kind = d.choose("gates", GATES)
    if kind != "all of them":
        return kinds[kind]
    which = d.ints("which gates", len(kinds), *shape)
    return torch.stack(list(kinds.values())).gather(0, which[None])[0]


def _activate(d: Draw, x: Call, may_norm: bool) -> None:
    """Flags at random, and inputs from before the activation where one is asked for."""
    HV = x["v"].shape[2]
    norm, gate, sigmoid = (d.flag(n, 0.4) for n in ("norm", "raw gates", "sigmoid"))
    if norm and may_norm:
        x |= {"use_qk_l2norm_in_kernel": True, "q": 3 * x["q"], "k": 3 * x["k"]}
    if sigmoid:
        x |= {"use_beta_sigmoid_in_kernel": True, "beta": 6 * x["beta"] - 3}
        x["allow_neg_eigval"] = d.flag("negative eigenvalues")
    if gate:
        its = d.choose("dtype of gate parameters", FLOATS)
        x |= {"use_gate_in_kernel": True, "g": d.normal("raw g", *x["g"].shape) * 2}
        x["g"] = x["g"] + 40 * (d.uniform("far", *x["g"].shape) > 0.97)
        x["A_log"] = torch.linspace(-4, 1.5, HV).to(d.device, its)
        if d.flag("dt_bias", 0.7):
            x["dt_bias"] = d.normal("dt_bias", HV, dtype=its)


_BOUNDS = ("contiguous", "sliced", "stepped")
