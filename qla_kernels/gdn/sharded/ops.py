"""The torch.library operators on one rank's part of sequences.

    gdn_shard_fwd, gdn_shard_bwd   gdn_fwd and gdn_bwd, with the exchange between ranks inside

They are collective: every rank of a ShardPlace's group calls them, in the same order. A call's
cu_seqlens are the bounds on this rank, and it has no initial state. CPU tensors go to
sharded/cpu.py, CUDA tensors to sharded/launch.py.
"""

from typing import NamedTuple

from torch import Tensor

from qla_kernels.gdn.call import Call, Options, SavedForward
from qla_kernels.gdn.ops import GdnBackward, empty_gradients, state_dtype
from qla_kernels.gdn.sharded.context import Facts
from qla_kernels.gdn.sharded.layouts import Stretch, stretches
from qla_kernels.runtime.op import define_on_records, implementations
from qla_kernels.tile.constants import CHUNK


class ShardPlace(NamedTuple):
    """The place of this rank's stretches in the sequences that are cut over ranks."""

    group: str  # name of the process group
    before: list[int]  # of each stretch, as in Stretch
    after: list[int]
    front: int  # number of sequences in the first of two stretches

    def stretches(self, num_sequences: int) -> list[Stretch]:
        return stretches(self.before, self.after, self.front, num_sequences)


class Arriving(NamedTuple):
    """What a sharded backward takes beside the call: gradients, and the state that entered."""

    do: Tensor  # [1, T, HV, V]
    entered: Tensor | None  # [stretches, HV, V, K] of the forward's results


class ShardForward(NamedTuple):
    """Results of gdn_shard_fwd; fp32 is fp64 where q is fp64."""

    o: Tensor  # [1, T, HV, V] in q's dtype
    entered: Tensor | None  # [stretches, HV, V, K] fp32: `Neighbours.entering`
    g_cum: Tensor | None  # as in gdn_fwd's results
    A: Tensor | None

    def flat(self) -> tuple[Tensor | None, ...]:
        return self


def facts_of(step: str, call: Call, options: Options) -> Facts:
    """Returns the facts of a call, which are equal on all ranks and part of the links' checksums.

    step: "forward" or "backward".
    """
    sizes = tuple(call.q.shape[2:]), tuple(call.v.shape[2:])
    return step, str(call.q.dtype), *sizes, call.scale, call.A_log is None, *options


def _fake_fwd(call: Call, options: Options, shard: ShardPlace) -> ShardForward:
    q = call.q
    B, T, HV, V = call.v.shape
    wide, shape = state_dtype(q), (len(shard.before), HV, V, q.shape[-1])
    return ShardForward(
        o=q.new_empty(call.v.shape),
        entered=q.new_empty(shape, dtype=wide) if any(shard.before) else None,
        g_cum=q.new_empty(call.g.shape, dtype=wide) if options.is_train else None,
        A=q.new_empty(B, T, HV, CHUNK) if options.is_train else None,
    )


def _fake_bwd(
    call: Call, saved: SavedForward, arriving: Arriving, options: Options, shard: ShardPlace
) -> GdnBackward:
    return empty_gradients(call, saved.g_cum, None)  # ranks before this one get dh0 from links


SHARDED_HOMES = "qla_kernels.gdn.sharded.launch", "qla_kernels.gdn.sharded.cpu"
gdn_shard_fwd = define_on_records(
    "gdn_shard_fwd",
    (Call, Options, ShardPlace),
    ShardForward,
    _fake_fwd,
    *implementations("gdn_shard_fwd", *SHARDED_HOMES),
)
gdn_shard_bwd = define_on_records(
    "gdn_shard_bwd",
    (Call, SavedForward, Arriving, Options, ShardPlace),
    GdnBackward,
    _fake_bwd,
    *implementations("gdn_shard_bwd", *SHARDED_HOMES),
)
