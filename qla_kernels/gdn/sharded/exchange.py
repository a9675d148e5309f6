"""Exchanges links between ranks that hold parts of one sequence.

The forward has one all-gather, of maps of states, and so has the backward, of maps of gradients.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from qla_kernels.gdn.sharded.context import Facts, group_named
from qla_kernels.gdn.sharded.gathered import Line, folded, gather, signed
from qla_kernels.gdn.sharded.layouts import Stretch, held_by
from qla_kernels.gdn.sharded.ops import ShardPlace


class Neighbours(NamedTuple):
    """This rank's stretches among those of the group, and the call's facts.

    Its methods exchange links with the ranks that share sequences with this one. The facts go into
    the links' checksums, by which ranks notice links of another call.
    """

    ranks: dist.ProcessGroup
    stretches: list[Stretch]
    facts: Facts

    def entering(self, links: Sequence[Tensor]) -> Tensor | None:
        """Returns the state [stretches, HV, V, K] that enters each of this rank's stretches.

        It is 0 where no sequence enters, and None if no sequence enters any of them. Collective.
        `links` [HV, V + K, K] are the maps that the last sequence of each stretch applies to a
        state.
        """
        return self._exchanged(links, [(x.before, x.after, x.through) for x in self.stretches], -1)

    def leaving(self, links: Sequence[Tensor]) -> Tensor | None:
        """Returns the gradient [stretches, HV, V, K] of the state that leaves each stretch.

        It is 0 where no sequence leaves, and None if no sequence leaves any of them. Collective.
        `links` [HV, V + K, K] are the maps that the first sequence of each stretch applies to a
        gradient on its way back.
        """
        return self._exchanged(links, [(x.after, x.before, x.through) for x in self.stretches], 1)

    def _exchanged(
        self, links: Sequence[Tensor], ways: Sequence[tuple[int, int, bool]], side: int
    ) -> Tensor | None:
        """Gathers links, and folds those that each stretch receives.

        ways: of each stretch, the number of stretches that its sequence passes before, the number
            that it passes afterwards, and whether these are the same sequence.
        side: -1 if it passes those of lower numbers before, else 1.
        """
        passes = [(onward, passed * through) for passed, onward, through in ways]
        gathered = gather(signed(links, self.facts, passes), self.ranks)
        if not any(passed for passed, _, _ in ways):
            return None
        numbers = held_by(self.ranks.rank(), len(gathered), len(ways))
        _, both, K = links[0].shape
        lines = [
            Line(range(number + side * passed, number, -side), onward * through)
            for number, (passed, onward, through) in zip(numbers, ways, strict=True)
        ]
        return folded(gathered, lines, both - K, self.facts)


def neighbours(shard: ShardPlace, num_sequences: int, facts: Facts) -> Neighbours:
    """Returns this rank among those of its group."""
    return Neighbours(group_named(shard.group), shard.stretches(num_sequences), facts)
