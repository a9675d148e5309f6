"""Packers against loops over whole sequences: tokens, positions, visibility, targets."""

import random
import re
from collections.abc import Sequence
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qla_kernels import SharedBatch, SharedLayout, pack_padded, pack_prefix_tree
from qla_kernels import pack_shared_prompts as pack
from qla_kernels.dualkv import padded, padded_groups
from reference import dualkv
from tests.dualkv_inputs import GROUPS, any_forest, any_groups, forest, grown

token = st.integers(0, 2)  # few, so that sequences agree by chance
text = st.lists(token, min_size=1, max_size=9)
grpo = st.lists(st.tuples(text, st.lists(st.lists(token, max_size=6), max_size=4)), max_size=4)


def assert_packed(
    batch: SharedBatch,
    sequences: Sequence[Sequence[int]],
    targets: Sequence[Sequence[bool]],
    columns: Sequence[Sequence[int]],
) -> None:
    """The batch holds these sequences of the caller's, whatever their packed order."""
    seen = dualkv.visible(batch.layout.tout)
    ids, positions, counts = batch.input_ids, batch.position_ids, torch.zeros(batch.num_tokens)
    found = [x.tolist() for x in batch.to_replicated(ids)]
    assert found == [list(x) for x in sequences]
    assert [x.tolist() for x in batch.to_replicated(positions)] == [[*range(len(x))] for x in found]
    starts = batch.target_cu.tolist()
    for s, path in enumerate(batch.paths):
        counts[path] += 1
        for t, row in enumerate(path.tolist()):
            assert seen[row].nonzero()[:, 0].tolist() == path[: t + 1].tolist()
        caller = int(batch.order[s])
        mine = slice(starts[s], starts[s + 1])
        wanted = [t for t, yes in enumerate(targets[caller]) if yes]
        assert batch.src_rows[batch.src_inv[mine]].tolist() == [int(path[t - 1]) for t in wanted]
        assert batch.targets[mine].tolist() == [sequences[caller][t] for t in wanted]
        assert batch.row[mine].tolist() == [caller] * len(wanted)
        assert batch.column[mine].tolist() == [columns[caller][t] for t in wanted]
    assert sorted(batch.order.tolist()) == [*range(len(sequences))]
    assert batch.src_rows.unique().tolist() == batch.src_rows.tolist()
    assert batch.multiplicity.tolist() == counts.tolist()


def whole(
    prompts: Sequence[list[int]], responses: Sequence[Sequence[list[int]]]
) -> list[list[int]]:
    return [p + r for p, answers in zip(prompts, responses, strict=True) for r in answers]


def after_prompts(prompts, responses):
    """Targets and columns of whole sequences: their responses."""
    pairs = [(len(p), len(r)) for p, rs in zip(prompts, responses, strict=True) for r in rs]
    columns = [[*range(-p, r)] for p, r in pairs]
    return [[c >= 0 for c in column] for column in columns], columns


@settings(max_examples=60, deadline=None)
@given(grpo)
def test_shared_prompts(groups):
    prompts, responses = [p for p, _ in groups], [rs for _, rs in groups]
    batch = pack(prompts, responses)
    assert_packed(batch, whole(prompts, responses), *after_prompts(prompts, responses))
    packed = [t for p, rs in groups for x in (p, *rs) for t in x]
    assert batch.input_ids.tolist() == packed
    assert batch.pack(torch.tensor(packed)).tolist() == packed
    filled = [sum(map(len, rs)) for rs in responses]
    some = [r for rs in responses for r in rs if r]
    assert len(batch.src_rows) == sum(filled) - len(some) + sum(n > 0 for n in filled)
    groups_of = [g for g, rs in enumerate(responses) for _ in rs]
    assert batch.group_of.tolist() == groups_of


@settings(max_examples=60, deadline=None)
@given(sequences=st.lists(text, max_size=7))
def test_prefix_tree(sequences):
    batch = pack_prefix_tree(sequences)
    targets = [[t > 0 for t in range(len(x))] for x in sequences]
    assert_packed(batch, sequences, targets, [[*range(len(x))] for x in sequences])
    # every distinct beginning is stored once, and those that begin alike are one group
    assert batch.num_tokens == len({tuple(x[: t + 1]) for x in sequences for t in range(len(x))})
    firsts = [sequences[i][0] for i in batch.order.tolist()]
    labels = batch.group_of.tolist()
    assert len(set(labels)) == len(set(firsts)) == len(set(zip(firsts, labels, strict=True)))
    flat = [t for x in sequences for t in x]
    assert batch.pack(torch.tensor(flat)).tolist() == batch.input_ids.tolist()


