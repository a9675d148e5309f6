"""Makes veRL's trainers give all responses of a prompt to one rank.

Only responses on the same rank can share the computation of their prompt. veRL distributes the rows
of a batch over data-parallel ranks by length, which separates them. After `patch_trainers`, which
`verl.patch` calls, a trainer distributes the rows once more after veRL did: in whole groups (the
responses to one prompt), so that each mini-batch of each rank has about the same work. This file
does not import veRL; it is tested with veRL 0.9.1.
"""

import logging
import sys
from collections.abc import Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch

from qla_kernels.dualkv.microbatch import TOKEN_COST

TRAINERS = {
    "verl.trainer.ppo.v1.trainer_base": "PPOTrainer",  # the default
    "verl.trainer.ppo.ray_trainer": "RayPPOTrainer",  # trainer.use_v1=False
}
METHOD, DEALS, SAID = "_balance_batch", "_qla_kernels_deals", "_qla_kernels_said_dealt"

log = logging.getLogger("qla_kernels")


class Row(NamedTuple):
    """Record: the size of one row of veRL's batch, which is a prompt with one response.

    Attributes:
        group: label of the prompt; rows with equal labels have the same prompt.
        prompt: number of tokens of the prompt.
        response: number of tokens of the response.
    """

    group: str
    prompt: int
    response: int


def patch_trainers() -> None:
    """Makes veRL's trainers in this process give all responses of a prompt to one rank.

    Only responses on the same rank can share the computation of their prompt. Changes the trainer
    classes whose modules were imported before; a worker process has none. A second call does
    nothing.
    """
    for module, name in TRAINERS.items():
        home = sys.modules.get(module)
        kind = getattr(home, name, None)
        if hasattr(kind, METHOD) and not hasattr(kind, DEALS):
            setattr(kind, METHOD, _by_groups(home, getattr(kind, METHOD)))
            setattr(kind, DEALS, True)


def _by_groups(home: Any, theirs: Any) -> Any:
    """Returns a trainer's method `_balance_batch`: it calls `theirs` and then distributes groups.

    `home` is veRL's module of the trainer.
    """

    @wraps(theirs)
    def balance_batch(self: Any, batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        returned = theirs(self, batch, metrics, *args, **kwargs)
        batch = batch if returned is None else returned
        rows = rows_of(batch)
        if not rows or getattr(self, "use_prefix_grouper", False):
            return returned
        ranks = 1 + max(self.actor_rollout_wg._dispatch_info["actor"])
        settings = self.config.actor_rollout_ref
        of_step = settings.actor.ppo_mini_batch_size * settings.rollout.n
        steps = len(rows) // of_step if len(rows) % of_step == 0 else 1
        lists = deal(rows, ranks * steps)
        of_ranks = [[i for part in lists[rank::ranks] for i in part] for rank in range(ranks)]
        _say_cut(self, rows, lists, ranks)
        order = [row for of_rank in of_ranks for row in of_rank]
        batch.reorder(order if hasattr(batch, "tags") else torch.tensor(order))
        lengths = [row.prompt + row.response for row in rows]
        prefix = kwargs.get("logging_prefix", "global_seqlen")
        metrics.update(home.log_seqlen_unbalance(lengths, of_ranks, prefix))
        return returned

    return balance_batch


def rows_of(batch: Any) -> list[Row]:
    """Returns a `Row` for each row of a batch of veRL's trainers: label of its prompt, and lengths.

    Returns an empty list if the batch does not say which rows have the same prompt.

    Args:
        batch: the batch of PPOTrainer (with `tags`), or of RayPPOTrainer (with `non_tensor_batch`).
    """
    if hasattr(batch, "tags"):  # keys are {uid}_{session}_{index}
        return [
            Row(
                key if tag.get("is_padding") else key.partition("_")[0],
                int(tag["prompt_len"]),
                int(tag["response_len"]),
            )
            for key, tag in zip(batch.keys, batch.tags, strict=True)
        ]
    if "uid" not in batch.non_tensor_batch:
        return []
    mask, width = batch.batch["attention_mask"], batch.batch["responses"].shape[1]
    sizes = mask[:, :-width].sum(1).tolist(), mask[:, -width:].sum(1).tolist()
    return [
        Row(str(uid), *x) for uid, *x in zip(batch.non_tensor_batch["uid"], *sizes, strict=True)
    ]


def deal(rows: Sequence[Row], lists: int) -> list[list[int]]:
    """Distributes rows over lists, with equal numbers of rows and about equal work in each list.

    Rows with the same prompt stay in one list if possible. The costliest prompt comes first; each
    goes to the list with the least work among those with room for all of its rows. If there is
    none, its rows are split.

    Args:
        rows: label and lengths of each row; their number is a multiple of `lists`.
        lists: the number of lists: one for each mini-batch of each rank.

    Returns:
        The row numbers of each list.
    """
    groups: dict[str, list[int]] = {}
    for i, row in sorted(enumerate(rows), key=lambda x: x[1].group):  # not veRL's order by length
        groups.setdefault(row.group, []).append(i)
    dealt: list[list[int]] = [[] for _ in range(lists)]
    room, work = [len(rows) // lists] * lists, [0.0] * lists
    for group in sorted(groups.values(), key=lambda group: -_work(rows, group)):
        rest = group
        while rest:
            open_lists = [i for i in range(lists) if room[i] >= len(rest)]
            if open_lists:
                place = min(open_lists, key=work.__getitem__)
            else:
                place = max(range(lists), key=room.__getitem__)
            here, rest = rest[: room[place]], rest[room[place] :]
            dealt[place] += here
            room[place] -= len(here)
            work[place] += _work(rows, here)
    return dealt


def _work(rows: Sequence[Row], group: Sequence[int]) -> float:
    """Returns the cost of the rows of one prompt, packed, in units of a (query, key) pair.

    Later turns of an agent have longer prompts, whose tokens are for the most part responses of
    other rows and count there.
    """
    together = [rows[i] for i in group]
    prompt = min(row.prompt for row in together)
    pairs = prompt * (prompt + 1) // 2
    pairs += sum(row.prompt * row.response + row.response**2 // 2 for row in together)
    return TOKEN_COST * (prompt + sum(row.response for row in together)) + pairs


def _say_cut(trainer: Any, rows: Sequence[Row], lists: Sequence[Sequence[int]], ranks: int) -> None:
    """Logs a warning, once per trainer, if the rows of some group are in several lists."""
    groups = {row.group for row in rows}
    pieces = sum(len({rows[i].group for i in part}) for part in lists)
    if pieces > len(groups) and not getattr(trainer, SAID, False):
        log.warning(
            "shared prompts: %d groups are cut into %d pieces over ranks and mini-batches, and "
            "share less: make ppo_mini_batch_size a multiple of the %d data-parallel ranks",
            len(groups), pieces, ranks,
        )  # fmt: skip
        setattr(trainer, SAID, True)
