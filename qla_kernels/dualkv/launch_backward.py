"""Launches the backward's kernels: row statistics, then one pass over the scores, or two."""

import torch
from torch import Tensor

from qla_kernels.attn.launch import row_stats
from qla_kernels.dualkv.heuristics import head_pack, one_pass
from qla_kernels.dualkv.kernels import bwd, bwd_dkv, bwd_dkv_wide, bwd_dq, dkv_combine, dq_cast
from qla_kernels.dualkv.shapes import KEY_TILES, KV, KV_QUERY_ROWS, QUERY_ROWS
from qla_kernels.dualkv.tables import KV_PACK, SHARES, Tables
from qla_kernels.runtime import jit
from qla_kernels.runtime.sm90 import dtype_name, readable


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor,
    dlse: Tensor | None,
    tables: Tables,
    scale: float,
    q_shift: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the backward and returns dq, dk and dv, contiguous.

    The current device must be that of the tensors. If `one_pass` of heuristics.py says so, the
    kernel bwd computes all three gradients, and dq_cast rounds dq. Otherwise bwd_dq computes dq,
    and bwd_dkv, or bwd_dkv_wide for D = 256, computes dk and dv. If the queries of a key tile were
    split over several CTAs, dkv_combine then adds their parts of dk and dv.
    """
    (num_tokens, num_heads, D), kv_heads = q.shape, k.shape[1]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    if not num_tokens:
        return dq, dk.zero_(), dv.zero_()
    do = readable(do.to(q.dtype))
    rows = row_stats(
        o[None], do[None], lse2[None], None if dlse is None else dlse[None], base2=True
    )[0]
    pack, dtype = head_pack(num_heads, kv_heads), dtype_name(q.dtype)
    parts = rows.new_empty(_most_parts(tables, kv_heads), kv_heads, 2, KEY_TILES[D][KV], D)
    inputs = (q, do, k, v, rows, tables.header)
    by_keys = (*inputs, tables.kv_item, tables.kv_order)
    numbers = ((KV_QUERY_ROWS // min(pack, KV_PACK)).bit_length() - 1, q_shift, scale)
    if one_pass(deterministic, D):
        sums = rows.new_zeros(num_heads * num_tokens, D)
        jit.compile(bwd, bwd.Variant(dtype))(*by_keys, sums, dk, dv, parts, *numbers)
        jit.compile(dq_cast, dq_cast.Variant(dtype))(
            sums.view(num_heads, num_tokens, *dq_cast.CAST_PIECES),
            torch.unflatten(dq, -1, (-1, dq_cast.CAST_PIECE)),
            scale,
        )
    else:
        jit.compile(bwd_dq, bwd_dq.Variant(dtype, D))(
            *inputs, tables.dq_item, tables.dq_span, tables.order, dq,
            (QUERY_ROWS // pack).bit_length() - 1, q_shift, scale,
        )  # fmt: skip
        by_size = bwd_dkv_wide if D == 256 else bwd_dkv
        jit.compile(by_size, by_size.Variant(dtype, D))(*by_keys, dk, dv, parts, *numbers)
    if tables.split.shape[0]:
        pieces = (-1, dkv_combine.SUM_PIECE)
        jit.compile(dkv_combine, dkv_combine.Variant(dtype, wide=D == 256))(
            torch.unflatten(parts, -1, pieces),
            tables.header,
            tables.split,
            torch.unflatten(dk, -1, pieces),
            torch.unflatten(dv, -1, pieces),
        )
    return dq, dk, dv


def _most_parts(tables: Tables, kv_heads: int) -> int:
    """Returns the most partial sums of dk and dv that there can be; only the device knows how many.

    A run, the queries of one key tile, is split into one or two stretches, and a stretch into
    max(1, round(length / share)) parts. All runs of all key heads together have at most SHARES
    shares. Without splits the result is 1: a placeholder.
    """
    splits = tables.split.shape[0]
    if not splits:
        return 1
    return min(tables.kv_item.shape[0], 2 * splits + SHARES // kv_heads)
