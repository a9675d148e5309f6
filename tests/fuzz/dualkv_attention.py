"""Attacks on shared-prompt attention: every sequence by itself is the definition."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels import SharedLayout, dualkv, shared_prefix_attention
from qla_kernels.dualkv.shapes import HEAD_SIZES
from tests.fuzz import definitions
from tests.fuzz.attention_answers import answers, compare, verify
from tests.fuzz.draw import FLOATS, Draw
from tests.fuzz.target import Call, Target

HEADS = ((1, 1), (2, 2), (2, 1), (4, 2), (6, 2), (3, 1))  # H, Hk
SIZES = (8, 1, 5, 16, 64, 128)
LENGTHS = (0, 1, 2, 3, 7, 20, 33)
KERNEL_LENGTHS = (0, 1, 3, 31, 33, 64, 127, 130)

PARTS = ("k_context", "v_context", "k_decoded", "v_decoded")
Forest = tuple[list[int], list[int]]  # lengths of nodes, their parents


def forest(d: Draw, packer: str, lengths: tuple[int, ...] = LENGTHS) -> tuple[Forest, SharedLayout]:
    """Of groups, or of any nodes; with padding. Kernels get lengths of their own."""
    lengths = KERNEL_LENGTHS if d.kernels else lengths
    sizes: list[int] = []
    parents: list[int] = []
    if packer == "from_lengths":
        groups = []
        for n in range(d.whole("groups", 0, 4)):
            prompt = d.choose(f"prompt {n}", lengths)
            responses = d.several(f"responses {n}", lengths, 4)
            groups.append((prompt, responses))
            parents += [-1, *[len(sizes)] * len(responses)]
            sizes += [prompt, *responses]
        build: Any = (SharedLayout.from_lengths, (groups,))
    else:
        sizes = d.several("lengths", lengths, 8)
        numbers, path = d.numbers("parents"), []
        for n in range(len(sizes)):
            path = path[: numbers.randint(0, len(path))]
            parents.append(path[-1] if path else -1)
            path.append(n)
        build = (SharedLayout.from_forest, (sizes, parents))
    padding = d.choose("padding", (None, 0, 1, 9))
    pad_to = None if padding is None else sum(sizes) + padding
    layout = build[0](*build[1], pad_to=pad_to).to(d.device)
    if padding:
        sizes, parents = [*sizes, padding], [*parents, -1]
    return (sizes, parents), layout


def queries(d: Draw, tokens: int, T: int) -> Call:
    """q of `tokens` tokens, k and v of T, in a dtype and layout."""
    dtype = d.choose("dtype", FLOATS[2:] if d.kernels else FLOATS)
    H, Hk = d.choose("heads", HEADS)
    D = d.choose("size", HEAD_SIZES if d.kernels else SIZES)
    gain = d.choose("gain", (1.0, 0.0, 4.0))
    x = {
        "q": gain * d.normal("q", tokens, H, D),
        "k": d.normal("k", T, Hk, D) + d.choose("mean key", (0.0, 1.0)),
        "v": d.normal("v", T, Hk, D),
    }
    x = {n: d.strided(n, t.to(d.device, dtype)) for n, t in x.items()}
    return {n: t.requires_grad_() if d.flag(f"gradient of {n}") else t for n, t in x.items()}


def shared_call(d: Draw) -> Call:
    (sizes, parents), layout = forest(d, d.choose("made", ("from_lengths", "from_forest")))
    x = {**queries(d, layout.num_tokens, layout.num_tokens), "layout": layout}
    x["forest"] = sizes, parents
    scale = d.choose("scale", ("default", 0.5, 1.0))
    if scale != "default":
        x["scale"] = scale
    x["return_lse"] = d.flag("lse")
    x["deterministic"] = d.choose("deterministic", (None, False, True))
    return x


def verify_shared(d: Draw, x: Call, result: Any) -> None:
    mask = definitions.forest_mask(*x["forest"])
    assert (result.__class__ is tuple) == bool(x.get("return_lse"))
    o, lse = result if x.get("return_lse") else (result, None)
    assert dualkv.refusal(x["q"], x["k"], x["v"], scale=x.get("scale")) is None
    visible = x["layout"].pairs
    assert visible == int(mask.sum()), f"{visible} pairs, not {int(mask.sum())}"
    verify(d, x, o, lse, mask[None, None], x.get("scale"), batched=False)


def varlen_call(d: Draw) -> Call:
    """Queries of responses alone, or with the prompt's before the first."""
    lengths = KERNEL_LENGTHS if d.kernels else LENGTHS
    P = d.choose("prompt", lengths)
    responses = d.several("responses", lengths, 5, least=1)
    merged = d.flag("queries of the prompt")
    T, R = P + sum(responses), sum(responses)
    x = queries(d, T if merged else R, T)
    k, v = x.pop("k"), x.pop("v")
    parts = {"k_context": k[:P], "v_context": v[:P], "k_decoded": k[P:], "v_decoded": v[P:]}
    parts = {n: t.detach().requires_grad_(k.requires_grad) for n, t in parts.items()}
    per_query = [P * merged + responses[0], *responses[1:]]
    bounds = [torch.tensor([0, *n]).cumsum(0) for n in (per_query, responses)]
    layout = None
    if d.flag("layout"):
        layout = SharedLayout.from_lengths([(P, responses)], device=d.device)
    scale = {} if d.flag("default scale") else {"softmax_scale": 0.4}
    return {
        "q": x["q"],
        **parts,
        "cu_seqlens_q": bounds[0].to(d.device),
        "cu_seqlens_k_decoded": bounds[1].to(d.device),
        "max_seqlen_q": max(per_query),
        "context_seqlen": P,
        "max_seqlen_k_decoded": max(responses),
        "layout": layout,
        **scale,
    }