@settings(max_examples=60, deadline=None)
@given(sequences=st.lists(text, max_size=7), fewest=st.integers(2, 6))
def test_runs_that_save_little_are_stored_for_each_sequence(sequences, fewest):
    batch = pack_prefix_tree(sequences, fewest_saved=fewest)
    targets = [[t > 0 for t in range(len(x))] for x in sequences]
    assert_packed(batch, sequences, targets, [[*range(len(x))] for x in sequences])
    for first, end, _ in batch.layout.nodes.tolist():
        times = int(batch.multiplicity[first])
        assert times == 1 or (times - 1) * (end - first) >= fewest


def test_a_run_is_shared_from_where_a_shorter_one_would_begin():
    """Two of three share four tokens, and all share one, which alone saves too little."""
    sequences = [[1, 2, 3, 4, 5], [1, 9], [1, 2, 3, 4, 6]]
    assert pack_prefix_tree(sequences).layout.nodes[:, :2].diff().flatten().tolist() == [
        1, 3, 1, 1, 1,
    ]  # fmt: skip
    batch = pack_prefix_tree(sequences, fewest_saved=3)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 1, 9]
    assert [x.tolist() for x in batch.to_replicated(batch.input_ids)] == sequences


def test_prefix_tree_of_prompts_and_responses_is_the_same_batch():
    """Where responses differ in their first token."""
    prompts = [[1, 2, 3], [4]]
    responses = [[[5, 6], [7], [8, 8, 8]], [[1, 2], [2]]]
    flat, tree = pack(prompts, responses), pack_prefix_tree(whole(prompts, responses))
    assert torch.equal(flat.input_ids, tree.input_ids)
    assert torch.equal(flat.layout.nodes, tree.layout.nodes)
    assert torch.equal(flat.multiplicity, tree.multiplicity)


def test_prefix_tree_loss_mask_chooses_targets():
    """Of two dialogues that part after the first answer; its tokens count in one of them."""
    sequences = [[1, 2, 3, 4, 5], [1, 2, 3, 6]]
    masks = [[0, 0, 1, 0, 1], torch.tensor([False, False, False, True])]
    batch = pack_prefix_tree(sequences, loss_mask=masks)
    assert_packed(batch, sequences, [list(map(bool, m)) for m in masks], [[*range(5)], [*range(4)]])
    assert batch.targets.tolist() == [3, 5, 6]
    assert batch.to_padded(torch.tensor([0.3, 0.5, 0.6])).tolist() == [
        pytest.approx([0, 0, 0.3, 0, 0.5]),
        pytest.approx([0, 0, 0, 0.6, 0]),
    ]


def rows_of(prompts: list[list[int]], responses: list[list[int]], widths: tuple[int, int]):
    """veRL's and TRL's tensors, with rubbish where there is padding."""
    ids = torch.full((len(prompts), sum(widths)), 77)
    mask = torch.zeros(len(prompts), sum(widths), dtype=torch.long)
    for row, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        span = slice(widths[0] - len(p), widths[0] + len(r))
        ids[row, span], mask[row, span] = torch.tensor(p + r, dtype=torch.long), 1
    return ids, mask


