"""The sharded operators on CPU tensors.

They exchange the reference's links and run the CPU operators from the states that result.
"""

import torch
from torch import Tensor

from qla_kernels.cpu import reference
from qla_kernels.gdn import cpu
from qla_kernels.gdn.ops import state_dtype
from qla_kernels.gdn.sharded.context import goes_through
from qla_kernels.gdn.sharded.exchange import neighbours
from qla_kernels.gdn.sharded.ops import ShardForward, facts_of, without_dh0


@torch.no_grad()
def gdn_shard_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    *,
    is_train: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    warm_log_bound: float,
    group: str,
    before: int,
    after: int,
    use_qk_l2norm_in_kernel: bool = False,
) -> ShardForward:
    gdn, num = reference().gdn, len(cu_seqlens) - 1
    active_g = g if A_log is None else gdn.gate(g, A_log, dt_bias)
    active = gdn.beta_sigmoid(beta, allow_neg_eigval) if use_beta_sigmoid_in_kernel else beta
    link, through = _no_link(k, v), goes_through(cu_seqlens, before, after)
    if num:
        with torch.autocast("cpu", enabled=False):
            link = gdn.forward_link(k, v, active_g, active, cu_seqlens, through).mT
    facts = facts_of(
        "forward", q, v, scale, is_train, A_log is None, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, warm_log_bound, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    entered = neighbours(group, cu_seqlens, before, after, facts).entering(link)
    done = cpu.gdn_fwd(
        q, k, v, g, beta, scale, _alone(entered, link, num, 0), cu_seqlens, cu_seqlens_cpu,
        A_log, dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=True, output_final_state=False, output_h=False, is_train=is_train,
        auto_cp=False, enable_fwd_cp_cache=False, warm_log_bound=warm_log_bound,
    )  # fmt: skip
    return ShardForward(done.o, entered, done.g_cum, done.A)


@torch.no_grad()
def gdn_shard_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    do: Tensor,
    scale: float,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    entered: Tensor | None,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    *,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    warm_log_bound: float,
    group: str,
    before: int,
    after: int,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor | None, ...]:
    gdn, num = reference().gdn, len(cu_seqlens) - 1
    active = gdn.beta_sigmoid(beta, allow_neg_eigval) if use_beta_sigmoid_in_kernel else beta
    link, through = _no_link(k, v), goes_through(cu_seqlens, before, after)
    if num:
        with torch.autocast("cpu", enabled=False):
            link = gdn.backward_link(
                q, k, v, g_cum, active, A, do, scale, cu_seqlens, through
            ).mT  # fmt: skip
    facts = facts_of(
        "backward", q, v, scale, A_log is None, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        warm_log_bound, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    leaving = neighbours(group, cu_seqlens, before, after, facts).leaving(link)
    h0 = _alone(entered, link, num, 0)
    done = cpu.gdn_bwd(
        q, k, v, g_cum, beta, A, do, _alone(leaving, link, num, -1), scale, h0,
        cu_seqlens, cu_seqlens_cpu, g, A_log, dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=True, auto_cp=False, warm_log_bound=warm_log_bound, cp_cache=[],
    )  # fmt: skip
    return without_dh0(done)


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
