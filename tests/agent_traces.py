"""Rollouts of an agent that calls tools and branches, made at random."""

from typing import NamedTuple

import torch
from torch import Tensor


class Turn(NamedTuple):
    """What the model wrote, and what its tool answered."""

    call: Tensor
    answer: Tensor


class Trajectory(NamedTuple):
    task: int
    prompt: Tensor
    turns: tuple[Turn, ...]


class Row(NamedTuple):
    """A sequence of a trainer; `mask` marks the response's tokens that the model wrote."""

    prompt: Tensor
    response: Tensor
    mask: Tensor


def traces(
    vocabulary: int, tasks: int = 2, depth: int = 3, branches: int = 2, seed: int = 0
) -> list[Trajectory]:
    """Returns branches ** (depth - 1) trajectories of each task.

    A task's trajectories begin with the same turn. After each turn all of them branch, so each
    shares its first turns with its neighbours, as in a search that goes on from chosen states.
    """
    drawn = torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> Tensor:
        n = int(torch.randint(least, most + 1, (), generator=drawn))
        return torch.randint(2, vocabulary, (n,), generator=drawn)

    found = []
    for task in range(tasks):
        prompt = draw(6, 12)
        paths: list[tuple[Turn, ...]] = [()]
        for level in range(depth):
            times = branches if level else 1
            paths = [(*path, Turn(draw(3, 9), draw(2, 6))) for path in paths for _ in range(times)]
        found += [Trajectory(task, prompt, path) for path in paths]
    return found


def whole_rows(trajectories: list[Trajectory]) -> list[Row]:
    """A row for each trajectory: its response has the answers of tools, which the mask excludes."""
    rows = []
    for _, prompt, turns in trajectories:
        parts = [x for turn in turns for x in turn][:-1]  # nobody reads the last answer
        marks = [torch.full_like(x, i % 2 == 0) for i, x in enumerate(parts)]
        rows.append(Row(prompt, torch.cat(parts), torch.cat(marks)))
    return rows


def turn_rows(trajectories: list[Trajectory]) -> list[Row]:
    """A row for each turn: its prompt is the dialogue so far, its response one call."""
    rows, seen = [], set()
    for task, prompt, turns in trajectories:
        for turn in turns:
            key = task, tuple(torch.cat([prompt, turn.call]).tolist())
            if key not in seen:  # turns that trajectories share are one row
                seen.add(key)
                rows.append(Row(prompt, turn.call, torch.ones_like(turn.call)))
            prompt = torch.cat([prompt, *turn])
    return rows
