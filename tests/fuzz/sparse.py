"""Attacks on sparse attention of one device, its index and its patterns."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels import sparse_ring
from qla_kernels.sparse_ring import Dense, FixedVerticalSlash, VerticalSlash, VSIndex
from tests.fuzz import definitions
from tests.fuzz.attention_answers import verify
from tests.fuzz.draw import FLOATS, Draw
from tests.fuzz.sparse_lines import BLOCK, Lines, lines, window_masses
from tests.fuzz.target import Call, Target

HEADS = ((1, 1), (2, 1), (2, 2), (4, 2), (3, 1))  # H, Hk
SIZES = (8, 1, 5, 16, 64)
TOKENS = (128, 256, 384)

Heads = list[list[tuple[list[int], list[int]]]]  # columns and diagonals of head h of row b


def queries(d: Draw, grads: bool = True) -> Call:
    T, (H, Hk) = d.choose("tokens", TOKENS), d.choose("heads", HEADS)
    D = d.choose("size", (64, 128) if d.kernels else SIZES)
    B, dtype = d.choose("rows", (1, 2)), d.choose("dtype", FLOATS[2:] if d.kernels else FLOATS)
    x = {"q": d.normal("q", B, T, H, D), "k": d.normal("k", B, T, Hk, D)}
    mean = d.choose("mean", (0.0, 0.5)) * d.normal("mean", D)  # which columns stand out from
    rare = (d.uniform("rare", B, T, Hk, 1) < 0.02) * d.choose("gain", (0.0, 4.0))
    x = {"q": x["q"] + mean, "k": x["k"] * (1 + rare) + mean}
    x["v"] = d.normal("v", B, T, Hk, D)
    x = {n: d.strided(n, t.to(d.device, dtype)) for n, t in x.items()}
    seqlen = d.choose("seqlen", (None, T - 1, T - 64, T - 65, T - 100, 65, 64, 63, 1))
    call = {
        n: t.requires_grad_() if grads and d.flag(f"gradient of {n}") else t for n, t in x.items()
    }
    call |= {} if seqlen is None else {"seqlen": seqlen}
    scale = d.choose("scale", ("default", 0.5))
    return call if scale == "default" else {**call, "scale": scale}


def pattern(d: Draw, x: Call) -> Any:
    kind = d.choose("pattern", ("Dense", "FixedVerticalSlash", "VerticalSlash"))
    if kind == "Dense":
        return Dense()
    if kind == "VerticalSlash":
        return budget(d)
    T, H = x["q"].shape[1:3]
    numbers, each = d.numbers("lines"), d.flag("lines of each head")
    heads = H if each else 1

    def some(end: int, most: int) -> Any:
        found = [
            numbers.sample(range(end), numbers.randint(0, min(end, most))) for _ in range(heads)
        ]
        if not each and numbers.random() < 0.3:
            return torch.tensor(found[0], dtype=torch.long)
        return found if each else found[0]

    return FixedVerticalSlash(some(T, numbers.choice((0, 5, 150))), some(T // BLOCK, 6))


def budget(d: Draw) -> VerticalSlash:
    sink, window = d.choose("sink", (4, 0, 1, 70)), d.choose("window", (2, 0, 1, 9))
    return VerticalSlash(
        recall_v=d.choose("recall_v", (0.95, 0.0, 0.3, 0.6, 1.0)),
        recall_s=d.choose("recall_s", (0.95, 0.0, 0.3, 0.6, 1.0)),
        max_v=d.choose("max_v", (4096, max(1, sink), 80, 129)),
        max_s=d.choose("max_s", (None, max(1, window), 12)),
        sink=sink,
        window=window,
        estimator=d.choose("estimator", ("residual", "independent")),
        kappa=d.choose("kappa", (8, 0, 1, 30)),
        gap_close=d.choose("gap_close", (0, 1, 3)),
    )


def attention_call(d: Draw) -> Call:
    x = queries(d)
    made = pattern(d, x)
    if d.flag("index is given"):
        settings = {n: x[n] for n in ("seqlen", "scale") if n in x}
        made = {"index": sparse_ring.build_index(x["q"], x["k"], made, **settings)}
    else:
        made = {"pattern": made}
    return x | made | {"return_lse": d.flag("lse"), "return_index": d.flag("index")}


def verify_attention(d: Draw, x: Call, result: Any) -> None:
    seqlen = x.get("seqlen") or x["q"].shape[1]
    asked = [bool(x.get(n)) for n in ("return_lse", "return_index")]
    parts = list(result) if any(asked) else [result]
    assert len(parts) == 1 + sum(asked)
    o, lse = parts[0], parts[1] if asked[0] else None
    index = parts[-1] if asked[1] else x.get("index")
    if index is None:
        settings = {n: x[n] for n in ("seqlen", "scale") if n in x}
        index = sparse_ring.build_index(x["q"], x["k"], x["pattern"], **settings)
    assert sparse_ring.refusal(x["q"], x["k"], x["v"], scale=x.get("scale")) is None
    assert not o[:, seqlen:].any(), "padding"
    verify(d, x, o, lse, mask_of(index, seqlen), x.get("scale"), seen=slice(None, seqlen))


def heads_of(index: VSIndex) -> Heads:
    """What the tensors say, read one number at a time."""
    counts, words = index.v_cnt.tolist(), index.d_bits.tolist()
    columns = index.v_idx.tolist()
    blocks = range(index.T // BLOCK)
    return [
        [
            (columns[b][h][: counts[b][h]], [d for d in blocks if bits[d // 32] >> d % 32 & 1])
            for h, bits in enumerate(row)
        ]
        for b, row in enumerate(words)
    ]


def mask_of(index: VSIndex, seqlen: int) -> Tensor:
    rows = [
        torch.stack([definitions.lines_mask(*head, index.T, seqlen) for head in row])
        for row in heads_of(index)
    ]
    return torch.stack(rows)


def index_call(d: Draw) -> Call:
    x = queries(d, grads=False)
    del x["v"]
    return {**x, "pattern": pattern(d, x)}


def verify_index(d: Draw, x: Call, index: VSIndex) -> None:
    """The lines, and all that an index says of itself."""
    q, k, its = x["q"], x["k"], x["pattern"]
    B, T, H, D = q.shape
    seqlen, scale = x.get("seqlen") or T, x.get("scale") or D**-0.5
    got = heads_of(index)
    assert index.T == T
    for b in range(B):
        for h in range(H):
            want = wanted_lines(its, q[b, :, h], k[b, :, h * k.shape[2] // H], h, seqlen, scale)
            if want is None:
                continue  # numbers of the last digit decide
            assert got[b][h][0] == want.columns, f"columns of head {h} of row {b}"
            assert got[b][h][1] == want.diagonals, f"diagonals of head {h} of row {b}"
            recall = float(index.window_recall[b, h])
            if isinstance(its, FixedVerticalSlash):
                assert recall != recall, "recall of given lines"
            else:
                assert abs(recall - want.recall) < 1e-6, "recall"
    verify_methods(index, got)


def wanted_lines(its: Any, q: Tensor, k: Tensor, h: int, seqlen: int, scale: float) -> Lines | None:
    """None where fp32 may choose other lines than fp64: masses off by 10^-5 would change them."""
    T = len(q)
    if isinstance(its, Dense):
        return Lines([], list(range(T // BLOCK)), 1.0)
    if isinstance(its, FixedVerticalSlash):
        columns, diagonals = (x[h if len(x) > 1 else 0] for x in (its.v_idx, its.d_idx))
        return Lines(sorted(set(columns)), sorted({0, *diagonals}), 1.0)
    masses = window_masses(q.detach().cpu().double(), k.detach().cpu().double(), seqlen, scale)
    found = lines(masses, seqlen, its)
    noise = torch.Generator().manual_seed(0)
    size = 1e-9 if q.dtype == torch.float64 else 1e-5
    for _ in range(8):
        change = size * torch.randn(T, generator=noise, dtype=torch.float64)
        step = torch.randint(-1, 2, (T,), generator=noise)  # of an integer's rounding
        other = (torch.tensor(masses) * (1 + change)).round().long() + step
        near = [max(1, n) if m else 0 for n, m in zip(other.tolist(), masses, strict=True)]
        if lines(near, seqlen, its)[:2] != found[:2]:
            return None
    return found


def verify_methods(index: VSIndex, heads: Heads) -> None:
    T, blocks = index.T, index.T // BLOCK
    mask = mask_of(index, T)
    assert torch.equal(index.to_mask().cpu(), mask), "to_mask"
    pairs = mask.sum((-2, -1)).double() / (T * (T + 1) // 2)
    assert torch.allclose(index.density().cpu(), pairs, rtol=1e-12, atol=0), "density"
    assert index.to_lists() == heads, "to_lists"
    assert index.blocks == blocks
    active = index.diagonals()
    for b, row in enumerate(heads):
        for h, (columns, diagonals) in enumerate(row):
            assert active[b, h].nonzero()[:, 0].tolist() == diagonals
            runs = sum(d - 1 not in diagonals for d in diagonals)
            assert abs(float(index.runs()[b, h]) - len(diagonals) / runs) < 1e-12, "runs"
            room = index.v_idx[b, h, len(columns) :]
            assert (room == T).all(), "unused columns are T"
    assert index.num_bytes == sum(x.numel() * x.element_size() for x in index[:4])
    index.check("fuzz")


TARGETS = {
    "sparse_ring.sparse_attention": Target(
        attention_call,
        sparse_ring.sparse_attention,
        verify_attention,
        ("sparse_attention", "Dense", "FixedVerticalSlash"),
    ),
    "sparse_ring.build_index": Target(
        index_call,
        sparse_ring.build_index,
        verify_index,
        ("build_index", "VSIndex", "VerticalSlash"),
    ),
}
