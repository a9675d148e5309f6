"""Attacks on what patterns, layouts and batches are made from, and on a batch's own methods."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels import SharedLayout, pack_shared_prompts
from qla_kernels.sparse_ring import (
    ContiguousLayout,
    FixedVerticalSlash,
    StripedLayout,
    VerticalSlash,
    ZigZagLayout,
    build_index,
)
from tests.fuzz.draw import Draw
from tests.fuzz.dualkv_packing import prompts_call
from tests.fuzz.packing import check_layout
from tests.fuzz.sparse import budget, heads_of, verify_index
from tests.fuzz.sparse_layouts import held_by, unit_of
from tests.fuzz.target import Call, Target


def budget_call(d: Draw) -> Call:
    return vars(budget(d))


def verify_budget(d: Draw, x: Call, pattern: Any) -> None:
    """It says what it was given, and finds lines."""
    assert vars(pattern) == x
    q, k = d.normal("q", 1, 128, 1, 4), d.normal("k", 1, 128, 1, 4)
    verify_index(d, {"q": q, "k": k, "pattern": pattern}, build_index(q, k, pattern))


def lines_call(d: Draw) -> Call:
    numbers = d.numbers("lines")
    each = d.flag("lines of each head")
    columns, diagonals = (
        [numbers.sample(range(n), numbers.randint(0, min(n, 4))) for _ in range(1 + each)]
        for n in (128, 2)
    )
    return {"v_idx": columns if each else columns[0], "d_idx": diagonals if each else diagonals[0]}


def verify_lines(d: Draw, x: Call, pattern: Any) -> None:
    q = d.normal("q", 1, 128, 2, 4)
    index = build_index(q, q, pattern)
    for n, name in enumerate(("v_idx", "d_idx")):
        lines = x[name].tolist() if isinstance(x[name], Tensor) else x[name]
        heads = lines if any(isinstance(h, list) for h in lines) else [lines]
        for h, got in enumerate(heads_of(index)[0]):
            want = {int(i) for i in heads[h % len(heads)]}
            assert want == set(heads[h % len(heads)]), "not whole numbers"
            assert got[n] == sorted(want | ({0} if n else set())), name


def layout_call(d: Draw) -> Call:
    made = d.choose("layout", (ContiguousLayout, ZigZagLayout, StripedLayout))
    stripe = {"stripe": d.choose("stripe", (128, 64))} if made is StripedLayout else {}
    return {"made": made, "world": d.choose("world", (1, 2, 3)), **stripe}


def make_layout(made: Any, **x: Any) -> Any:
    return made(**x)


def verify_made_layout(d: Draw, x: Call, its: Any) -> None:
    T = unit_of(its)
    for rank, tokens in enumerate(held_by(its, T)):
        assert its.positions(T, rank).tolist() == tokens


def forest_call(d: Draw) -> Call:
    lengths = d.several("lengths", (0, 1, 3, 8), 6)
    numbers, path, parents = d.numbers("parents"), [], []
    for n in range(len(lengths)):
        path = path[: numbers.randint(0, len(path))]
        parents.append(path[-1] if path else -1)
        path.append(n)
    more = d.choose("padding", (None, 0, 4))
    pad_to = None if more is None else sum(lengths) + more
    return {"lengths": lengths, "parents": parents, "pad_to": pad_to}


def verify_forest(d: Draw, x: Call, its: Any) -> None:
    lengths, parents = list(x["lengths"]), list(x["parents"])
    more = 0 if x.get("pad_to") is None else x["pad_to"] - sum(lengths)
    check_layout(its, [*lengths, more], [*parents, -1])


def lengths_call(d: Draw) -> Call:
    groups = [
        (d.choose(f"prompt {n}", (0, 1, 5)), d.several(f"responses {n}", (0, 1, 4), 3))
        for n in range(d.whole("groups", 0, 3))
    ]
    return {"groups": groups, "pad_to": None}


def verify_lengths(d: Draw, x: Call, its: Any) -> None:
    sizes: list[int] = []
    parents: list[int] = []
    for prompt, responses in x["groups"]:
        parents += [-1, *[len(sizes)] * len(responses)]
        sizes += [prompt, *responses]
    verify_forest(d, {"lengths": sizes, "parents": parents, "pad_to": x["pad_to"]}, its)


def batch_call(d: Draw) -> Call:
    x = prompts_call(d)
    return {"batch": pack_shared_prompts(x["prompts"], x["responses"])}


def padded_call(d: Draw) -> Call:
    x = batch_call(d)
    batch = x["batch"]
    width = d.choose("width", (None, batch.width, batch.width + 3))
    values = d.normal("x", len(batch.targets), *([2] if d.flag("vectors") else []))
    return x | {"x": values, "width": width, "fill": d.choose("fill", (0.0, -1.0))}


def verify_padded(d: Draw, x: Call, got: Tensor) -> None:
    batch, values = x["batch"], x["x"]
    width = batch.width if x.get("width") is None else x["width"]
    want = torch.full(
        (batch.num_sequences, width, *values.shape[1:]), x["fill"], dtype=values.dtype
    )
    for n, (row, column) in enumerate(zip(batch.row.tolist(), batch.column.tolist(), strict=True)):
        want[row, column] = values[n]
    assert got.dtype == want.dtype
    assert torch.allclose(got, want, rtol=0, atol=0, equal_nan=True)


def unpadded_call(d: Draw) -> Call:
    x = batch_call(d)
    batch = x["batch"]
    return x | {"x": d.normal("x", batch.num_sequences, batch.width + d.choose("more", (0, 2)))}


def verify_unpadded(d: Draw, x: Call, got: Tensor) -> None:
    places = zip(x["batch"].row.tolist(), x["batch"].column.tolist(), strict=True)
    want = [x["x"][row, column].tolist() for row, column in places]
    assert got.tolist() == want


def pack_call(d: Draw) -> Call:
    x = batch_call(d)
    return x | {"x": d.normal("x", *x["batch"].source_shape, 2)}


def verify_pack(d: Draw, x: Call, got: Tensor) -> None:
    want = [x["x"].tolist()[i] if i >= 0 else [0.0, 0.0] for i in x["batch"].take.tolist()]
    assert got.tolist() == want


def _method(name: str) -> Any:
    return lambda batch, **x: getattr(batch, name)(**x)


def _of_batch(call: Any, name: str, verify: Any) -> Target:
    given = ("batch", "x=on meta")  # what is made of numbers on meta is there, too
    return Target(call, _method(name), verify, ("SharedBatch",), given)


LAYOUTS = ("ContiguousLayout", "StripedLayout", "ZigZagLayout")

TARGETS = {
    "sparse_ring.VerticalSlash": Target(
        budget_call, VerticalSlash, verify_budget, ("VerticalSlash",)
    ),
    "sparse_ring.FixedVerticalSlash": Target(
        lines_call, FixedVerticalSlash, verify_lines, ("FixedVerticalSlash",)
    ),
    "sparse_ring.Layout": Target(
        layout_call, make_layout, verify_made_layout, LAYOUTS, given=("made",)
    ),
    "dualkv.from_forest": Target(
        forest_call, SharedLayout.from_forest, verify_forest, ("SharedLayout",)
    ),
    "dualkv.from_lengths": Target(
        lengths_call, SharedLayout.from_lengths, verify_lengths, ("SharedLayout",)
    ),
    "dualkv.to_padded": _of_batch(padded_call, "to_padded", verify_padded),
    "dualkv.from_padded": _of_batch(unpadded_call, "from_padded", verify_unpadded),
    "dualkv.pack": _of_batch(pack_call, "pack", verify_pack),
}
