"""The public functions `sparse_attention`, `sparse_ring_attention` and `build_index`.

Each function checks its arguments before it launches anything. The collective functions also
compare the arguments of all ranks before they send a tensor.
"""

import logging
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from qla_kernels.runtime.arguments import flag
from qla_kernels.runtime.contents import checks_contents
from qla_kernels.runtime.derivatives import refuse_forward_mode
from qla_kernels.runtime.sm90 import require
from qla_kernels.sparse_ring import ops
from qla_kernels.sparse_ring.agreement import ends_a_graph
from qla_kernels.sparse_ring.autograd import Distributed, SparseAttention
from qla_kernels.sparse_ring.build import build
from qla_kernels.sparse_ring.call import RingCall
from qla_kernels.sparse_ring.groups import RingGroups
from qla_kernels.sparse_ring.heuristics import Schedule, own_chunk_first, schedule_of
from qla_kernels.sparse_ring.heuristics import chunks_per_launch as launch_size
from qla_kernels.sparse_ring.index import VSIndex, known_index
from qla_kernels.sparse_ring.layouts import Layout, StripedLayout
from qla_kernels.sparse_ring.patterns import Pattern, VerticalSlash
from qla_kernels.sparse_ring.route import route_of
from qla_kernels.sparse_ring.validate import (
    BUILD_OP,
    OP,
    RING_OP,
    check_group,
    check_lines,
    check_tensors,
    defaults,
    refusal,
)

log = logging.getLogger(__name__)

Result = Any  # o, or a tuple: o, then the LSE, then the index, as return_* say


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | None = None,
    index: VSIndex | None = None,
    seqlen: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_index: bool = False,
) -> Result:
    """Computes causal attention under a vertical-slash mask, on one device; differentiable.

    Query head h reads key head h // (H / Hk). Each head has lines: columns, which are tokens, and
    diagonals, which are distances in blocks of 64 tokens. Token i sees token j <= i if j is a
    column of the head, or if the distance i // 64 - j // 64 is a diagonal of the head. The
    gradients use the same lines as the forward; lines are constants to autograd.

    Args:
        q: [B, T, H, D], T a multiple of 128; pad at the end, with finite numbers.
        k, v: [B, T, Hk, D], in q's dtype.
        pattern: how the lines are chosen: VerticalSlash(), FixedVerticalSlash(...) or Dense().
        index: the lines themselves, from `build_index`. Pass either pattern or index, not both.
        seqlen: tokens before the padding; T if None. Padding rows of o are 0, their LSE is -inf.
        scale: factor of the scores q k^T; D ** -0.5 if None.
        return_lse: also return the log-sum-exp of each row's scores, fp32 [B, H, T].
        return_index: also return the `VSIndex` of the lines.

    Returns:
        o [B, T, H, D] in q's dtype. With return_lse or return_index, a tuple: o, then the LSE if
        requested, then the index if requested.

    Raises:
        ValueError: arguments are malformed or do not fit together.
        Unsupported: this version cannot run the call; `sparse_ring.refusal` returns the reason.
    """
    check_tensors(OP, q, k, v)
    refuse_forward_mode(OP, q, k, v)
    T, seqlen, scale = defaults(OP, q, 1, seqlen, scale)
    check_lines(OP, q, T, seqlen, pattern, index)
    return_lse = flag(OP, "return_lse", return_lse)
    return_index = flag(OP, "return_index", return_index)
    require(refusal(q, k, v, scale=scale))
    if index is None:
        index = _local_index(q, k, pattern, seqlen, scale)
    elif checks_contents():
        index.check(OP)
    lines = index.v_idx, index.v_cnt, index.d_bits
    if q.is_cuda and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        # faster than autograd
        o, lse, *_ = ops.vertical_slash_fwd.replayed(q, k, v, *lines, seqlen, scale)
    else:
        o, lse = SparseAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, *lines, seqlen, scale, None
        )
    return _result(o, lse, index, return_lse, return_index)


