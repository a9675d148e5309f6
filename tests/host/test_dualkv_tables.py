"""The tables that the kernels work off: every visible pair once, by brute force."""

import random

import pytest
import torch

from qla_kernels import SharedLayout, pack_shared_prompts
from qla_kernels.dualkv import shapes as c
from qla_kernels.dualkv import tables
from qla_kernels.dualkv.heuristics import head_pack
from qla_kernels.dualkv.shapes import DQ, FWD, KEY_TILES, KV, KV_QUERY_ROWS, QUERY_ROWS
from qla_kernels.dualkv.tables import Tables
from tests.dualkv_inputs import GROUPS

LAYOUTS = {name: SharedLayout.from_lengths(groups) for name, groups in GROUPS.items()} | {
    "ragged": SharedLayout.from_lengths([(300, [3, 129, 64]), (128, [256, 1])]),
    "a deep tree": SharedLayout.from_forest(
        [5, 130, 256, 3, 70, 20, 150, 9], [-1, 0, 1, 2, 1, 0, -1, 6]
    ),
    "many long queries": SharedLayout.from_lengths([(40, [700] * 3)]),
    "eighties": SharedLayout.from_lengths([(80, [79, 160, 17]), (243, [81, 1, 400])]),
}
HEADS = [(1, 1), (4, 1), (8, 1), (32, 8), (6, 2), (16, 1)]


def random_forest(seed: int) -> SharedLayout:
    draw = random.Random(seed)
    lengths, parents, path = [], [], [-1]
    for node in range(draw.randint(1, 12)):
        path = path[: draw.randint(1, len(path))]
        lengths.append(draw.choice([0, 1, 31, 32, 33, 64, 127, 128, 129, 200]))
        parents.append(path[-1])
        path.append(node)
    return SharedLayout.from_forest(lengths, parents)


def every(layouts):
    return {**layouts, **{f"forest {seed}": random_forest(seed) for seed in range(12)}}


def built(
    layout: SharedLayout, heads: tuple[int, int], q_shift: int = 0, head_dim: int = 128
) -> Tables:
    return tables.build(layout.nodes, *heads, q_shift, KEY_TILES[head_dim])


def visible(layout: SharedLayout) -> torch.Tensor:
    """[query, key]"""
    token = torch.arange(layout.num_tokens)
    return (token <= token[:, None]) & (token[:, None] < layout.tout)


@pytest.mark.parametrize("name", every(LAYOUTS))
@pytest.mark.parametrize("heads", [(4, 1), (2, 2)])
@pytest.mark.parametrize(("head_dim", "kernel"), [(128, FWD), (256, FWD), (256, DQ)])
def test_forward_items_cover_every_pair_once(name, heads, head_dim, kernel):
    """As kernels walk them: causal own tiles under a mask, all other own tiles without."""
    layout = every(LAYOUTS)[name]
    work = built(layout, heads, head_dim=head_dim)
    tile, tokens = KEY_TILES[head_dim][kernel], QUERY_ROWS // head_pack(*heads)
    items, span = (work.dq_item, work.dq_span) if kernel == DQ else (work.item, work.span)
    seen = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.int)
    for item in items[: work.header[c.ITEM_ROWS]].tolist():
        rows = slice(item[c.TOK0], item[c.TOK0] + item[c.TOKENS])
        assert 0 < item[c.TOKENS] <= tokens
        query = torch.arange(rows.start, rows.stop)[:, None]
        last0 = item[c.NODE] + (item[c.OWN_TILES] - 1) * tile
        assert last0 < rows.stop <= last0 + item[c.OWN_KEYS] <= last0 + tile
        causal0 = item[c.NODE] + (item[c.TOK0] - item[c.NODE]) // tile * tile
        assert causal0 <= last0
        assert causal0 == last0 or tile % tokens
        own = torch.arange(item[c.NODE], last0 + item[c.OWN_KEYS])
        seen[rows, own] += (own <= query).int()
        assert (torch.arange(item[c.NODE], causal0) <= query).all()  # no mask there
        spans = span[item[c.SPAN0] : item[c.SPAN0] + item[c.SPANS]].tolist()
        for k0, full_tiles, tail in spans:
            seen[rows, k0 : k0 + full_tiles * tile + tail] += 1
        tails = [tail > 0 for _, _, tail in spans]
        assert tails == sorted(tails, reverse=True)
        assert item[c.PARTIALS] == sum(tails)
        full = sum(span[c.FULL_TILES] for span in spans)
        assert item[c.TILES] == item[c.OWN_TILES] + sum(tails) + full
    assert torch.equal(seen, visible(layout).int())


