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
from qla_kernels.gdn.launch.backward import chunk_grads, flat_readable
from qla_kernels.gdn.launch.forward import (
    FlatBatch,
    Outputs,
    SavedChunks,
    forward_batch,
    room_to_save,
)
from qla_kernels.gdn.launch.states import segmented_chains
from qla_kernels.gdn.launch.tensors import chunks_of
from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.gdn.sharded.exchange import neighbours
from qla_kernels.gdn.sharded.ops import ShardForward, facts_of, without_dh0
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
) -> ShardForward:
    require_aligned(OP, q=q, k=k, v=v)
    (_, T, HV, V), K, N = v.shape, q.shape[-1], len(cu_seqlens) - 1
    facts = facts_of(
        "forward", q, v, scale, is_train, A_log is None, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, warm_log_bound, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    with device.of(q):
        beta_range = activations.beta_range(use_beta_sigmoid_in_kernel, allow_neg_eigval)
        g, beta = activations.activate(g, beta, A_log, dt_bias, beta_range)
        o, saved, entered = q.new_empty(v.shape), None, None
        line = neighbours(group, cu_seqlens, before, after, facts)
        if not T or not N:  # no sequence comes here
            line.entering(g.new_zeros(HV, V + K, K))
            o.zero_()
            saved = SavedChunks(torch.zeros_like(g), q.new_zeros(1, T, HV, CHUNK))
        else:
            shape = chunks_of(N, T, cu_seqlens_cpu), HV, K, V, device.sm_count(q.device)
            plan = gdn_plan.forward(*shape, warm_log_bound, mapped=True)
            assert plan.segment_chunks is not None, "a shard is always mapped"
            if is_train or not plan.kernel.solves:
                saved = room_to_save(q, g)

            def exchange(found: segments.Maps, cut: segments.Segments) -> Tensor | None:
                nonlocal entered
                entered = line.entering(_link(found.left, found, cut, after, line.through, False))
                return entered

            forward_batch(
                FlatBatch(q, k, v, g, beta, cu_seqlens), scale, None, plan, Outputs(o, None, saved),
                open_ends=(before > 0, after > 0), exchange=exchange,
            )  # fmt: skip
    g_cum, A = saved if is_train and saved is not None else (None, None)
    return ShardForward(o, entered, g_cum, A)


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
        line = neighbours(group, cu_seqlens, before, after, facts)
        if not T or not N:
            line.leaving(g_cum.new_zeros(HV, V + K, K))
            for x in grads:
                x.zero_()
        else:
            do = flat_readable(do.to(v.dtype))
            inputs = q, k, v, do, g_cum, active, A
            shape = chunks_of(N, T, cu_seqlens_cpu), HV, K, V, device.sm_count(q.device)
            bound = gdn_plan.gradient_bound(warm_log_bound)
            most = gdn_plan.backward(*shape, bound, mapped=True)
            assert most is not None, "a shard is always mapped"
            cut = segments.cut(g_cum, cu_seqlens, most, before > 0, after > 0)

            def exchange(left: Tensor, found: segments.Maps) -> Tensor | None:
                return line.leaving(_link(left, found, cut, before, line.through, True))

            states = segmented_chains(
                inputs, None, None, None, scale, grads[2], cut, None, bound,
                entering=entered, exchange=exchange,
            )  # fmt: skip
            chunk_grads(inputs, states, scale, grads)
        dq, dk, dv, dg, dbeta = grads
        dg, dbeta, *parameters = activations.backward(
            g, beta, A_log, dt_bias, dg, dbeta, beta_range, cu_seqlens
        )
    return without_dh0(GdnBackward(dq, dk, dv, dbeta, dg, None, *parameters))


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
