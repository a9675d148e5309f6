"""Shared-memory slots handed from producers to consumers and back.

Step i of either side uses slot i % stages. Its phase is i // stages, and a barrier's parity is the
phase mod 2; a producer's first pass over the slots falls through, because parity 1 of a fresh
barrier counts as passed. Both sides must count i from 0, without a gap, over the life of the CTA.

Each method returns the operation it emits; TileLang's builder places it where it is called.
"""

from typing import Any

import qla_kernels.tile.language as T


class Ring:
    """`stages` slots with one `full` and one `free` barrier each."""

    def __init__(self, full: Any, free: Any, stages: int) -> None:
        for name, barrier in (("full", full), ("free", free)):
            if tuple(barrier.shape) != (stages,):
                raise ValueError(
                    f"ring of {stages} stages: its {name} barrier has shape {list(barrier.shape)}; "
                    f"allocate [arrivals] * {stages}"
                )
        self.full, self.free, self.stages = full, free, stages

    def slot(self, i: Any) -> Any:
        return i % self.stages

    def acquire(self, i: Any) -> Any:
        """Waits, as producer, until consumers are done with the slot's previous contents."""
        return T.barrier_wait(self.free[i % self.stages], (i // self.stages + 1) % 2)

    def barrier(self, i: Any) -> Any:
        """Returns, for the producer, the barrier that TMA reports its bytes to."""
        return self.full[i % self.stages]

    def commit(self, i: Any) -> Any:
        """Arrives, as producer, when the slot is filled or its TMA loads are issued.

        Every thread that executes this arrives; under `if T.shuffle_elect(32)` that is one.
        """
        return T.barrier_arrive(self.full[i % self.stages])

    def wait(self, i: Any) -> Any:
        """Waits, as consumer, until the slot is filled."""
        return T.barrier_wait(self.full[i % self.stages], (i // self.stages) % 2)

    def release(self, i: Any) -> Any:
        """Gives the slot back, as consumer. Every thread that executes this arrives."""
        return T.barrier_arrive(self.free[i % self.stages])


class RingInTurns(Ring):
    """Slots that several consumers use in turn: consumer c has the steps c, c + consumers, ...

    A consumer that skips steps must not wait by the barriers of slots: it could take an earlier
    load of the slot that is still on its way for its own. So step i has barrier i % turns, where
    turns is a multiple of the number of consumers, and each barrier has one consumer.
    """

    def __init__(self, full: Any, free: Any, stages: int, turns: int) -> None:
        super().__init__(full, free, turns)
        if turns < stages:
            raise ValueError(f"ring of {stages} slots: {turns} turns; need {stages} or more")
        self.slots = stages

    def slot(self, i: Any) -> Any:
        return i % self.slots

    def acquire(self, i: Any) -> Any:
        """Waits until the consumer of step i - slots is done with it."""
        ahead = i + self.stages - self.slots
        return T.barrier_wait(self.free[ahead % self.stages], (ahead // self.stages + 1) % 2)