def verify_varlen(d: Draw, given: Call, o: Tensor) -> None:
    responses = given["cu_seqlens_k_decoded"].diff().tolist()
    P = len(given["k_context"])
    mask = definitions.forest_mask([P, *responses], [-1] + [0] * len(responses))
    mask = mask[len(mask) - len(given["q"]) :]
    names = [n for n in ("q", *PARTS) if given[n].requires_grad]
    x = {n: torch.cat([given[f"{n}_context"], given[f"{n}_decoded"]]).detach() for n in "kv"}
    x["q"] = given["q"].detach()
    results, leaves = {"o": o}, sorted({n[0] for n in names})
    if names:
        x["do"] = d.normal("do", *o.shape, dtype=o.dtype)
        found = torch.autograd.grad(o, [given[n] for n in names], x["do"])
        results |= {f"d{n}": grad for n, grad in zip(names, found, strict=True)}
    scale = given.get("softmax_scale")
    scale = o.shape[-1] ** -0.5 if scale is None else float(scale)
    want = answers(d, {n: t[None] for n, t in x.items()}, leaves, mask[None, None], scale)
    for name in "kv":
        if (whole := want.get(f"d{name}")) is not None:
            parts = {"context": whole.value[:, :P], "decoded": whole.value[:, P:]}
            want |= {f"d{name}_{n}": whole._replace(value=part) for n, part in parts.items()}
    for name, got in results.items():
        compare(d, name, got[None], want[name], o.dtype)


def attend(forest: Forest, **x: Any) -> Any:
    """`forest` is for the definition."""
    return shared_prefix_attention(**x)


TARGETS = {
    "dualkv.attention": Target(
        shared_call,
        attend,
        verify_shared,
        ("shared_prefix_attention", "SharedLayout"),
        given=("forest",),
    ),
    "dualkv.varlen": Target(varlen_call, dualkv.dualkv_varlen, verify_varlen, ("dualkv_varlen",)),
}