@pytest.mark.parametrize("name", every(LAYOUTS))
@pytest.mark.parametrize("heads", [(4, 1), (16, 1), (1, 1)])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_backward_items_cover_every_pair_once(name, heads, head_dim):
    layout = every(LAYOUTS)[name]
    work = built(layout, heads, head_dim=head_dim)
    tokens = KV_QUERY_ROWS // min(head_pack(*heads), 4)
    seen = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.int)
    parts: dict[int, tuple[int, int]] = {}
    for k0, keys, last, q_tiles, dense, part in work.kv_item[
        : work.header[c.KV_ITEM_ROWS]
    ].tolist():
        assert 0 < keys <= KEY_TILES[head_dim][KV]
        key = torch.arange(k0, k0 + keys)
        for tile in range(q_tiles):
            first = last - tile * tokens
            query = torch.arange(max(first, k0), first + tokens)
            pairs = key <= query[:, None]
            assert tile >= dense or (first >= k0 and pairs.all())
            seen[query[0] : first + tokens, k0 : k0 + keys] += pairs.int()
        if part >= 0:
            parts[part] = (k0, keys)
    assert torch.equal(seen, visible(layout).int())
    assert sorted(parts) == list(range(work.header[c.PARTS]))
    of_split = [
        (k0, keys)
        for k0, keys, part0, num_parts in work.split[: work.header[c.SPLIT_ROWS]].tolist()
        for part in range(part0, part0 + num_parts)
        if parts[part] == (k0, keys)
    ]
    assert len(of_split) == len(parts)


@pytest.mark.parametrize("heads", HEADS)
def test_every_item_is_ordered_once_for_each_head(heads):
    work = built(LAYOUTS["ragged"], heads)
    num_heads, kv_heads = heads
    slots = num_heads // head_pack(*heads)
    assert sorted(work.order.tolist()) == list(range(len(work.item) * slots))
    assert sorted(work.kv_order.tolist()) == list(range(len(work.kv_item) * kv_heads))
    assert work.header[c.ORDERED] == len(work.order)
    assert work.header[c.KV_ORDERED] == len(work.kv_order)


