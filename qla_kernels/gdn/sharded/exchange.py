"""Exchanges links between ranks that hold parts of one sequence.

The forward has one all-gather, of maps of states, and so has the backward, of maps of gradients.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from qla_kernels.gdn.sharded.context import Facts, group_named
from qla_kernels.gdn.sharded.gathered import folded, gather, lines, signatures, signed
from qla_kernels.gdn.sharded.layouts import Stretch
from qla_kernels.gdn.sharded.ops import ShardPlace


class Neighbours(NamedTuple):
    """This rank's stretches among those of the group, and the call's facts.

    Its methods exchange links with the ranks that share sequences with this one. The facts go into
    the links' signatures, by which ranks notice links of another call.
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
        return self._exchanged(links, reverse=False)

    def leaving(self, links: Sequence[Tensor]) -> Tensor | None:
        """Returns the gradient [stretches, HV, V, K] of the state that leaves each stretch.

        It is 0 where no sequence leaves, and None if no sequence leaves any of them. Collective.
        `links` [HV, V + K, K] are the maps that the first sequence of each stretch applies to a
        gradient on its way back.
        """
        return self._exchanged(links, reverse=True)

    def _exchanged(self, links: Sequence[Tensor], reverse: bool) -> Tensor | None:
        carried = signatures(self.facts, self.stretches, reverse)
        found = gather(signed(links, carried), self.ranks)
        passed = lines(self.facts, self.stretches, self.ranks.rank(), len(found), reverse)
        if not any(passed):
            return None
        _, both, K = links[0].shape
        return folded(found, passed, both - K)


def exchanged(links: Tensor, group: str) -> tuple[Tensor, int]:
    """Returns the links of all ranks of the group of that name, and this rank's number in it."""
    ranks = group_named(group)
    return gather(links, ranks), ranks.rank()


def neighbours(shard: ShardPlace, num_sequences: int, facts: Facts) -> Neighbours:
    """Returns this rank among those of its group."""
    return Neighbours(group_named(shard.group), shard.stretches(num_sequences), facts)
