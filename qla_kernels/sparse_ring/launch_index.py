"""Implements the index's launches of shard.Launches for CUDA tensors.

Keys may be strided. The host reads nothing back from the device.
"""

import torch
from torch import Tensor

from qla_kernels.runtime import device, jit
from qla_kernels.runtime.sm90 import dtype_name
from qla_kernels.sparse_ring.index import VSIndex
from qla_kernels.sparse_ring.kernels import keep_best_columns as cut_kernel
from qla_kernels.sparse_ring.kernels import mark_candidates as mark_kernel
from qla_kernels.sparse_ring.kernels import select_lines as select_kernel
from qla_kernels.sparse_ring.kernels import window_lse as lse_kernel
from qla_kernels.sparse_ring.kernels import window_mass as mass_kernel
from qla_kernels.sparse_ring.kernels.window import CTA_ROWS
from qla_kernels.sparse_ring.operands import rows
from qla_kernels.sparse_ring.patterns import VerticalSlash
from qla_kernels.sparse_ring.select import Candidates, last_block, share
from qla_kernels.sparse_ring.shapes import BLOCK, OBSERVED, UNIT, WORD

NO_QUERY_LSE = 1e30  # the LSE of a padding row without a query: its attention is 0


def window_lse(q_obs: Tensor, k: Tensor, block: Tensor, last: int, scale: float) -> Tensor:
    """Launches the LSEs of the observed queries over parts of the local keys; returns them."""
    B, num, H, D = q_obs.shape
    tiles = k.shape[1] // lse_kernel.LSE_KEYS
    with device.of(k):
        q = _packed(q_obs, k.shape[2])
        parts = min(tiles, _parts(q, CTA_ROWS))
        lse = q.new_empty(parts, *q.shape[:2], dtype=torch.float32)
        variant = lse_kernel.Variant(dtype_name(k.dtype), D)
        jit.compile(lse_kernel, variant)(q, rows(k), block, lse, last, scale)
        return lse.view(parts, B, H, OBSERVED)[..., :num]


def window_mass(
    q_obs: Tensor, k: Tensor, block: Tensor, last: int, lse: Tensor, scale: float
) -> Tensor:
    """Launches the observed attention of each local key; returns it, int32 [B, H, L]."""
    B, num, H, D = q_obs.shape
    L, Hk = k.shape[1:3]
    tiles = -(-L // mass_kernel.MASS_KEYS)
    with device.of(k):
        q = _packed(q_obs, Hk)
        mass = q.new_empty(B * Hk, H // Hk, L, dtype=torch.int32)
        if num < OBSERVED:
            lse = torch.nn.functional.pad(lse, (0, OBSERVED - num), value=NO_QUERY_LSE)
        jit.compile(mass_kernel, mass_kernel.Variant(dtype_name(k.dtype), D))(
            q,
            rows(k),
            block,
            lse.view(-1, *q.shape[:2]),
            mass,
            last,
            scale,
            (1 << UNIT) / num,
            min(tiles, _parts(q, CTA_ROWS)),
        )
        return mass.view(B, H, L)


def cut(mass: Tensor, block: Tensor, T: int, pattern: VerticalSlash) -> tuple[Candidates, Tensor]:
    """Launches the choice of this rank's best columns; returns them and the blocks' masses."""
    B, H, L = mass.shape
    with device.of(mass):
        tile = mass.new_empty(B, H, L // BLOCK)
        marks = mass.new_empty(B * H, L // WORD)
        qualified = [mass.new_empty(B * H, L) for _ in range(2)]
        best = Candidates(*(mass.new_empty(B, H, min(pattern.max_v, L)) for _ in range(2)))
        jit.compile(mark_kernel, mark_kernel.Variant())(
            mass.view(B * H, L),
            block,
            tile.view(B * H, -1),
            marks,
            pattern.sink,
            pattern.kappa if pattern.estimator == "residual" else -1,
        )
        jit.compile(cut_kernel, cut_kernel.Variant())(
            mass.view(B * H, L),
            block,
            marks,
            *qualified,
            *(x.view(B * H, -1) for x in best),
            pattern.sink,
            T,
        )
        return best, tile


def select(
    candidates: Candidates, tile: Tensor, seqlen: int, T: int, pattern: VerticalSlash
) -> VSIndex:
    """Launches the choice of all lines, and returns the index."""
    B, H, blocks = tile.shape
    num = candidates.column.shape[-1]
    with device.of(tile):
        v_idx = tile.new_empty(B, H, min(pattern.max_v, T))
        v_cnt = tile.new_empty(B, H)
        d_bits = tile.new_empty(B, H, -(-blocks // WORD))
        recall = tile.new_empty(B, H, dtype=torch.float32)
        marks = tile.new_empty(B * H, T // WORD)
        column_mass, active = (tile.new_empty(B * H, blocks) for _ in range(2))
        jit.compile(select_kernel, select_kernel.Variant())(
            *(x.reshape(B * H, num).contiguous() for x in candidates),
            tile.view(B * H, blocks),
            v_idx.view(B * H, -1),
            v_cnt.view(-1),
            d_bits.view(B * H, -1),
            recall.view(-1),
            marks,
            column_mass,
            active,
            last_block(seqlen),
            share(pattern.recall_v),
            share(pattern.recall_s),
            pattern.max_v,
            blocks if pattern.max_s is None else pattern.max_s,
            pattern.sink,
            pattern.window,
            int(pattern.estimator == "residual"),
            min(pattern.gap_close, blocks),  # no hole is longer, and the kernel counts up to it
        )
        return VSIndex(v_idx, v_cnt, d_bits, recall, T)


def _packed(q_obs: Tensor, num_kv_heads: int) -> Tensor:
    """Returns the observed queries, grouped by the key head that they share, [B Hk, g 64, D].

    With fewer than 64 observed queries the rest is 0.
    """
    B, num, _, D = q_obs.shape
    if num < OBSERVED:
        q_obs = torch.nn.functional.pad(q_obs, (0, 0, 0, 0, 0, OBSERVED - num))
    by_head = torch.unflatten(q_obs, 2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    return by_head.reshape(B * num_kv_heads, -1, D).contiguous()  # reshape may return a view


def _parts(q: Tensor, of_cta: int) -> int:
    """Returns into how many parts the keys are cut: as many as fill the SMs with one CTA each.

    `of_cta` is the number of rows of q that a CTA takes.
    """
    units, num_rows, _ = q.shape
    return max(1, device.sm_count(q.device) // (units * -(-num_rows // of_cta)))