@settings(max_examples=40, deadline=None)
@given(groups=grpo, seed=st.integers(0, 9), slack=st.integers(0, 2))
def test_padded(groups, seed, slack):
    """Shuffled rows, found by content or by label: the same batch."""
    rows = [(p, r, str(g)) for g, (p, rs) in enumerate(groups) for r in rs]
    random.Random(seed).shuffle(rows)
    prompts, responses = [p for p, _, _ in rows], [r for _, r, _ in rows]
    widths = tuple(slack + max(map(len, x), default=1) for x in (prompts, responses))
    ids, mask = rows_of(prompts, responses, widths)
    answers = [[r] for r in responses]
    for labels in (None, [label for _, _, label in rows]):
        batch = pack_padded(ids, mask, widths[0], group_ids=labels)
        tree = pack_padded(ids, mask, widths[0], group_ids=labels, fewest_saved=1)
        for packed in (batch, tree):
            assert_packed(packed, whole(prompts, answers), *after_prompts(prompts, answers))
            assert torch.equal(packed.pack(ids), packed.input_ids)
            padded = packed.to_padded(packed.targets, widths[1], fill=77)
            assert torch.equal(padded, ids[:, widths[0] :])
        texts = whole(prompts, answers)
        assert tree.num_tokens == len({tuple(x[: t + 1]) for x in texts for t in range(len(x))})
        kept = {*map(tuple, prompts)} if labels is None else {label for _, _, label in rows}
        assert int(batch.group_of.max() + 1 if rows else 0) == len(kept)


@settings(max_examples=40, deadline=None)
@given(groups=grpo, fewest=st.integers(1, 40))
def test_rows_with_a_prompt_share_it_however_little_that_saves(groups, fewest):
    rows = [(p, r) for p, rs in groups for r in rs]
    prompts, responses = [p for p, _ in rows], [r for _, r in rows]
    widths = tuple(max(map(len, x), default=1) for x in (prompts, responses))
    ids, mask = rows_of(prompts, responses, widths)
    answers = [[r] for r in responses]
    tree = pack_padded(ids, mask, widths[0], fewest_saved=fewest)
    assert_packed(tree, whole(prompts, answers), *after_prompts(prompts, answers))
    assert tree.num_tokens <= pack_padded(ids, mask, widths[0]).num_tokens
    for first, end, _ in tree.layout.nodes.tolist():
        times = int(tree.multiplicity[first])
        in_prompts = [
            len(prompts[row]) > path.tolist().index(first)
            for row, path in zip(tree.order.tolist(), tree.paths, strict=True)
            if first in path
        ]
        assert times == 1 or (times - 1) * (end - first) >= fewest or all(in_prompts)


def test_equal_length_is_not_equal_content():
    ids, mask = rows_of([[1, 2], [1, 3], [1, 2]], [[4], [5], [6]], (3, 1))
    assert [g.rows for g in padded_groups(ids, mask, 3)] == [[0, 2], [1]]
    assert padded_groups(ids, mask.bool(), 3)[0] == ([0, 2], 2, [1, 1])
    apart = pack_padded(ids, mask, 3, group_ids=torch.tensor([5, 6, 7]))
    assert apart.num_tokens == 9


def test_prompts_that_nobody_shares_are_noticed_once(caplog):
    """A prompt_width that was one too large gave a right batch without any sharing, in silence."""
    padded._warn.cache_clear()
    ids, mask = rows_of([[1, 2]] * 2, [[4, 8], [5, 8]], (3, 2))
    pack_padded(ids, mask, 3)
    pack_padded(ids[:1], mask[:1], 4)
    pack_padded(ids, mask, 4, group_ids=[0, 1])
    assert not caplog.messages
    for _ in range(2):
        assert pack_padded(ids, mask, 4).rho == 1
    assert caplog.messages == [
        "pack_padded: no two of 2 rows have the same tokens left of prompt_width=4; need rows that "
        "share a prompt, or nothing is saved; check prompt_width; pass group_ids if this is meant"
    ]


def test_labels_may_be_taken_on_trust():
    ids, mask = rows_of([[1, 2], [1, 3]], [[4], [5]], (2, 1))
    batch = pack_padded(ids, mask, 2, group_ids=["a", "a"], verify=False)
    assert batch.input_ids.tolist() == [1, 2, 4, 5]


def test_given_positions_are_kept():
    """Three coordinates a token, as vision models have, at any offset."""
    positions = 100 + torch.arange(18).reshape(3, 6)
    batch = pack([[1, 2], [3]], [[[4], [5, 6]], []], position_ids=positions, pad_to=8)
    assert torch.equal(batch.position_ids[:, :6], positions)
    assert not batch.position_ids[:, 6:].any()
    ids, mask = rows_of([[1, 2], [1, 2]], [[3], [4, 5]], (3, 2))
    grid = torch.arange(10).repeat(2, 1).reshape(2, 2, 5).transpose(0, 1) % 5
    padded = pack_padded(ids, mask, 3, position_ids=grid)
    assert padded.position_ids.tolist() == [[1, 2, 3, 3, 4]] * 2
    with pytest.raises(ValueError, match=r"position_ids has shape \(3, 5\); need \[..., 6\]"):
        pack([[1, 2], [3]], [[[4], [5, 6]], []], position_ids=positions[:, :5])
    grid = torch.arange(10).reshape(2, 5)
    with pytest.raises(ValueError, match="rows 0 and 1 have other position_ids"):
        pack_padded(ids, mask, 3, position_ids=grid)


