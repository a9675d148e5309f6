"""Defines the torch operators of calls on one device: an index, attention, and its gradients.

    vertical_slash_index   lines from the attention of one block of queries
    vertical_slash_fwd     attention under them
    vertical_slash_bwd     its gradients

They run build.py and ring.py with a single rank, so one device and many share every launch. For
selective activation checkpointing name `torch.ops.qla_kernels.vertical_slash_fwd.default`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qla_kernels.runtime.op import define, skip_dispatcher
from qla_kernels.runtime.programs import Programs
from qla_kernels.sparse_ring import ring
from qla_kernels.sparse_ring.build import build
from qla_kernels.sparse_ring.layouts import StripedLayout
from qla_kernels.sparse_ring.patterns import VerticalSlash
from qla_kernels.sparse_ring.route import LOCAL
from qla_kernels.sparse_ring.shapes import BLOCK, WORD
from qla_kernels.sparse_ring.shard import Columns, shard_of, wide

SCHEMAS = {
    "vertical_slash_index": """(
        Tensor q, Tensor k, SymInt seqlen, float scale, float recall_v, float recall_s, int max_v,
        int? max_s, int sink, int window, str estimator, int kappa, int gap_close
    ) -> (Tensor v_idx, Tensor v_cnt, Tensor d_bits, Tensor window_recall)""",
    "vertical_slash_fwd": """(
        Tensor q, Tensor k, Tensor v, Tensor v_idx, Tensor v_cnt, Tensor d_bits, SymInt seqlen,
        float scale
    ) -> (Tensor o, Tensor lse, Tensor columns_k, Tensor columns_v)""",
    "vertical_slash_bwd": """(
        Tensor q, Tensor k, Tensor v, Tensor v_idx, Tensor v_cnt, Tensor d_bits, SymInt seqlen,
        float scale, Tensor o, Tensor lse, Tensor columns_k, Tensor columns_v, Tensor do,
        Tensor? dlse
    ) -> (Tensor dq, Tensor dk, Tensor dv)""",
}

ONE_RANK = StripedLayout(1)


def _index(q: Tensor, k: Tensor, seqlen: int, scale: float, *budget: Any) -> tuple[Tensor, ...]:
    return build(q, k, VerticalSlash(*budget), ONE_RANK, seqlen, scale)[:4]


def _fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_idx: Tensor,
    v_cnt: Tensor,
    d_bits: Tensor,
    seqlen: int,
    scale: float,
) -> tuple[Tensor, ...]:
    """Returns o, the LSE, and the rows of k and v at the verticals."""
    shard = shard_of(ONE_RANK, 0, q.shape[1], seqlen, scale, (v_idx, v_cnt, d_bits))
    done = ring.forward(shard, q, LOCAL.batches(k, v))
    return (done.o, done.lse, *done.columns)


def _bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_idx: Tensor,
    v_cnt: Tensor,
    d_bits: Tensor,
    seqlen: int,
    scale: float,
    o: Tensor,
    lse: Tensor,
    columns_k: Tensor,
    columns_v: Tensor,
    do: Tensor,
    dlse: Tensor | None,
) -> ring.RingBackward:
    """Returns dq, dk and dv."""
    shard = shard_of(ONE_RANK, 0, q.shape[1], seqlen, scale, (v_idx, v_cnt, d_bits))
    done = ring.RingForward(o, lse, Columns(columns_k, columns_v))
    return ring.backward(shard, LOCAL, q, k, v, done, do, dlse)


def _fake_index(
    q: Tensor, k: Tensor, seqlen: int, scale: float, recall_v: float, recall_s: float, max_v: int,
    *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    B, T, H = q.shape[:3]
    count = q.new_empty(B, H, dtype=torch.int32)
    v_idx = q.new_empty(B, H, min(max_v, T), dtype=torch.int32)
    d_bits = q.new_empty(B, H, -(-T // (BLOCK * WORD)), dtype=torch.int32)
    return v_idx, count, d_bits, count.float()


def _fake_fwd(q: Tensor, k: Tensor, v: Tensor, v_idx: Tensor, *_: Any) -> tuple[Tensor, ...]:
    B, T, H, D = q.shape
    lse = q.new_empty(B, H, T, dtype=wide(q))
    columns = (k.new_empty(B, H, v_idx.shape[-1], D) for _ in range(2))
    return q.new_empty(q.shape), lse, *columns


def _fake_bwd(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _defined(op: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    return define(op, SCHEMAS[op], fake, CompositeExplicitAutograd=run)


vertical_slash_index = _defined("vertical_slash_index", _index, _fake_index)
vertical_slash_fwd = _defined("vertical_slash_fwd", _fwd, _fake_fwd)
vertical_slash_bwd = _defined("vertical_slash_bwd", _bwd, _fake_bwd)


class OpResults(tuple[Tensor, ...]):
    """The results of an operator."""

    def flat(self) -> tuple[Tensor | None, ...]:
        return self

    @staticmethod
    def of_flat(*tensors: Any) -> "OpResults":
        return OpResults(tensors)


def _replayed(
    operator: Callable[..., Any], run: Callable[..., tuple[Tensor, ...]]
) -> Callable[..., OpResults]:
    """Returns the operator as this package calls it: replayed, without the dispatcher, or by it."""
    programs, direct = Programs(str(operator)), skip_dispatcher(operator, run, run)

    def call(*arguments: Any) -> OpResults:
        return programs.run(
            lambda given: OpResults(direct(*given)), (arguments,), OpResults.of_flat
        )

    return call


index = _replayed(vertical_slash_index, _index)
forward = _replayed(vertical_slash_fwd, _fwd)
backward = _replayed(vertical_slash_bwd, _bwd)
