"""Exchanges links between ranks that hold parts of one sequence.

The forward has one all-gather, of maps of states, and so has the backward, of maps of gradients.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from qla_kernels.gdn.sharded.context import Facts, group_named
from qla_kernels.gdn.sharded.gathered import folded, gather, lines, signatures, signed
from qla_kernels.gdn.sharded.layouts import ShardPlace, Stretch


class Neighbours(NamedTuple):
    """The place of this rank's stretches of tokens within the group, and the facts of the call.

    The methods exchange links with the ranks that hold parts of the same sequences. Each link is
    signed with the facts, so that a rank notices a link of another call.
    """

    ranks: dist.ProcessGroup
    stretches: list[Stretch]
    facts: Facts

    def entering(self, links: Sequence[Tensor]) -> Tensor | None:
        """Returns the state [stretches, HV, V, K] that enters each stretch of this rank.

        A stretch that no sequence enters has a state of 0. Returns None if no sequence enters any
        stretch. Collective. `links` has a tensor [HV, V + K, K] for each stretch: the map that the
        last sequence of the stretch applies to a state.
        """
        return self._exchanged(links, reverse=False)

    def leaving(self, links: Sequence[Tensor]) -> Tensor | None:
        """Returns the gradient [stretches, HV, V, K] of the state that leaves each stretch.

        A stretch that no sequence leaves has a gradient of 0. Returns None if no sequence leaves
        any stretch. Collective. `links` has a tensor [HV, V + K, K] for each stretch: the map that
        the first sequence of the stretch applies to a gradient in the backward.
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
    """Gathers the links of all ranks in the group named `group`.

    Returns the links, and the number of this rank within the group.
    """
    ranks = group_named(group)
    return gather(links, ranks), ranks.rank()


def neighbours(shard: ShardPlace, num_sequences: int, facts: Facts) -> Neighbours:
    """Returns the `Neighbours` of this rank.

    Args:
        shard: the place of this rank within the group.
        num_sequences: the number of sequences with tokens on this rank.
        facts: the facts of the call, with which links are signed.
    """
    return Neighbours(group_named(shard.group), shard.stretches(num_sequences), facts)
