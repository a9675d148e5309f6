"""Shared memory of wide_grads, its rings and its walk, and the role `load`.

wide_grads/__init__.py states the maths and the steps, with the numbers used here.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chunk_grads.layout import DO, KEY, PANEL, QUERY, VN, Y
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.mask import clear_tail
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.ring import Ring

PART = 128  # columns of K in a pass
PART_PANELS = PART // PANEL

# A slot's tiles are numbered as in chunk_grads/layout.py: QUERY and KEY in PartTiles.qk; DO, VN and
# Y in PartTiles.tok. Those of PartTiles.state:
ENTERS, LEAVES = range(2)  # S0 and dS

# Rows of a step's sums, with one number for each token.
DOT_ROWS = 10
Y_V = 0  # <Y, v>, in a chunk's last pass only
PART_DOTS = 1  # <Q, dQi>, <K, dKi>, <K, dKu>, <K, e Y S0^T>, for each panel
PART_STATE = 9  # e^gamma_last <dS, S0>, a number a warp

# Rows of a value head's sums, likewise. Column sums take one row for each warp, which is 0 in
# columns to the right of the warp's own rows.
X_SUM_ROWS = 11
PART_X_ROWS = 0  # row sums of X: of dP0 o Q K^T and of F o K K^T
PART_E_KK = 2  # row sums of -G o E o K K^T
PART_X_COLUMNS = 3  # column sums like PART_X_ROWS


class PartTiles(NamedTuple):
    """The tiles in shared memory; a slot's tiles are numbered as above."""

    qk: Any  # [2 slots x 2, 64, PART] q, k of a pass; then dQ and dK
    tok: Any  # [2 slots x 3, 64, 64] dO, V', Y of 64 columns of V
    v: Any  # [2 slots, 64, 64] v likewise, in a chunk's last pass
    state: Any  # [2 slots x 2, 64, PART] S0^T and dS^T of 64 columns of V
    scores: Any  # [2, 64, 64] the sums of dP0 and F of a pass, in chunk_grads' tiles P and F
    gate: Any  # [slots, GATE_ROWS, 64] fp32
    dots: Any  # [slots, DOT_ROWS, 64] fp32
    x: Any  # [slots, X_SUM_ROWS, 64] fp32


class PartRings(NamedTuple):
    """The rings of wide_grads, and its named barrier.

    A pass is a chunk, key head and part of K. A step is 64 columns of V of a value head in a pass.
    """

    qk: Ring  # by pass
    rows: Ring  # by step: tok, v and state
    gate: Ring  # by value head
    scores: Ring  # by pass
    dots: Ring  # by step
    x: Ring  # by value head
    own: NamedBarrier  # a copy for the threads of each panel warpgroup and of the score warpgroup


class PartWalk(NamedTuple):
    """The passes of this CTA: all parts of K of the pairs first, first + stride, ..., of chunk and
    key head. Roles that know pairs only take a pass for one.
    """

    chunks: Any  # [capacity, 2] first token and rows of each chunk
    first: Any
    stride: Any
    num_chunks: Any  # [1]
    num_heads: Any
    group: Any  # value heads a key head
    num_tiles: Any  # tiles of 64 columns of V
    parts: int  # of K

    @property
    def num_pairs(self) -> Any:
        pairs = self.num_chunks[0] * self.num_heads
        return self.parts * T.truncdiv(pairs - self.first + self.stride - 1, self.stride)

    def _pair(self, i: Any) -> Any:
        return self.first + T.truncdiv(i, self.parts) * self.stride

    def chunk(self, i: Any) -> Any:
        return T.truncdiv(self._pair(i), self.num_heads)

    def head(self, i: Any) -> Any:
        return T.truncmod(self._pair(i), self.num_heads)

    def part(self, i: Any) -> Any:
        return T.truncmod(i, self.parts)

    def last_part(self, i: Any) -> Any:
        return self.part(i) == self.parts - 1


