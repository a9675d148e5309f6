"""The sharded operators on the GPU: as for a long sequence in segments, with one gather added.

This rank's link is folded from the maps of its segments. After the gather, the state that enters
this rank is folded from other ranks' links, and is used in place of an initial state. The backward
does the same with gradients. The host does not wait for the GPU.
"""

import torch
from torch import Tensor

from qla_kernels import device
from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.launch import activations, segments
from qla_kernels.gdn.launch.backward import chunk_grads, readable
from qla_kernels.gdn.launch.forward import fused_fwd, kkt_solve
from qla_kernels.gdn.launch.states import chains
from qla_kernels.gdn.launch.tensors import chunks_of, room_for_chunks
from qla_kernels.gdn.ops import Backward
from qla_kernels.gdn.sharded.context import (
    folded,
    gather,
    goes_through,
    group_named,
    signed,
)
from qla_kernels.gdn.sharded.ops import Forward, facts_of, without_dh0
from qla_kernels.gdn.validate import OP
from qla_kernels.sm90 import require_aligned
from qla_kernels.tile.constants import CHUNK


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
) -> Forward:
    require_aligned(OP, q=q, k=k, v=v)
    (_, T, HV, V), K, N = v.shape, q.shape[-1], len(cu_seqlens) - 1
    saved: tuple[Tensor, Tensor] | None
    facts = facts_of(
        "forward", q, v, scale, is_train, A_log is None, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, warm_log_bound, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    with device.of(q):
        o = q.new_empty(v.shape)
        beta_range = activations.beta_range(use_beta_sigmoid_in_kernel, allow_neg_eigval)
        g, beta = activations.activate(g, beta, A_log, dt_bias, beta_range)
        if not T or not N:  # no sequence on this rank; the gather still needs its part
            gather(signed(g.new_zeros(HV, V + K, K), facts, 0, 0), group_named(group))
            saved = (torch.zeros_like(g), q.new_zeros(1, T, HV, CHUNK))
            return Forward(o.zero_(), None, *(saved if is_train else (None, None)))
        shape = chunks_of(N, T, cu_seqlens_cpu), HV, K, V, device.sm_count(q.device)
        plan = gdn_plan.forward(*shape, warm_log_bound, mapped=True)
        assert plan.segment_chunks is not None, "a shard is always mapped"
        saved = None  # g_cum and A
        if is_train or not plan.kernel.solves:
            saved = (torch.empty_like(g), q.new_empty(1, T, HV, CHUNK))
        open_ends = before > 0, after > 0
        table = None if plan.kernel.solves else room_for_chunks(T, cu_seqlens)
        cut = segments.cut(g, cu_seqlens, plan.segment_chunks, *open_ends, table)
        g_read, A_read, growth = g, None, None
        if not plan.kernel.solves:
            growth = torch.empty_like(g) if plan.grows else None
            g_read, A_read = kkt_solve(k, g, beta, cu_seqlens, table, saved, growth)
        found = segments.maps(
            k,
            v,
            g_read,
            beta,
            A_read,
            None,
            cut,
            plan.warm_log_bound,
            growth,
            early=not plan.kernel.solves,
        )
        ranks, through = group_named(group), goes_through(cu_seqlens, before, after)
        here, link = ranks.rank(), _link(found.left, found, cut, after, through, reverse=False)
        links, entered = gather(signed(link, facts, after, before * through), ranks), None
        if before:
            entered = folded(links, range(here - before, here), V, facts, after * through)
        starts = segments.start_states(found, None, cut, entered)
        fused_fwd(
            q, k, v, g, beta, scale, starts, cut.bounds, o, None, saved, plan.kernel, cut.ends_of
        )
    g_cum, A = saved if is_train and saved is not None else (None, None)
    return Forward(o, entered, g_cum, A)


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
    require_aligned(OP, q=q, k=k, v=v)
    (_, T, HV, V), K, N = v.shape, q.shape[-1], len(cu_seqlens) - 1
    facts = facts_of(
        "backward", q, v, scale, A_log is None, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        warm_log_bound, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    with device.of(q):
        beta_range = activations.beta_range(use_beta_sigmoid_in_kernel, allow_neg_eigval)
        active = activations.activate_beta(beta, beta_range)
        grads = tuple(x.new_empty(x.shape) for x in (q, k, v, g_cum, g_cum))
        ranks = group_named(group)
        if not T or not N:
            gather(signed(g_cum.new_zeros(HV, V + K, K), facts, 0, 0), ranks)
            for x in grads:
                x.zero_()
        else:
            do = readable(do.to(v.dtype), flat=True)
            inputs = q, k, v, do, g_cum, active, A
            shape = chunks_of(N, T, cu_seqlens_cpu), HV, K, V, device.sm_count(q.device)
            warm_log_bound = gdn_plan.gradient_bound(warm_log_bound)
            most = gdn_plan.backward(*shape, warm_log_bound, mapped=True)
            assert most is not None, "a shard is always mapped"
            cut = segments.cut(g_cum, cu_seqlens, most, before > 0, after > 0)
            found = segments.maps(k, v, g_cum, active, A, None, cut, warm_log_bound)
            left = segments.left_gradients(
                q, k, do, g_cum, active, A, None, scale, cut, warm_log_bound
            )
            through = goes_through(cu_seqlens, before, after)
            here, link = ranks.rank(), _link(left, found, cut, before, through, reverse=True)
            links, leaving = gather(signed(link, facts, before, after * through), ranks), None
            if after:
                onward = before * through
                leaving = folded(links, range(here + after, here, -1), V, facts, onward)
            starts = segments.start_states(found, None, cut, entered)
            ends = segments.fold_gradients(left, None, found, cut, leaving)
            states = chains(inputs, starts, ends, None, scale, cut.bounds, grads[2])
            chunk_grads(inputs, states, scale, grads)
        dq, dk, dv, dg, dbeta = grads
        dg, dbeta, *parameters = activations.backward(
            g, beta, A_log, dt_bias, dg, dbeta, beta_range, cu_seqlens
        )
    return without_dh0(Backward(dq, dk, dv, dbeta, dg, None, *parameters))


def _link(
    left: Tensor,
    found: segments.Maps,
    cut: segments.Segments,
    sent: int,
    through: bool,
    reverse: bool,
) -> Tensor:
    """Returns this rank's link, [HV, V + K, K]: `segments.link`, or zeros if `sent` is 0.

    sent: the number of other ranks that fold the link.
    """
    if not sent:
        HV, V, K = left.shape[1:]
        return left.new_zeros(HV, V + K, K)
    return segments.link(left, found, cut, through, reverse)
