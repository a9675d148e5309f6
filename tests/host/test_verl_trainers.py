"""veRL's trainers with `patch_trainers`, on stand-ins of both trainers and of their batches."""

import itertools
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qla_kernels.integrations import verl_trainers
from qla_kernels.integrations.verl_trainers import Row, deal

RANKS, GROUPS, N = 4, 16, 8


def cost_of(rows: list[Row], part: list[int]) -> float:
    groups: dict[str, list[int]] = {}
    for i in part:
        groups.setdefault(rows[i].group, []).append(i)
    return sum(verl_trainers._work(rows, group) for group in groups.values())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(0, 100),
)
def test_every_row_is_dealt_once_and_lists_are_equal(groups, lists, seed):
    draw = random.Random(seed)
    rows = [
        Row(f"g{i}", p, draw.randint(1, 90)) for i, (p, n) in enumerate(groups) for _ in range(n)
    ]
    rows = rows[: len(rows) // lists * lists]
    draw.shuffle(rows)
    dealt = deal(rows, lists)
    assert sorted(i for part in dealt for i in part) == list(range(len(rows)))
    assert {len(part) for part in dealt} == {len(rows) // lists}


@pytest.mark.parametrize("lists", [2, 4, 16])
def test_groups_of_one_size_stay_whole_and_work_is_balanced(lists):
    """Lengths that differ up to four times; sixteen lists have a group each."""
    draw = random.Random(0)
    rows = []
    for group in range(64 if lists < 16 else 16):
        prompt = draw.randint(1000, 4000)
        rows += [Row(f"g{group}", prompt, draw.randint(500, 2000)) for _ in range(N)]
    draw.shuffle(rows)
    dealt = deal(rows, lists)
    whole = {name: {i for i, row in enumerate(rows) if row.group == name} for name, *_ in rows}
    for part in dealt:
        names = {rows[i].group for i in part}
        assert set(part) == set().union(*(whole[name] for name in names))
        order = [rows[i].group for i in part]
        assert sum(a != b for a, b in itertools.pairwise(order)) == len(names) - 1
    costs = [cost_of(rows, part) for part in dealt]
    if lists < 16:
        assert max(costs) < 1.03 * min(costs)


def seqlen_unbalance(seqlen_list: list[int], partitions: list[list[int]], prefix: str) -> Any:
    sums = [sum(seqlen_list[i] for i in part) for part in partitions]
    return {f"{prefix}/max": max(sums)}


class OfDefault:
    """A batch of the default trainer: keys and tags."""

    def __init__(self, rows: list[Row]) -> None:
        self.keys = [f"{row.group}_{i}_0" for i, row in enumerate(rows)]
        self.tags: list[dict[str, Any]] = [
            {"prompt_len": p, "response_len": r, "seq_len": p + r} for _, p, r in rows
        ]

    def reorder(self, order: list[int]) -> None:
        assert isinstance(order, list)
        self.keys = [self.keys[i] for i in order]
        self.tags = [self.tags[i] for i in order]


class OfOld:
    """A batch of the trainer before: padded tensors and labels."""

    def __init__(self, rows: list[Row]) -> None:
        left, right = max(row.prompt for row in rows), max(row.response for row in rows)
        columns = torch.arange(left + right) - left
        mask = torch.stack([(columns >= -p) & (columns < r) for _, p, r in rows]).long()
        self.batch = {"attention_mask": mask, "responses": torch.zeros(len(rows), right)}
        self.non_tensor_batch = {"uid": [row.group for row in rows]}

    def reorder(self, order: torch.Tensor) -> None:
        self.batch = {name: x[order] for name, x in self.batch.items()}
        self.non_tensor_batch = {"uid": [self.non_tensor_batch["uid"][i] for i in order.tolist()]}


def trainer_of(returns: bool) -> type:
    class Trainer:
        def __init__(self, mini_batch: int = GROUPS // 2) -> None:
            self.config = SimpleNamespace(
                actor_rollout_ref=SimpleNamespace(
                    actor=SimpleNamespace(ppo_mini_batch_size=mini_batch),
                    rollout=SimpleNamespace(n=N),
                )
            )
            self.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1, 2, 3] * 2})

        def _balance_batch(self, batch: Any, metrics: Any, logging_prefix: str = "x") -> Any:
            """Mixes rows, as dealing by length does; the default trainer returns the batch."""
            order = list(range(GROUPS * N))
            random.Random(1).shuffle(order)
            batch.reorder(order if returns else torch.tensor(order))
            metrics["global_seqlen/max"] = 0
            return batch if returns else None

    return Trainer


@pytest.fixture
def rows():
    draw = random.Random(2)
    prompts = [draw.randint(20, 80) for _ in range(GROUPS)]
    return [Row(f"u{g}", p, draw.randint(5, 40)) for g, p in enumerate(prompts) for _ in range(N)]


@pytest.fixture(params=["verl.trainer.ppo.v1.trainer_base", "verl.trainer.ppo.ray_trainer"])
def kind(request, monkeypatch):
    default = "v1" in request.param
    trainer, name = trainer_of(default), verl_trainers.TRAINERS[request.param]
    for module in verl_trainers.TRAINERS:
        monkeypatch.delitem(sys.modules, module, raising=False)
    made = SimpleNamespace(log_seqlen_unbalance=seqlen_unbalance, **{name: trainer})
    monkeypatch.setitem(sys.modules, request.param, made)
    verl_trainers.patch_trainers()
    method = trainer._balance_batch
    verl_trainers.patch_trainers()
    assert trainer._balance_batch is method  # a repeat changes nothing
    return trainer, OfDefault if default else OfOld


def test_ranks_and_mini_batches_have_whole_groups(kind, rows, caplog):
    trainer, made = kind
    batch, metrics = made(rows), {}
    trainer()._balance_batch(batch, metrics)
    found = verl_trainers.rows_of(batch)
    assert sorted(found) == sorted(rows)
    part = len(rows) // RANKS // 2  # of a rank and mini-batch
    for start in range(0, len(rows), part):
        mine = found[start : start + part]
        assert len({row.group for row in mine}) == part // N
    assert metrics["global_seqlen/max"] > 0
    assert not caplog.messages


def test_groups_that_do_not_fit_are_named_once(kind, rows, caplog):
    """Two prompts a mini-batch and four ranks: half a group for each."""
    trainer, made = kind
    one = trainer(mini_batch=2)
    for _ in range(2):
        batch = made(rows)
        one._balance_batch(batch, {})
        assert sorted(verl_trainers.rows_of(batch)) == sorted(rows)
    (said,) = caplog.messages
    assert f"{GROUPS} groups are cut into {2 * GROUPS} pieces" in said
    assert "make ppo_mini_batch_size a multiple of the 4 data-parallel ranks" in said


def test_rows_of_padding_belong_to_no_group(rows):
    batch = OfDefault(rows[:3])
    batch.tags[2]["is_padding"] = True
    labels = [row.group for row in verl_trainers.rows_of(batch)]
    assert labels == ["u0", "u0", "u0_2_0"]


def test_batches_without_labels_are_left_alone(kind, rows):
    trainer, made = kind
    if made is OfDefault:
        return
    batch = made(rows)
    batch.non_tensor_batch = {}
    batch.reorder = lambda order: None
    before = batch.batch["attention_mask"].clone()
    trainer()._balance_batch(batch, {})
    assert torch.equal(batch.batch["attention_mask"], before)
