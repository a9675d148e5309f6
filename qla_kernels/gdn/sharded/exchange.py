"""Exchanges links between ranks that hold parts of one sequence.

The forward has one all-gather, of maps of states, and so has the backward, of maps of gradients.
"""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from qla_kernels.gdn.sharded.context import Facts, folded, gather, goes_through, group_named, signed
from qla_kernels.gdn.sharded.ops import ShardPlace


class Neighbours(NamedTuple):
    """How many ranks before and after this one share a sequence with it, and the call's facts.

    Its methods exchange links with these ranks. The facts go into the links' checksums, by which
    ranks notice links of another call.
    """

    ranks: dist.ProcessGroup
    before: int  # number of ranks before this one that hold a part of its first sequence
    after: int  # number of ranks after this one that hold a part of its last sequence
    through: bool  # one sequence comes from before and continues after
    facts: Facts

    def entering(self, link: Tensor) -> Tensor | None:
        """Returns the state [HV, V, K] that enters here, or None if no sequence comes from before.

        Collective. `link` [HV, V + K, K] is the map that the last sequence here applies to a state.
        """
        received = self.before * self.through
        links = gather(signed(link, self.facts, self.after, received), self.ranks)
        here, onward = self.ranks.rank(), self.after * self.through
        ranks = range(here - self.before, here)
        return folded(links, ranks, _V(link), self.facts, onward) if ranks else None

    def leaving(self, link: Tensor) -> Tensor | None:
        """Returns the gradient [HV, V, K] of the state that leaves here, or None if none leaves.

        Collective. `link` [HV, V + K, K] is the map that the first sequence here applies to a
        gradient on its way back.
        """
        received = self.after * self.through
        links = gather(signed(link, self.facts, self.before, received), self.ranks)
        here, onward = self.ranks.rank(), self.before * self.through
        ranks = range(here + self.after, here, -1)
        return folded(links, ranks, _V(link), self.facts, onward) if ranks else None


def neighbours(shard: ShardPlace, cu_seqlens: Tensor, facts: Facts) -> Neighbours:
    """Returns the ranks around this one."""
    through = goes_through(cu_seqlens, shard.before, shard.after)
    return Neighbours(group_named(shard.group), shard.before, shard.after, through, facts)


def _V(link: Tensor) -> int:
    return link.shape[1] - link.shape[2]
