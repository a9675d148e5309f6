"""Defines the torch operators of calls on one device: an index, attention, and its gradients.

    vertical_slash_index   lines from the attention of one block of queries
    vertical_slash_fwd     attention under them
    vertical_slash_bwd     its gradients

They run build.py and ring.py with a single rank, so one device and many share every launch. For
selective activation checkpointing name `torch.ops.qla_kernels.vertical_slash_fwd.default`.
"""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.runtime.op import SymInt, op
from qla_kernels.sparse_ring import ring
from qla_kernels.sparse_ring.build import build
from qla_kernels.sparse_ring.layouts import StripedLayout
from qla_kernels.sparse_ring.patterns import VerticalSlash
from qla_kernels.sparse_ring.route import LOCAL
from qla_kernels.sparse_ring.shapes import BLOCK, WORD
from qla_kernels.sparse_ring.shard import Columns, shard_of

ONE_RANK = StripedLayout(1)


class Lines(NamedTuple):
    """Results of vertical_slash_index; see VSIndex."""

    v_idx: Tensor
    v_cnt: Tensor
    d_bits: Tensor
    window_recall: Tensor


class SparseForward(NamedTuple):
    """Results of vertical_slash_fwd; the last two are the rows of k and v at the verticals."""

    o: Annotated[Tensor, "like q"]
    lse: Annotated[Tensor, "[B, H, T] wide q"]
    columns_k: Annotated[Tensor, "[B, H, max_v, D] as k"]
    columns_v: Annotated[Tensor, "[B, H, max_v, D] as k"]


class SparseBackward(NamedTuple):
    """Results of vertical_slash_bwd."""

    dq: Annotated[Tensor, "like q"]
    dk: Annotated[Tensor, "like k"]
    dv: Annotated[Tensor, "like v"]


def _fake_index(
    q: Tensor, k: Tensor, seqlen: int, scale: float, recall_v: float, recall_s: float, max_v: int,
    *_: object,
) -> Lines:  # fmt: skip
    B, T, H = q.shape[:3]
    count = q.new_empty(B, H, dtype=torch.int32)
    v_idx = q.new_empty(B, H, min(max_v, T), dtype=torch.int32)
    d_bits = q.new_empty(B, H, -(-T // (BLOCK * WORD)), dtype=torch.int32)
    return Lines(v_idx, count, d_bits, count.float())


@op(fake=_fake_index)
def vertical_slash_index(
    q: Tensor,
    k: Tensor,
    seqlen: SymInt,
    scale: float,
    recall_v: float,
    recall_s: float,
    max_v: int,
    max_s: int | None,
    sink: int,
    window: int,
    estimator: str,
    kappa: int,
    gap_close: int,
) -> Lines:
    budget: Any = recall_v, recall_s, max_v, max_s, sink, window, estimator, kappa, gap_close
    return Lines(*build(q, k, VerticalSlash(*budget), ONE_RANK, seqlen, scale)[:4])


@op()
def vertical_slash_fwd(
    q: Annotated[Tensor, "[B, T, H, D]"],
    k: Tensor,
    v: Tensor,
    v_idx: Annotated[Tensor, "[B, H, max_v]"],
    v_cnt: Tensor,
    d_bits: Tensor,
    seqlen: SymInt,
    scale: float,
) -> SparseForward:
    shard = shard_of(ONE_RANK, 0, q.shape[1], seqlen, scale, (v_idx, v_cnt, d_bits))
    done = ring.forward(shard, q, LOCAL.batches(k, v))
    return SparseForward(done.o, done.lse, *done.columns)


@op()
def vertical_slash_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_idx: Tensor,
    v_cnt: Tensor,
    d_bits: Tensor,
    seqlen: SymInt,
    scale: float,
    o: Tensor,
    lse: Tensor,
    columns_k: Tensor,
    columns_v: Tensor,
    do: Tensor,
    dlse: Tensor | None,
) -> SparseBackward:
    shard = shard_of(ONE_RANK, 0, q.shape[1], seqlen, scale, (v_idx, v_cnt, d_bits))
    done = ring.RingForward(o, lse, Columns(columns_k, columns_v))
    return SparseBackward(*ring.backward(shard, LOCAL, q, k, v, done, do, dlse))