def test_padding_sees_itself_alone_and_counts_nowhere():
    batch = pack([[1, 2]], [[[3], [4]]], pad_to=7)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 0, 0, 0]
    assert batch.multiplicity.tolist() == [2, 2, 1, 1, 0, 0, 0]
    assert batch.pack(torch.tensor([9, 9, 9, 9])).tolist() == [9, 9, 9, 9, 0, 0, 0]
    assert batch.layout.tout.tolist() == [4, 4, 3, 4, 7, 7, 7]
    assert pack([[1, 2]], [[[3], [4]]], pad_to=4).num_tokens == 4
    with pytest.raises(ValueError, match="4 tokens and pad_to=3; need room for all"):
        pack([[1, 2]], [[[3], [4]]], pad_to=3)
    empty = pack([], [], pad_to=2)
    assert (empty.num_tokens, empty.num_sequences, len(empty.targets)) == (2, 0, 0)


@pytest.mark.parametrize("name", GROUPS)
def test_layout_from_lengths(name):
    want, got = grown(GROUPS[name]), SharedLayout.from_lengths(GROUPS[name])
    assert torch.equal(got.tout, want.tout)
    assert torch.equal(got.nodes, want.nodes)
    assert got.pairs == int(dualkv.visible(want.tout).sum())


@settings(max_examples=40, deadline=None)
@given(any_forest)
def test_layout_from_forest(trees):
    lengths, parents = [], []

    def walk(tree, parent):
        here = len(lengths)
        lengths.append(tree[0])
        parents.append(parent)
        for child in tree[1]:
            walk(child, here)

    for tree in trees:
        walk(tree, -1)
    want, got = forest(trees), SharedLayout.from_forest(lengths, parents)
    assert torch.equal(got.tout, want.tout)
    assert torch.equal(got.nodes, want.nodes)


