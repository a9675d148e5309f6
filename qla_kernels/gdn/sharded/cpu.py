"""The sharded operators on CPU tensors.

They exchange the reference's links and run the CPU operators from the states that result.
"""

import torch
from torch import Tensor

from qla_kernels.cpu import reference
from qla_kernels.gdn import cpu
from qla_kernels.gdn.call import Call, Incoming, Options, SavedForward
from qla_kernels.gdn.ops import GdnBackward, state_dtype
from qla_kernels.gdn.sharded.context import goes_through
from qla_kernels.gdn.sharded.exchange import neighbours
from qla_kernels.gdn.sharded.ops import Arriving, ShardForward, ShardPlace, facts_of


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
    link, through = _no_link(k, v), goes_through(bounds, shard.before, shard.after)
    if num:
        with torch.autocast("cpu", enabled=False):
            link = gdn.forward_link(k, v, g, beta, bounds, through).mT
    entered = neighbours(shard, bounds, facts_of("forward", call, options)).entering(link)
    whole = call._replace(initial_state=_alone(entered, link, num, 0))
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
    link, through = _no_link(k, v), goes_through(bounds, shard.before, shard.after)
    if num:
        with torch.autocast("cpu", enabled=False):
            link = gdn.backward_link(
                q, k, v, saved.g_cum, beta, saved.A, do, scale, bounds, through
            ).mT
    leaving = neighbours(shard, bounds, facts_of("backward", call, options)).leaving(link)
    whole = call._replace(initial_state=_alone(arriving.entered, link, num, 0))
    incoming = Incoming(do, _alone(leaving, link, num, -1), output_dh0=False)
    return cpu.gdn_bwd(whole, saved, incoming, options._replace(state_v_first=True))


def _no_link(k: Tensor, v: Tensor) -> Tensor:
    """Returns the link of a rank that has no sequence: zeros, [HV, V + K, K]."""
    (HV, V), K = v.shape[2:], k.shape[-1]
    return k.new_zeros(HV, V + K, K, dtype=state_dtype(k))


def _alone(state: Tensor | None, link: Tensor, num: int, n: int) -> Tensor:
    """Returns states [num, HV, V, K]: `state`, if any, for sequence n, and 0 for all others."""
    HV, both, K = link.shape
    states = link.new_zeros(num, HV, both - K, K)
    if num and state is not None:
        states[n] = state
    return states
