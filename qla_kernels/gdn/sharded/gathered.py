"""Links of all ranks: sent with signatures by one gather, and folded by each rank that needs them.

A link is the map that a stretch's part of a sequence applies to a state or gradient that passes
through. Its signature is a checksum of the call and of the stretches around it, by which a rank
notices links of another call.
"""

import functools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qla_kernels.gdn.sharded.context import LINKS, Facts
from qla_kernels.gdn.sharded.layouts import Stretch, held_by, holder
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.ranks import RankError, lost_ranks_explained

# all_gather_into_tensor warns since torch 2.13, which has the new name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather(links: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges signed links; returns those of all ranks, [ranks, HV, stretches, V + K + 1, K]."""
    gathered = links.new_empty(dist.get_world_size(group), *links.shape)
    with lost_ranks_explained("cp_context", LINKS):
        _all_gather(gathered.view(-1), links.reshape(-1), group)
    return gathered


class Passed(NamedTuple):
    """A stretch that a sequence has passed, by where its link lies among those of all ranks."""

    rank: int
    place: int  # which of the rank's stretches it is
    signature: int  # what the link must carry


class Way(NamedTuple):
    """How a sequence passes a stretch, of this rank, in the direction of a pass."""

    passed: int  # the number of stretches that it has passed before
    onward: int  # the number that the stretch's other sequence, or the same one, goes on to
    through: bool  # these are the same sequence

    @staticmethod
    def of(stretch: Stretch, reverse: bool) -> "Way":
        before, after = stretch.before, stretch.after
        return Way(*((after, before) if reverse else (before, after)), stretch.through)


def signatures(facts: Facts, stretches: Sequence[Stretch], reverse: bool) -> list[int]:
    """Returns what the links of this rank's stretches carry, so that others know whose they are."""
    ways = (Way.of(x, reverse) for x in stretches)
    return [_signature(facts, way.onward, way.passed * way.through) for way in ways]


def lines(
    facts: Facts, stretches: Sequence[Stretch], rank: int, world: int, reverse: bool
) -> list[list[Passed]]:
    """Returns what the sequence that enters each of a rank's stretches has passed, in that order.

    In reverse, it is the gradient of a state that leaves the stretch.
    """
    side, found = 1 if reverse else -1, list[list[Passed]]()
    numbers = held_by(rank, world, len(stretches))
    for number, stretch in zip(numbers, stretches, strict=True):
        passed, onward, through = Way.of(stretch, reverse)
        line = []
        for done, other in enumerate(range(number + side * passed, number, -side)):
            left = passed - done + onward * through  # stretches that fold this link
            line.append(Passed(*holder(other, world), _signature(facts, left, done)))
        found.append(line)
    return found


def signed(links: Sequence[Tensor], carried: Sequence[int]) -> Tensor:
    """Returns links [HV, V + K, K] as they are sent, [HV, stretches, V + K + 1, K].

    Each has one more row, which holds its signature.
    """
    HV, _, K = links[0].shape
    rows = []
    for link, signature in zip(links, carried, strict=True):
        rows += [link, link.new_full((1, 1, 1), signature).expand(HV, 1, K)]
    return torch.cat(rows, 1).view(HV, len(links), -1, K)


def folded(links: Tensor, lines: Sequence[Sequence[Passed]], V: int) -> Tensor:
    """Folds the links of each line, from a state of 0, into the state that enters its stretch.

    Computes in fp64, so that torch's precision setting for fp32 products has no effect. A line that
    begins with another one goes on from that one's state. If a link's signature is not the one that
    is expected, CPU tensors raise ShardError; on a GPU, where the host does not wait, results are
    NaN.

    Args:
        links: of all ranks, as `gather` returns them.
        lines: of this rank's stretches.

    Returns:
        [stretches, HV, V, K] in the dtype of links: states or, for links of a backward, gradients.
    """
    _, HV, _, rows, K = links.shape
    said = links.select(4, 0).select(3, -1).select(1, 0)  # [ranks, stretches]
    states = links.new_empty(len(lines), HV, V, K)
    wrong: Tensor | None = None
    state, done = None, list[Passed]()
    for which, line in sorted(enumerate(lines), key=lambda pair: len(pair[1])):
        if list(line[: len(done)]) != done:
            state, done = None, []
        for rank, place, signature in line[len(done) :]:
            b, M, _ = links[rank].select(1, place).double().tensor_split((V, rows - 1), 1)
            state = b if state is None else torch.baddbmm(b, state, M)
            foreign = said[rank, place] != signature
            if foreign.is_cpu and foreign:
                got = f"the link of rank {rank} is not of this call"
                needs, fix = "the same calls on all ranks, in one order", f"look at rank {rank}"
                raise RankError(need("cp_context", got, needs, fix))
            wrong = foreign if wrong is None else wrong.logical_or_(foreign)
        done = list(line)
        states[which] = 0 if state is None else state
    return states if wrong is None else states.masked_fill_(wrong, torch.nan)


@functools.lru_cache(maxsize=4096)
def _signature(*said: object) -> int:
    """Returns a checksum of 24 bits, which fp32 holds exactly."""
    return zlib.crc32(repr(said).encode()) >> 8