@settings(max_examples=20, deadline=None)
@given(any_groups)
def test_figures(groups):
    prompts = [[7] * (p + 1) for p, _ in groups]
    responses = [[[i] * r for i, r in enumerate(rs)] for _, rs in groups]
    batch = pack(prompts, responses)
    alone = [len(x) for x in whole(prompts, responses)]
    assert batch.rho == (sum(alone) / batch.num_tokens if groups else 1)
    pairs = int(dualkv.visible(batch.layout.tout).sum())
    assert batch.pair_ratio == (sum(n * (n + 1) // 2 for n in alone) / pairs if groups else 1)
    assert int(batch.multiplicity.sum()) == sum(alone)


MALFORMED = {
    "an empty prompt": (
        lambda: pack([[1], []], [[], [[2]]]),
        "pack_shared_prompts: the prompt of group 1 is empty; need at least one token; ",
    ),
    "lists that do not match": (
        lambda: pack([[1]], []),
        "pack_shared_prompts: there are 1 prompts and 0 lists of responses; need a list of",
    ),
    "floats": (
        lambda: pack([torch.rand(3)], [[]]),
        "pack_shared_prompts: the prompt of group 0 has shape (3,) and torch.float32; need [n] ",
    ),
    "complex tokens": (
        lambda: pack([[1]], [[torch.ones(2).cfloat()]]),
        "pack_shared_prompts: response 0 of group 0 has shape (2,) and torch.complex64; need [n] ",
    ),
    "a mask for tokens": (
        lambda: pack_prefix_tree([[1], [True, False]]),
        "pack_prefix_tree: sequence 1 has shape (2,) and torch.bool; need [n] integers, n at least",
    ),
    "no tokens": (
        lambda: pack([None], [[]]),
        "pack_shared_prompts: the prompt of group 0 is None of type NoneType; need [",
    ),
    "text": (
        lambda: pack_prefix_tree(["abc"]),
        "pack_prefix_tree: sequence 0 is 'abc' of type str; need [n]",
    ),
    "a label for a token": (
        lambda: pack([[1]], [[[4, -100, 3]]]),
        "pack_shared_prompts: a target is -100; need targets that are token ids, 0 or more; pass",
    ),
    "a label in a tree": (
        lambda: pack_prefix_tree([[1, 2], [1, -100]]),
        "pack_prefix_tree: a target is -100; need targets that are token ids",
    ),
    "a label in a row": (
        lambda: pack_padded(*rows_of([[1, 2]], [[3, -100]], (2, 2)), 2),
        "pack_padded: a target is -100; need targets that are token ids",
    ),
    "tokens in two places": (
        lambda: pack_prefix_tree([[1, 2], torch.ones(2, device="meta").long()]),
        "pack_prefix_tree: tokens are on cpu and meta; need one device; move them to one",
    ),
    "an empty sequence": (
        lambda: pack_prefix_tree([[1], []]),
        "pack_prefix_tree: sequence 1 has shape (0,) and torch.float32; need [n] integers, n at",
    ),
    "a first token as target": (
        lambda: pack_prefix_tree([[1, 2]], loss_mask=[[1, 1]]),
        "pack_prefix_tree: the first token of sequence 0 is a target; need a token before each",
    ),
    "a mask of another length": (
        lambda: pack_prefix_tree([[1, 2]], loss_mask=[[1]]),
        "pack_prefix_tree: loss_mask has the shapes [(1,)]; need [(2,)], as the sequences; pass",
    ),
    "unequal prompts": (
        lambda: pack_padded(*rows_of([[1, 2], [3, 4, 5], [3, 4, 6]], [[9]] * 3, (4, 1)), 4,
                            group_ids=[0, 1, 1]),
        "pack_padded: group 1: rows 1 and 2 differ at prompt token 2; "
        "need one prompt in a group; give them different group_ids",
    ),
    "prompts of unequal length": (
        lambda: pack_padded(*rows_of([[1, 2], [2]], [[9]] * 2, (4, 1)), 4, group_ids=[0, 0],
                            verify=False),
        "pack_padded: group 0: rows 0 and 1 have prompts of 2 and 1 tokens; need one prompt",
    ),
    "a row of padding": (
        lambda: pack_padded(torch.zeros(2, 4).long(), torch.tensor([[1] * 4, [0, 0, 1, 1]]), 2),
        "pack_padded: row 1 has no prompt; need at least one token left of prompt_width; ",
    ),
    "a gap in a prompt": (
        lambda: pack_padded(torch.zeros(1, 5).long(), torch.tensor([[1, 0, 1, 1, 0]]), 3),
        "pack_padded: row 0 has padding inside its prompt; need prompts padded on the left",
    ),
    "a prompt padded on the right": (
        lambda: pack_padded(torch.zeros(1, 5).long(), torch.tensor([[1, 1, 0, 1, 0]]), 3),
        "pack_padded: row 0 has padding inside its prompt; need prompts padded on the left",
    ),
    "a response padded on the left": (
        lambda: pack_padded(torch.zeros(1, 5).long(), torch.tensor([[1, 1, 1, 0, 1]]), 3),
        "pack_padded: row 0 has padding inside its response; need prompts padded on the left",
    ),
    "one dimension": (
        lambda: pack_padded(torch.zeros(4).long(), torch.ones(4), 2),
        "pack_padded: input_ids is an int64 tensor of shape (4,) on cpu; need [B, W] integers",
    ),
    "complex rows": (
        lambda: pack_padded(torch.zeros(1, 4).cfloat(), torch.ones(1, 4), 2),
        "pack_padded: input_ids is a complex64 tensor of shape (1, 4) on cpu; need [B, W] integers",
    ),
    "rows of a list": (
        lambda: pack_padded([[1, 2]], torch.ones(1, 2), 1),
        "pack_padded: input_ids is of type list; need a tensor; pass input_ids as one",
    ),
    "positions of one row": (
        lambda: pack_padded(torch.zeros(2, 4).long(), torch.ones(2, 4), 2,
                            position_ids=torch.arange(4)),
        "pack_padded: position_ids has shape (4,); need [..., 2, 4]; pass one position for each",
    ),
    "positions elsewhere": (
        lambda: pack([[1]], [[]], position_ids=torch.zeros(1, device="meta")),
        "pack_shared_prompts: position_ids is on meta; need cpu, as the tokens; pass posit",
    ),
    "half a column": (
        lambda: pack_padded(torch.zeros(1, 4).long(), torch.ones(1, 4), 1.5),
        "pack_padded: prompt_width is 1.5 of type float; need an integer",
    ),
    "a mask of another shape": (
        lambda: pack_padded(torch.zeros(1, 4).long(), torch.ones(1, 2), 2),
        "pack_padded: attention_mask has shape (1, 2); need (1, 4), as input_ids",
    ),
    "prompt_width": (
        lambda: pack_padded(torch.zeros(1, 4).long(), torch.ones(1, 4), 5),
        "pack_padded: prompt_width=5; need 1 to W=4",
    ),
    "too few labels": (
        lambda: pack_padded(torch.zeros(2, 4).long(), torch.ones(2, 4), 2, group_ids=[1]),
        "pack_padded: there are 1 group_ids; need 2, one for each row",
    ),
    "not depth first": (
        lambda: SharedLayout.from_forest([1, 1, 1, 1], [-1, 0, -1, 1]),
        "SharedLayout.from_forest: node 3 lies outside the subtree of its parent 1; need nodes",
    ),
    "a parent for each": (
        lambda: SharedLayout.from_forest([1, 1], [-1]),
        "SharedLayout.from_forest: there are 2 lengths and 1 parents; need one length and one",
    ),
    "half a token": (
        lambda: SharedLayout.from_lengths([(3, [1.5])]),
        "SharedLayout.from_lengths: group 0 has lengths 3 and [1.5]; need whole numbers of tokens",
    ),
    "a negative length": (
        lambda: SharedLayout.from_lengths([(3, [-1])]),
        "SharedLayout.from_lengths: group 0 has lengths 3 and [-1]; need whole numbers of tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed(what):
    call, text = MALFORMED[what]
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        call()


def test_negative_ids_that_are_no_targets():
    """Some models mark the place of an image so, and padding may hold anything."""
    assert pack([[-1, 2]], [[[3]]]).input_ids.tolist() == [-1, 2, 3]
    ids, mask = rows_of([[1, 2]], [[3]], (2, 3))
    ids[mask == 0] = -100
    assert pack_padded(ids, mask, 2).input_ids.tolist() == [1, 2, 3]
    masks = [[False, False, True]]
    assert pack_prefix_tree([[1, -100, 3]], loss_mask=masks).targets.tolist() == [3]


def test_the_host_s_tensors_are_on_the_cpu_whatever_the_default_device():
    """Many programs set it to their GPU; on the meta device nothing could be read either."""
    ids, mask = rows_of([[1, 2], [1, 2]], [[3], [4, 5]], (3, 2))
    calls = {
        "lists": lambda: pack([[1, 2], [3]], [[[4], [5, 6]], []], pad_to=9),
        "tensors": lambda: pack([ids[0]], [[ids[1], ids[1, :0]]]),
        "nothing": lambda: pack([], []),
        "rows": lambda: pack_padded(ids, mask, 3, position_ids=ids),
        "a tree": lambda: pack_prefix_tree(
            [[1, 2], ids[0]], loss_mask=[[False, True], ids[0] == 3]
        ),
        "layout": lambda: SharedLayout.from_lengths([(3, [4])]).prepare(4, 2),
    }
    for name, call in calls.items():
        want = call()
        with torch.device("meta"):
            got = call()
        tensors = got if name == "layout" else [getattr(got, f.name) for f in fields(got)]
        wanted = want if name == "layout" else [getattr(want, f.name) for f in fields(want)]
        for a, b in zip(tensors, wanted, strict=True):
            if isinstance(b, torch.Tensor):
                assert a.device.type == "cpu", name
                assert torch.equal(a, b), name
        if name != "layout":
            assert torch.equal(got.layout.nodes, want.layout.nodes)
            assert torch.equal(got.layout.tout, want.layout.tout)
            assert all(map(torch.equal, got.paths, want.paths))
