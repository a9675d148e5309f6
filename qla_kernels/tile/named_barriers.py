"""Named barriers: hardware barriers of a CTA at which a fixed number of threads meet.

A kernel's `Schedule` declares them by name, says how many threads meet, and deals out their ids. A
thread either meets the others, and waits for them, or only arrives. Unlike an mbarrier, a named
barrier lies in no memory, needs no initialisation, and has no phase that a thread must know.

Each method returns the operation it emits; TileLang's builder places it where it is called.
"""

from typing import Any

import qla_kernels.tile.language as T
from qla_kernels.tile.schedule import Schedule


def sync(barrier_id: Any, threads: int) -> Any:
    """Arrives at the barrier of this id, and waits until `threads` threads have arrived."""
    return T.call_extern("handle", "tl::__sync_thread_partial", barrier_id, threads)


class NamedBarrier:
    """The copies of one named barrier of a schedule, e.g. one for each warpgroup."""

    def __init__(self, schedule: Schedule, name: str) -> None:
        self.first_id = schedule.first_id(name)
        self.threads = schedule.named[name].threads

    def id(self, copy: Any = 0) -> Any:
        """Returns a copy's id, for inline CUDA, or for a macro whose argument it is."""
        return self.first_id + copy

    def sync(self, copy: Any = 0) -> Any:
        """Arrives, and waits until all of the barrier's threads have arrived."""
        return sync(self.id(copy), self.threads)

    def arrive(self, copy: Any = 0) -> Any:
        """Arrives without waiting. The waiting threads see what this thread wrote before."""
        return T.call_extern("handle", "tl::__named_barrier_arrive", self.id(copy), self.threads)
