"""Attacks on the packers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import qla_kernels
from qla_kernels import dualkv
from tests.fuzz.draw import Draw
from tests.fuzz.packing import Member, Node, check_batch
from tests.fuzz.target import Call, Target

INTEGERS = (torch.int64, torch.int32)


def _tokens(d: Draw, name: str, n: int, vocabulary: int) -> Any:
    """Token ids, as a tensor or a list."""
    ids = d.ints(name, vocabulary, n)
    kind = d.choose(f"type of {name}", ("list", "tensor", "int32", "strided"))
    if kind == "list":
        return ids.tolist()
    if kind == "strided":
        return torch.stack([ids, ids], 1)[:, 0]
    return ids.int() if kind == "int32" else ids


def _padding(d: Draw, tokens: int) -> int | None:
    more = d.choose("padding", (None, 0, 1, 5))
    return None if more is None else tokens + more


def prompts_call(d: Draw) -> Call:
    prompts, responses = [], []
    for n in range(d.whole("groups", 0, 4)):
        prompts.append(_tokens(d, f"prompt {n}", d.choose(f"length {n}", (1, 2, 5)), 9))
        lengths = d.several(f"responses {n}", (0, 1, 2, 6), 3)
        responses.append([_tokens(d, f"{n}.{i}", m, 9) for i, m in enumerate(lengths)])
    tokens = sum(map(len, prompts)) + sum(len(x) for r in responses for x in r)
    positions = d.ints("positions", 50, *([3] if d.flag("three axes") else []), tokens)
    return {
        "prompts": prompts,
        "responses": responses,
        "position_ids": positions if d.flag("own positions") else None,
        "pad_to": _padding(d, tokens),
    }


def verify_prompts(d: Draw, x: Call, batch: Any) -> None:
    nodes: list[Node] = []
    members: list[Member] = []
    source: list[int] = []

    def node(tokens: Any, parent: int) -> None:
        ids = torch.as_tensor(tokens).tolist()
        nodes.append(Node(list(range(len(source), len(source) + len(ids))), parent))
        source.extend(ids)

    for group, (prompt, answers) in enumerate(zip(x["prompts"], x["responses"], strict=True)):
        above, P = len(nodes), len(prompt)
        node(prompt, -1)
        for answer in answers:
            targets = list(range(P, P + len(answer)))
            members.append(Member([above, len(nodes)], targets, P, len(members), group))
            node(answer, above)
    check_batch(batch, torch.tensor(source), x.get("position_ids"), nodes, members, x.get("pad_to"))


def padded_call(d: Draw) -> Call:
    """Rows of few different prompts, shuffled."""
    kinds, P = d.whole("prompts", 1, 3), d.choose("prompt_width", (4, 1, 7))
    B, R = d.choose("rows", (3, 0, 1, 6)), d.choose("response_width", (5, 0, 1))
    numbers, ids = d.numbers("rows"), d.ints("other ids", 9, B, P + R)
    mask = torch.zeros(B, P + R, dtype=torch.int64)
    prompts = [d.ints(f"prompt {n}", 3, numbers.randint(1, P)) for n in range(kinds)]
    which = [numbers.randrange(kinds) for _ in range(B)]
    for row, kind in enumerate(which):
        n, m = len(prompts[kind]), numbers.randint(0, R)
        ids[row, P - n : P] = prompts[kind]
        mask[row, P - n : P + m] = 1
    groups: Any = None
    if d.flag("group_ids"):
        labels = [f"uid{kind}" for kind in which]
        groups = d.choose("type of group_ids", (torch.tensor(which, dtype=torch.long), labels))
    dtype = d.choose("dtype of ids", INTEGERS)
    positions = d.ints("positions", 50, P + R).expand(*([2] if d.flag("axes") else []), B, P + R)
    return {
        "input_ids": d.strided("ids", ids.to(dtype), ("contiguous", "transposed", "sliced")),
        "attention_mask": mask.to(d.choose("dtype of the mask", (torch.int64, torch.bool))),
        "prompt_width": P,
        "group_ids": groups,
        "verify": d.choose("verify", (True, False)),
        "position_ids": positions if d.flag("own positions") else None,
        "pad_to": None,
    } | ({"pad_to": _padding(d, B * (P + R))} if d.flag("pad") else {})


def _groups(x: Call) -> list[tuple[list[int], int, list[int]]]:
    """(rows, tokens of the prompt, tokens of each response) in order of first rows."""
    P, mask = x["prompt_width"], x["attention_mask"].bool()
    found: dict[Any, list[int]] = {}
    for row in range(len(mask)):
        label = tuple(x["input_ids"][row, :P][mask[row, :P]].tolist())
        if x.get("group_ids") is not None:
            given = x["group_ids"][row]
            label = int(given) if isinstance(given, Tensor) else given
        found.setdefault(label, []).append(row)
    lengths = mask[:, P:].sum(1).tolist()
    return [(r, int(mask[r[0], :P].sum()), [lengths[i] for i in r]) for r in found.values()]


def verify_padded(d: Draw, x: Call, batch: Any) -> None:
    P, W = x["prompt_width"], x["input_ids"].shape[1]
    nodes: list[Node] = []
    members: list[Member] = []
    for group, (rows, prompt, lengths) in enumerate(_groups(x)):
        above, start = len(nodes), rows[0] * W + P - prompt
        nodes.append(Node(list(range(start, start + prompt)), -1))
        for row, n in zip(rows, lengths, strict=True):
            targets = list(range(prompt, prompt + n))
            members.append(Member([above, len(nodes)], targets, prompt, row, group))
            nodes.append(Node(list(range(row * W + P, row * W + P + n)), above))
    positions = x.get("position_ids")
    flat = None if positions is None else positions.flatten(-2)
    check_batch(batch, x["input_ids"].flatten(), flat, nodes, members, x.get("pad_to"))


def groups_call(d: Draw) -> Call:
    x = padded_call(d)
    names = ("input_ids", "attention_mask", "prompt_width", "group_ids", "verify")
    return {n: x[n] for n in names}


def verify_groups(d: Draw, x: Call, found: Any) -> None:
    assert [tuple(group) for group in found] == _groups(x)


def tree_call(d: Draw) -> Call:
    """Sequences of few different tokens, so that many begin alike."""
    lengths = d.several("lengths", (1, 2, 3, 4, 8), 7)
    vocabulary = d.choose("vocabulary", (2, 1, 4))
    sequences = [_tokens(d, f"sequence {n}", m, vocabulary) for n, m in enumerate(lengths)]
    masks: Any = None
    if d.flag("loss_mask"):
        masks = [
            (d.uniform(f"mask {n}", m) < 0.6) & (torch.arange(m) > 0) for n, m in enumerate(lengths)
        ]
        masks = [m.tolist() if d.flag(f"list {n}") else m for n, m in enumerate(masks)]
    tokens = sum(lengths)
    return {
        "sequences": sequences,
        "loss_mask": masks,
        "position_ids": d.ints("positions", 50, 2, tokens) if d.flag("own positions") else None,
        "pad_to": _padding(d, tokens),
    }


def verify_tree(d: Draw, x: Call, batch: Any) -> None:
    """A tree with a node for every token; nodes are in order of depth, then of appearance."""
    texts = [torch.as_tensor(s).tolist() for s in x["sequences"]]
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {(): []}
    source_of: dict[tuple[int, ...], int] = {}
    at = 0
    for text in texts:
        for n in range(len(text)):
            here, parent = tuple(text[: n + 1]), tuple(text[:n])
            if here not in children:
                children[here] = []
                children[parent].append(here)
                source_of[here] = at
            at += 1
    order: list[tuple[int, ...]] = []
    waiting = list(reversed(children[()]))
    while waiting:
        order.append(waiting.pop())
        waiting += reversed(children[order[-1]])
    number = {here: n for n, here in enumerate(order)}
    nodes = [Node([source_of[here]], number.get(here[:-1], -1)) for here in order]
    members, roots = [], [here for here in order if len(here) == 1]
    for n, text in enumerate(texts):
        path = [number[tuple(text[: i + 1])] for i in range(len(text))]
        mask = [i > 0 for i in range(len(text))]
        if x.get("loss_mask") is not None:
            mask = [bool(m) for m in x["loss_mask"][n]]
        targets = [i for i, wanted in enumerate(mask) if wanted]
        members.append(Member(path, targets, 0, n, _group(roots, texts, text)))
    source = torch.tensor([t for text in texts for t in text], dtype=torch.long)
    check_batch(batch, source, x.get("position_ids"), nodes, members, x.get("pad_to"))


def _group(roots: Sequence[tuple[int, ...]], texts: Sequence[list[int]], text: list[int]) -> int:
    """Trees in packed order: that in which their first tokens appear."""
    return roots.index((text[0],))


TARGETS = {
    "dualkv.pack_shared_prompts": Target(
        prompts_call,
        qla_kernels.pack_shared_prompts,
        verify_prompts,
        ("pack_shared_prompts", "SharedBatch"),
    ),
    "dualkv.pack_padded": Target(
        padded_call, qla_kernels.pack_padded, verify_padded, ("pack_padded",)
    ),
    "dualkv.padded_groups": Target(
        groups_call, dualkv.padded_groups, verify_groups, ("padded_groups", "PaddedGroup")
    ),
    "dualkv.pack_prefix_tree": Target(
        tree_call, qla_kernels.pack_prefix_tree, verify_tree, ("pack_prefix_tree",)
    ),
}