@ends_a_graph
def sparse_ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: RingGroups,
    layout: Layout,
    pattern: Pattern | None = None,
    index: VSIndex | None = None,
    schedule: Schedule = "auto",
    chunks_per_launch: int | None = None,
    seqlen: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_index: bool = False,
    keep_gathered: bool = False,
) -> Result:
    """Computes `sparse_attention` for a sequence distributed over ranks; differentiable.

    Forward and backward are collective: every rank passes its own L tokens and gets the results of
    these tokens. The sequence has T = world x L tokens, where world is the number of ranks, and the
    mask is that of the whole sequence. Partial results are fp32 and each result is rounded once, so
    accuracy does not depend on the number of ranks.

    Args:
        q: [B, L, H, D], for this rank's tokens: `layout.shard` of the whole sequence.
        k, v: [B, L, Hk, D], for the same tokens, contiguous.
        group: the ranks, from `RingGroups.create`; create the group once and reuse it.
        layout: StripedLayout(world), ZigZagLayout(world) or ContiguousLayout(world).
        pattern: how the mask is chosen: VerticalSlash(), FixedVerticalSlash(...) or Dense().
        index: the mask itself, from `build_index`. Pass either pattern or index, not both.
        seqlen: tokens of the whole sequence before the padding; T if None.
        scale: factor of the scores q k^T; D ** -0.5 if None.
        schedule: how the chunks reach the other ranks; a chunk is the k and v of one rank.
            "allgather": all chunks at once. "ring": in world - 1 steps, with one new chunk per rank
            in each step. "double_ring": in every step chunks move between the ranks of a node; when
            the ranks of a node have exchanged all chunks that the node holds, each chunk moves to
            the next node. "auto": chosen from the group and the size of k and v.
        chunks_per_launch: the number of chunks that one launch reads, with the schedules ring and
            double_ring. A rank's own chunk, and a chunk that arrives from another node, has a
            launch of its own. None: enough chunks to keep the cost of merging partial results low.
        return_lse: also return the log-sum-exp of the scores of this rank's tokens, fp32 [B, H, L].
        return_index: also return the mask as a `VSIndex`, which is the same on every rank.
        keep_gathered: with the schedule allgather, save k and v of all ranks for the backward,
            which otherwise gathers k and v again. Useful with activation checkpointing, where only
            one layer at a time stores k and v of all ranks. No effect with other schedules.

    Returns:
        o [B, L, H, D] in q's dtype. With return_lse or return_index, a tuple: o, then the LSE if
        requested, then the index if requested.

    Raises:
        ValueError: arguments do not fit together, or differ between ranks; on every rank.
        Unsupported: this version cannot run the call; on every rank.
        RingError: a rank died, hangs, or makes different calls; on every other rank. The timeouts
            of the group limit the time until a lost rank is noticed. Different calls may be noticed
            some calls later, as agreement.py explains.
    """
    check_group(RING_OP, group)
    lines = (pattern, index, seqlen, scale)
    settings = (schedule, chunks_per_launch, return_lse, return_index)
    call = RingCall(
        RING_OP, q, k, v, layout, group.world, *lines, *settings, keep_gathered=keep_gathered
    )
    seqlen, scale = call.agreed(group)
    striped = isinstance(layout, StripedLayout)
    chunk = 2 * k.numel() * k.element_size()
    chosen = schedule_of(schedule, group.world, group.inner.size, group.world * chunk, striped)
    per_launch = launch_size(chunks_per_launch, q.shape[1])
    log.debug("%s: %s, up to %d chunks a launch", RING_OP, chosen, per_launch)
    route = route_of(group, chosen, per_launch)
    estimates = isinstance(pattern, VerticalSlash)
    own_first = own_chunk_first(group.world, chunk, q.numel(), estimates, route.gathers)
    # the index is built during the transfer
    batches = route.batches(k.detach(), v.detach(), own_first)
    if index is None:
        assert pattern is not None, "check_lines requires a pattern or an index"
        index = build(q, k, pattern, layout, seqlen, scale, group.whole)
    o, lse = SparseAttention.apply(  # type: ignore[no-untyped-call]
        q,
        k,
        v,
        index.v_idx,
        index.v_cnt,
        index.d_bits,
        seqlen,
        scale,
        Distributed(layout, route, batches, keep_gathered and route.gathers),
    )
    return _result(o, lse, index, return_lse, return_index)


