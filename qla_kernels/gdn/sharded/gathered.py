"""Links of all ranks: sent with a checksum by one gather, and folded by each rank that needs them.

A link is the map that a stretch's part of a sequence applies to a state or gradient that passes
through.
"""

import functools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qla_kernels.errors import need
from qla_kernels.gdn.sharded.context import LINKS, Facts
from qla_kernels.gdn.sharded.layouts import holder
from qla_kernels.ranks import RankError, lost_ranks_explained

# all_gather_into_tensor warns since torch 2.13, which has the new name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather(links: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges signed links; returns those of all ranks, [ranks, HV, stretches, V + K + 1, K]."""
    gathered = links.new_empty(dist.get_world_size(group), *links.shape)
    with lost_ranks_explained("cp_context", LINKS):
        _all_gather(gathered.view(-1), links.reshape(-1), group)
    return gathered


def signed(links: Sequence[Tensor], facts: Facts, passes: Sequence[tuple[int, int]]) -> Tensor:
    """Returns links, each with one more row, [HV, stretches, V + K + 1, K]; `folded` verifies it.

    The row holds a checksum.

    Args:
        links: [HV, V + K, K], of this rank's stretches.
        facts: the facts of the call.
        passes: of each link, the number of stretches that will fold it, and, if its sequence passes
            through its stretch, the number of stretches before it that the sequence has passed;
            else 0.
    """
    HV, _, K = links[0].shape
    rows = []
    for link, (sent, came) in zip(links, passes, strict=True):
        row = link.new_full((1, 1, 1), _signature(facts, sent, came)).expand(HV, 1, K)
        rows += [link, row]
    return torch.cat(rows, 1).view(HV, len(links), -1, K)


class Line(NamedTuple):
    """The stretches that a sequence passes before it enters a stretch."""

    numbers: Sequence[int]  # in that order
    onward: int  # how many stretches will fold the own link of the stretch, of the same sequence


def folded(links: Tensor, lines: Sequence[Line], V: int, facts: Facts) -> Tensor:
    """Folds the links of each line, from a state of 0, into the state that enters its stretch.

    Computes in fp64, so that torch's precision setting for fp32 products has no effect. A line that
    begins with another one goes on from that one's state. If a link's checksum is not that of this
    call, CPU tensors raise ShardError; on a GPU, where the host does not wait, results are NaN.

    Args:
        links: of all ranks, as `gather` returns them.
        lines: of this rank's stretches.

    Returns:
        [stretches, HV, V, K] in the dtype of links: states or, for links of a backward, gradients.
    """
    world, HV, _, rows, K = links.shape
    checksums = links.select(4, 0).select(3, -1).select(1, 0).unbind()  # [stretches] of each rank
    states = links.new_empty(len(lines), HV, V, K)
    wrong: Tensor | None = None
    state, done = None, list[int]()
    for which, line in sorted(enumerate(lines), key=lambda pair: len(pair[1].numbers)):
        numbers = list(line.numbers)
        if numbers[: len(done)] != done:
            state, done = None, []
        for passed in range(len(done), len(numbers)):
            rank, place = holder(numbers[passed], world)
            b, M, _ = links[rank].select(1, place).double().tensor_split((V, rows - 1), 1)
            state = b if state is None else torch.baddbmm(b, state, M)
            said = _signature(facts, len(numbers) - passed + line.onward, passed)
            foreign = checksums[rank].select(0, place) != said
            if foreign.is_cpu and foreign:
                got = f"the link of rank {rank} is not of this call"
                needs, fix = "the same calls on all ranks, in one order", f"look at rank {rank}"
                raise RankError(need("cp_context", got, needs, fix))
            wrong = foreign if wrong is None else wrong.logical_or_(foreign)
        done = numbers
        states[which] = 0 if state is None else state
    return states if wrong is None else states.masked_fill_(wrong, torch.nan)


@functools.lru_cache(maxsize=4096)
def _signature(*said: object) -> int:
    """Returns a checksum of 24 bits, which fp32 holds exactly."""
    return zlib.crc32(repr(said).encode()) >> 8
