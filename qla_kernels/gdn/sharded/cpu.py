"""The sharded operators on CPU tensors.

They exchange the reference's links and run the CPU operators from the states that result.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qla_kernels.gdn import cpu
from qla_kernels.gdn.call import Call, Incoming, Options, SavedForward
from qla_kernels.gdn.ops import GdnBackward, state_dtype
from qla_kernels.gdn.sharded.exchange import neighbours
from qla_kernels.gdn.sharded.ops import Arriving, ShardForward, ShardPlace, facts_of
from qla_kernels.runtime.cpu import reference


@torch.no_grad()
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
            with torch.autocast("cpu", enabled=False):
                its = bounds[x.first : x.end + 1]
                link = gdn.forward_link(k, v, g, beta, its, x.through).mT
        links.append(link)
    entered = line.entering(links)
    firsts = [x.first for x in line.stretches]
    whole = call._replace(initial_state=_states_at(firsts, entered, links[0], num))
    done = cpu.gdn_fwd(whole, options._replace(state_v_first=True))
    return ShardForward(done.o, entered, done.g_cum, done.A)


@torch.no_grad()
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
            with torch.autocast("cpu", enabled=False):
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
    return cpu.gdn_bwd(whole, saved, incoming, options._replace(state_v_first=True))


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