class PartInputs(NamedTuple):
    """The tensors that `load` reads for each step."""

    v: Any  # [T, HV, V / 64, 64]
    do: Any
    vn: Any  # [capacity, HV, V / 64, 64, 64]
    y: Any
    h: Any  # [capacity, HV, V, K]
    ds: Any


@T.macro
def fetch_keys(q, k, s, slot, tok0, head, k0, barriers, at):
    for n, x in enumerate((q, k)):
        T.tma_copy(
            x[tok0 : tok0 + CHUNK, head, k0 : k0 + PART],
            s.qk[2 * slot + n, :, :],
            barrier=barriers[at],
        )


@T.macro
def fetch_values(x, s, ring, step, chunk, tok0, hv, t, k0, with_v):
    """Loads all tiles of a step but dO."""
    slot = ring.slot(step)
    T.tma_copy(x.vn[chunk, hv, t, :, :], s.tok[3 * slot + VN, :, :], barrier=ring.barrier(step))
    T.tma_copy(x.y[chunk, hv, t, :, :], s.tok[3 * slot + Y, :, :], barrier=ring.barrier(step))
    for n, state in enumerate((x.h, x.ds)):
        T.tma_copy(
            state[chunk, hv, t * PANEL : t * PANEL + PANEL, k0 : k0 + PART],
            s.state[2 * slot + n, :, :],
            barrier=ring.barrier(step),
        )
    if with_v:  # rows past a tail's end enter no product and no result
        T.tma_copy(x.v[tok0 : tok0 + CHUNK, hv, t, :], s.v[slot, :, :], barrier=ring.barrier(step))


@T.macro
def load(q, k, x, s, ring, tail_full, walk):
    chunk, head, k0, slot = (T.alloc_var("int32") for _ in range(4))
    tok0, rows, tails, step = (T.alloc_var("int32") for _ in range(4))
    tails = 0
    step = 0
    for i in rolled(walk.num_pairs):
        chunk = walk.chunk(i)
        head = walk.head(i)
        k0 = walk.part(i) * PART
        tok0 = walk.chunks[chunk, 0]
        rows = walk.chunks[chunk, 1]
        slot = ring.qk.slot(i)
        ring.qk.acquire(i)  # 1
        if rows == CHUNK:
            fetch_keys(q, k, s, slot, tok0, head, k0, ring.qk.full, slot)
        else:  # rows past the end must not enter a product: 0 * NaN is NaN
            fetch_keys(q, k, s, slot, tok0, head, k0, tail_full, 0)
            T.barrier_arrive(tail_full[0])
            T.barrier_wait(tail_full[0], tails % 2)
            tails += 1
            clear_tail(s.qk, 2 * slot + QUERY, rows, PART)
            clear_tail(s.qk, 2 * slot + KEY, rows, PART)
            T.fence_proxy_async()  # zeros: written by threads, read by wgmma
        ring.qk.commit(i)
        for r in rolled(walk.group):
            for t in rolled(walk.num_tiles):
                hv = head * walk.group + r
                slot = ring.rows.slot(step)
                ring.rows.acquire(step)
                fetch_values(x, s, ring.rows, step, chunk, tok0, hv, t, k0, walk.last_part(i))
                if rows == CHUNK:
                    T.tma_copy(
                        x.do[tok0 : tok0 + CHUNK, hv, t, :],
                        s.tok[3 * slot + DO, :, :],
                        barrier=ring.rows.barrier(step),
                    )
                else:
                    T.tma_copy(
                        x.do[tok0 : tok0 + CHUNK, hv, t, :],
                        s.tok[3 * slot + DO, :, :],
                        barrier=tail_full[0],
                    )
                    T.barrier_arrive(tail_full[0])
                    T.barrier_wait(tail_full[0], tails % 2)
                    tails += 1
                    clear_tail(s.tok, 3 * slot + DO, rows, PANEL)
                    T.fence_proxy_async()  # zeros: written by threads, read by wgmma
                ring.rows.commit(step)
                step += 1