def test_the_dearest_tree_comes_first_and_in_it_head_after_head():
    work = built(LAYOUTS["ragged"], (8, 2))
    entries = [(entry % 2, *work.item[entry // 2].tolist()) for entry in work.order.tolist()]
    split = 300 + 3 + 129 + 64  # the first tree has more pairs
    trees = [entry[1 + c.TOK0] >= split for entry in entries]
    assert trees == sorted(trees)
    for tree in (False, True):
        heads = [entry[0] for entry, of in zip(entries, trees, strict=True) if of == tree]
        assert heads == sorted(heads)
        costs = [
            entry[1 + c.TILES]
            for entry, of in zip(entries, trees, strict=True)
            if of == tree and entry[0] == 0
        ]
        assert costs == sorted(costs, reverse=True)


def test_a_small_batch_is_cut_finely():
    """One prompt's keys, seen by thousands of queries, must not be the work of a few SMs."""
    work = built(SharedLayout.from_lengths([(128, [2000] * 8)]), (32, 8))
    runs = work.kv_item[:, c.KV_TILES]
    assert runs.max() <= max(16, 1.5 * int(runs.sum()) * 8 / (6 * 132) + 1)
    assert work.header[c.PARTS] > 1


def walks(layout: SharedLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each entry of kv_order where its walk begins, whose keys and for which head; its tiles."""
    work = built(layout, (8, 2))
    item = work.kv_item[work.kv_order // 2]
    node = torch.bucketize(
        item[:, c.KV_K0].contiguous(), layout.nodes[:, 0].contiguous(), right=True
    )
    return torch.stack([item[:, c.KV_LAST], node, work.kv_order % 2], 1), item[:, c.KV_TILES]


def test_cheap_runs_come_last():
    """Or SMs would wait for one that began a dear run at the end."""
    of, costs = walks(SharedLayout.from_lengths([(5000, [400, 30, 260]), (6000, [70] * 9)]))
    dearest = costs[torch.cat([torch.ones(1, dtype=torch.bool), (of[1:] != of[:-1]).any(1)])]
    assert dearest.unique().numel() > 5, "all cost the same; the test is wrong"
    assert (dearest.diff() <= 0).all()


def test_keys_of_a_node_are_walked_abreast():
    """Or what one CTA has brought into the L2 cache were gone before the next one comes there."""
    of, _ = walks(SharedLayout.from_lengths([(90, [400, 30, 260]), (300, [700] * 9)]))
    stretches = 1 + int((of[1:] != of[:-1]).any(1).sum())
    assert stretches == len(of.unique(dim=0)) < len(of)


def test_a_long_run_is_cut_where_its_node_ends():
    """So that what is behind is as long for all keys of the prompt."""
    work = built(SharedLayout.from_lengths([(9000, [3500] * 2)]), (32, 8))
    cut = 16000 - 438 * 16  # tiles are counted from the end
    of_prompt = work.kv_item[work.kv_item[:, c.KV_K0] < 2800]
    end = of_prompt[:, c.KV_LAST] + 16
    begin = end - of_prompt[:, c.KV_TILES] * 16
    assert ((begin < cut) == (end <= cut)).all()
    assert {cut, 16000} <= set(end.tolist())


@pytest.mark.parametrize("heads", [(4, 1), (1, 1)])
def test_queries_that_begin_later(heads):
    """All keys, but queries of the responses alone; keys that nobody sees are still written."""
    layout = SharedLayout.from_lengths([(200, [70, 3, 140])])
    work = built(layout, heads, q_shift=200)
    assert work.item[:, c.TOK0].min() == 200
    assert work.item[:, c.TOKENS].sum() == 213
    assert work.kv_item[:, c.KV_KEYS].sum() == 413
    tokens = KV_QUERY_ROWS // min(head_pack(*heads), 4)
    prompt = work.kv_item[work.kv_item[:, c.KV_K0] < 200]
    end = prompt[:, c.KV_LAST] + tokens
    assert (end <= 413).all()
    assert (end - prompt[:, c.KV_TILES] * tokens > 200 - tokens).all()
    unseen = built(SharedLayout.from_lengths([(200, [])]), heads, q_shift=200)
    assert unseen.kv_item[:, c.KV_TILES].tolist() == [0, 0]
    assert unseen.header[c.ORDERED] == 0


def test_a_layout_keeps_its_tables():
    layout = SharedLayout.from_lengths([(30, [5, 6])])
    first = layout.prepare(8, 2)
    assert layout.prepare(8, 2) is first
    assert layout.prepare(8, 8) is not first
    assert layout.prepare(8, 2, head_dim=64) is first
    assert layout.to("cpu").prepare(8, 2) is not first
    assert len({table.untyped_storage().data_ptr() for table in first}) == 1  # one copy


def test_a_batch_prepares_its_layout():
    batch = pack_shared_prompts([[1, 2, 3]], [[[4, 5], [6]]])
    batch.prepare(8, 2)
    batch.prepare(8, 2, head_dim=256)
    assert list(batch.layout.prepared) == [(8, 2, 0, KEY_TILES[size]) for size in (128, 256)]


def test_tables_of_other_tiles_are_others():
    layout = SharedLayout.from_lengths([(300, [5, 6])])
    small, large = layout.prepare(8, 2), layout.prepare(8, 2, head_dim=256)
    assert large.item.shape == large.dq_item.shape == small.item.shape
    assert not torch.equal(large.item, small.item)
    assert not torch.equal(large.item, large.dq_item)
    assert small.dq_item.data_ptr() == small.item.data_ptr()  # stored once
    with pytest.raises(ValueError, match="head_dim=96; need 64, 128 or 256; pass the head size"):
        layout.prepare(8, 2, head_dim=96)


def test_a_trace_does_not_build_them(monkeypatch):
    layout = SharedLayout.from_lengths([(30, [5, 6])])
    ready = layout.prepare(8, 2)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert layout.prepare(8, 2) is ready
    with pytest.raises(ValueError, match=r"call layout\.prepare\(4, 2\) before the function that"):
        layout.prepare(4, 2)
    with pytest.raises(ValueError, match=r"call layout\.prepare\(8, 2, head_dim=256\) before"):
        layout.prepare(8, 2, head_dim=256)


FOREST = SharedLayout.from_forest([5, 3, 4], [-1, 0, 0])
WRONG = {  # changes of its tensors, and the text of the refusal
    "int64 tout": ({"tout": FOREST.tout.long()}, "tout is an int64 tensor of .*; need int32 .T."),
    "a batch of tout": ({"tout": FOREST.tout[None]}, r"tout is .* shape \(1, 12\)"),
    "a list": (
        {"nodes": FOREST.nodes.tolist()},
        "nodes is .* of type list; need int32 .n, 3.",
    ),
    "floats": ({"nodes": FOREST.nodes.float()}, "nodes is a float32 tensor"),
    "two columns": ({"nodes": FOREST.nodes[:, :2]}, r"nodes is .* of shape \(3, 2\)"),
    "another device": ({"nodes": FOREST.nodes.to("meta")}, "nodes is .* on meta"),
    "fewer tokens": ({"tout": FOREST.tout[:-1]}, "the node .* after token 0 of 11"),
    "more tokens": ({"tout": FOREST.tout.repeat(2)}, "end at token 12, and tout for 24"),
    "other values": ({"tout": FOREST.tout + 1}, "tout with other values than those of nodes"),
    "no node": ({"nodes": FOREST.nodes[:0]}, "nodes that end at token 0, and tout for 12"),
    "one is missing": ({"nodes": FOREST.nodes[:2]}, "nodes that end at token 8, and tout for 12"),
    "a gap": ([[0, 5, 12], [6, 8, 8], [8, 12, 12]], r"the node \(6, 8, 8\) after token 5 of 12"),
    "an overlap": ([[0, 5, 12], [4, 8, 8], [8, 12, 12]], r"\(4, 8, 8\) after token 5"),
    "past the tokens": ([[0, 5, 99], [5, 8, 8], [8, 99, 99]], r"\(0, 5, 99\) after token 0 of 12"),
    "a subtree that ends early": ([[0, 5, 3], [5, 8, 8], [8, 12, 12]], r"\(0, 5, 3\) after"),
    "crossing subtrees": ([[0, 5, 7], [5, 8, 12], [8, 12, 12]], r"\(5, 8, 12\) after token 5"),
    "negative": ([[-5, 5, 12], [5, 8, 8], [8, 12, 12]], r"\(-5, 5, 12\) after token 0"),
    "an empty one": ([[0, 5, 12], [5, 5, 5], [5, 12, 12]], r"\(5, 5, 5\) after token 5"),
    "another forest": ([[0, 12, 12]], "tout with other values than those of nodes"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_layout_made_by_hand_is_checked(what):
    changed, text = WRONG[what]
    if isinstance(changed, list):
        changed = {"nodes": torch.tensor(changed, dtype=torch.int32)}
    given = {"tout": FOREST.tout, "nodes": FOREST.nodes}
    SharedLayout(**given)
    with pytest.raises(ValueError, match=f"^SharedLayout: .*{text}.*; make layouts by"):
        SharedLayout(**(given | changed))