def build_index(
    q: Tensor,
    k: Tensor,
    pattern: Pattern,
    *,
    layout: Layout | None = None,
    group: RingGroups | None = None,
    seqlen: int | None = None,
    scale: float | None = None,
) -> VSIndex:
    """Chooses the mask that a pattern gives for these q and k, and returns it as a `VSIndex`.

    The mask of a head consists of columns (keys that all later queries see) and diagonals
    (distances in blocks of 64 tokens). Pass the result to `sparse_attention` as `index`. It is
    deterministic, and a constant to autograd. With `group` and `layout` the call is collective, and
    every rank gets the same index.

    Args:
        q: [B, T, H, D] for the whole sequence, or with `group` [B, L, H, D] for this rank's tokens.
        k: [B, T, Hk, D], or with `group` [B, L, Hk, D].
        pattern: how the mask is chosen: VerticalSlash(), FixedVerticalSlash(...) or Dense().
        layout: which rank holds which tokens, such as StripedLayout(world).
        group: the ranks that share the sequence, from `RingGroups.create`.
        seqlen: tokens of the whole sequence before the padding; None for no padding.
        scale: factor of the scores q k^T; D ** -0.5 if None.

    Raises:
        ValueError: arguments are malformed, or differ between ranks; on every rank.
        Unsupported: this version cannot run the call.
        RingError: a rank is lost or makes different calls.
    """
    if group is None and layout is None:
        check_tensors(BUILD_OP, q, k, k)
        T, seqlen, scale = defaults(BUILD_OP, q, 1, seqlen, scale)
        check_lines(BUILD_OP, q, T, seqlen, pattern, None)
        require(refusal(q, k, k, scale=scale, op=BUILD_OP))
        return _local_index(q, k, pattern, seqlen, scale)
    return _index_of_ring(q, k, pattern, layout, group, seqlen, scale)


@ends_a_graph
def _index_of_ring(
    q: Tensor,
    k: Tensor,
    pattern: Pattern,
    layout: Layout | None,
    group: RingGroups | None,
    seqlen: int | None,
    scale: float | None,
) -> VSIndex:
    """Runs `build_index` for the ranks of a group; collective, and raises on every rank."""
    group = check_group(BUILD_OP, group)
    lines = (pattern, None, seqlen, scale)
    call = RingCall(BUILD_OP, q, k, k, layout, group.world, *lines, "auto", None)
    seqlen, scale = call.agreed(group)
    assert layout is not None, "check_ring requires a layout"
    return build(q, k, pattern, layout, seqlen, scale, group.whole)


def _local_index(
    q: Tensor, k: Tensor, pattern: Pattern | None, seqlen: int, scale: float
) -> VSIndex:
    """Returns the index of a pattern on one device; the arguments have been checked."""
    T = q.shape[1]
    if isinstance(pattern, VerticalSlash):
        with torch.no_grad():
            lines = ops.vertical_slash_index.replayed(q, k, seqlen, scale, *astuple(pattern))
        v_idx, v_cnt, d_bits, window_recall = lines
        return VSIndex(v_idx, v_cnt, d_bits, window_recall, T)
    assert pattern is not None, "check_lines requires a pattern or an index"
    return known_index(pattern, q.shape[0], q.shape[2], T, q.device)


def _result(o: Tensor, lse: Tensor, index: VSIndex, return_lse: bool, return_index: bool) -> Result:
    """Returns o, or a tuple of o and the requested results."""
    if not (return_lse or return_index):
        return o
    return (o, *([lse] if return_lse else []), *([index] if return_index else []))
