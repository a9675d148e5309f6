"""The backward on the GPU: statistics of rows, then queries meet their keys, then keys queries."""

import torch
from torch import Tensor

from qla_kernels import jit
from qla_kernels.attn.launch import row_stats
from qla_kernels.dualkv.heuristics import head_pack
from qla_kernels.dualkv.kernels import bwd_dkv, bwd_dq, dkv_combine
from qla_kernels.dualkv.tables import KEYS, KV_PACK, KV_ROWS, ROWS, SM_COUNT, Tables
from qla_kernels.dualkv.validate import TMA_ALIGNMENT, dtype_name


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
    deterministic: bool,  # it always is
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous, of tensors whose device is the current one."""
    num_heads, kv_heads = q.shape[1], k.shape[1]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    if not q.shape[0]:
        return dq, dk.zero_(), dv.zero_()
    do = _readable(do.to(q.dtype))
    rows = row_stats(
        o[None], do[None], lse2[None], None if dlse is None else dlse[None], base2=True
    )[0]
    pack, sizes = head_pack(num_heads, kv_heads), (dtype_name(q.dtype), q.shape[2])
    jit.compile(bwd_dq, bwd_dq.Variant(*sizes))(
        q, do, k, v, rows, tables.header, tables.item, tables.span, tables.order, dq,
        (ROWS // pack).bit_length() - 1, q_shift, scale,
    )  # fmt: skip
    splits = tables.split.shape[0]
    parts = rows.new_empty(_most_parts(tables, kv_heads), kv_heads, 2, KEYS, q.shape[2])
    jit.compile(bwd_dkv, bwd_dkv.Variant(*sizes))(
        q, do, k, v, rows, tables.header, tables.kv_item, tables.kv_order, dk, dv, parts,
        (KV_ROWS // min(pack, KV_PACK)).bit_length() - 1, q_shift, scale,
    )  # fmt: skip
    if splits:
        pieces = (-1, dkv_combine.PIECE)
        jit.compile(dkv_combine, dkv_combine.Variant(sizes[0]))(
            torch.unflatten(parts, -1, pieces),
            tables.header,
            tables.split,
            torch.unflatten(dk, -1, pieces),
            torch.unflatten(dv, -1, pieces),
        )
    return dq, dk, dv


def _most_parts(tables: Tables, kv_heads: int) -> int:
    """How many parts there may be; how many there are, only the device knows.

    A part has a quarter of an SM's share or more, unless it is its tile's last: fewer than two for
    each quarter, then. Parts are of one tile and all key heads.
    """
    if not tables.split.shape[0]:
        return 1  # never written
    return min(tables.kv_item.shape[0], 2 * 4 * (SM_COUNT + 1) // kv_heads + 1)


def _readable(x: Tensor) -> Tensor:
    """x [T, H, D] in whole 16 bytes, for TMA: a gradient comes in whatever strides it has."""
    step = TMA_ALIGNMENT // x.element_size()
    strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    whole = all(s > 0 and s % step == 0 for s in strides)
    if x.stride(-1) == 1 and whole and x.data_ptr() % TMA_ALIGNMENT == 0:
        return x
    return x.contiguous()
