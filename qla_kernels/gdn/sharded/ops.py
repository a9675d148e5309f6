"""The torch.library operators on one rank's part of sequences.

    gdn_shard_fwd, gdn_shard_bwd   gdn_fwd and gdn_bwd, with the exchange between ranks inside

They are collective: every rank of a ShardPlace's group calls them, in the same order. A call's
cu_seqlens are the bounds on this rank, and it has no initial state. CUDA tensors
go to sharded/launch.py. On CPU tensors they exchange the reference's links and run the CPU
operators from the states that result.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from qla_kernels.gdn.call import Call, Incoming, Options, SavedForward
from qla_kernels.gdn.ops import GdnBackward, empty_gradients, gdn_bwd, gdn_fwd, state_dtype
from qla_kernels.gdn.sharded.context import Facts
from qla_kernels.gdn.sharded.exchange import neighbours
from qla_kernels.gdn.sharded.layouts import ShardPlace
from qla_kernels.runtime.cpu import reference
from qla_kernels.runtime.op import op
from qla_kernels.tile.constants import CHUNK


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


LAUNCHES = "qla_kernels.gdn.sharded.launch"


@op(LAUNCHES, _fake_fwd)
def gdn_shard_fwd(call: Call, options: Options, shard: ShardPlace) -> ShardForward:
    _, k, v, g, beta, *_ = call
    bounds = call.cu_seqlens
    assert bounds is not None, "a shard has bounds"
    gdn, num = reference().gdn, len(bounds) - 1
    if call.A_log is not None:
        g = gdn.gate(g, call.A_log, call.dt_bias)
    if options.use_beta_sigmoid_in_kernel:
        beta = gdn.beta_sigmoid(beta, options.allow_neg_eigval)
    line, links = neighbours(shard, num, facts_of("forward", call, options)), []
    for x in line.stretches:
        link = _no_link(k, v)
        if x.end > x.first:
            its = bounds[x.first : x.end + 1]
            link = gdn.forward_link(k, v, g, beta, its, x.through).mT
        links.append(link)
    entered = line.entering(links)
    firsts = [x.first for x in line.stretches]
    whole = call._replace(initial_state=_states_at(firsts, entered, links[0], num))
    done = gdn_fwd.on_cpu(whole, options._replace(state_v_first=True))
    return ShardForward(done.o, entered, done.g_cum, done.A)


# ranks before this one get dh0 from links
@op(LAUNCHES, lambda call, saved, *_: empty_gradients(call, saved.g_cum, None))
def gdn_shard_bwd(
    call: Call, saved: SavedForward, arriving: Arriving, options: Options, shard: ShardPlace
) -> GdnBackward:
    q, k, v, _, beta, scale, *_ = call
    bounds, do = call.cu_seqlens, arriving.do
    assert bounds is not None, "a shard has bounds"
    gdn, num = reference().gdn, len(bounds) - 1
    if options.use_beta_sigmoid_in_kernel:
        beta = gdn.beta_sigmoid(beta, options.allow_neg_eigval)
    line, links = neighbours(shard, num, facts_of("backward", call, options)), []
    for x in line.stretches:
        link = _no_link(k, v)
        if x.end > x.first:
            its = bounds[x.first : x.end + 1]
            link = gdn.backward_link(
                q, k, v, saved.g_cum, beta, saved.A, do, scale, its, x.through
            ).mT
        links.append(link)
    leaving = line.leaving(links)
    firsts, lasts = zip(*((x.first, x.end - 1) for x in line.stretches), strict=True)
    whole = call._replace(initial_state=_states_at(firsts, arriving.entered, links[0], num))
    dht = _states_at(lasts, leaving, links[0], num)
    incoming = Incoming(do, dht, output_dh0=False)
    done: GdnBackward = gdn_bwd.on_cpu(whole, saved, incoming, options._replace(state_v_first=True))
    return done


def _no_link(k: Tensor, v: Tensor) -> Tensor:
    """Returns the link of a stretch that has no sequence: zeros, [HV, V + K, K]."""
    (HV, V), K = v.shape[2:], k.shape[-1]
    return k.new_zeros(HV, V + K, K, dtype=state_dtype(k))


def _states_at(
    sequences: Sequence[int], states: Tensor | None, link: Tensor, num_sequences: int
) -> Tensor:
    """Returns `states`, if any, as those of these sequences, and 0 for all others.

    states: [stretches, HV, V, K]; the result is [num_sequences, HV, V, K].
    """
    HV, both, K = link.shape
    found = link.new_zeros(num_sequences, HV, both - K, K)
    if num_sequences and states is not None:
        found[list(sequences)] = states
    return found
