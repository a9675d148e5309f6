"""Shared memory of wide_grads, its rings and its walk, and the role `load`.

wide_grads/__init__.py states the maths and the steps, with the numbers used here.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import GATE_ROWS
from qla_kernels.gdn.kernels.chunk_grads.layout import DO, KEY, PANEL, QUERY, VN, Y
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.mask import clear_tail
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.record import Record, Variables
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import Schedule, Tile
from qla_kernels.tile.tiles import tiles

PART = 128  # columns of K in a pass
PART_PANELS = PART // PANEL

# A slot's tiles are numbered as in chunk_grads/layout.py: QUERY and KEY in the tile `qk`; DO, VN
# and Y in `tok`. Those of `state`:
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


# Slots of rings. A pass is a chunk, key head and part of K. A step is 64 columns of V of a value
# head in a pass.
PART_RINGS = {
    "qk": 2,  # by pass
    "rows": 2,  # by step: tok, v and state
    "gate": 2,  # by value head
    "scores": 1,  # by pass
    "dots": 2,  # by step
    "x": 2,  # by value head
}


def shared(dtype: str) -> dict[str, Tile]:
    """Returns the tiles in shared memory; a slot's tiles are numbered as above."""
    slots = PART_RINGS
    return {
        "qk": Tile((2 * slots["qk"], CHUNK, PART), dtype, swizzled=True),  # of a pass; then dQ, dK
        "tok": Tile((3 * slots["rows"], CHUNK, PANEL), dtype, swizzled=True),  # dO, V', Y
        "v": Tile((slots["rows"], CHUNK, PANEL), dtype, swizzled=True),  # in a chunk's last pass
        "state": Tile((2 * slots["rows"], PANEL, PART), dtype, swizzled=True),  # S0^T and dS^T
        # the sums of dP0 and F of a pass, in chunk_grads' tiles P and F
        "scores": Tile((2, CHUNK, CHUNK), dtype, swizzled=True),
        "gate": Tile((slots["gate"], GATE_ROWS, CHUNK), "float32"),
        "dots": Tile((slots["dots"], DOT_ROWS, CHUNK), "float32"),
        "x": Tile((slots["x"], X_SUM_ROWS, CHUNK), "float32"),
    }


def allocate(plan: Schedule) -> tuple[Any, Any]:
    """Returns the tiles, and the rings with the named barrier `own`.

    The barrier has a copy for the threads of each panel warpgroup and of the score warpgroup.
    """
    return tiles(plan), Record(**vars(rings(plan)), own=NamedBarrier(plan, "own"))


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
def fetch_keys(q, k, s, at, barriers, tail):
    slot, tok0, head, k0 = at.slot, at.tok0, at.head, at.k0
    which = 0 if tail else at.slot
    for n, x in enumerate((q, k)):
        T.tma_copy(
            x[tok0 : tok0 + CHUNK, head, k0 : k0 + PART],
            s.qk[2 * slot + n, :, :],
            barrier=barriers[which],
        )


@T.macro
def fetch_values(x, s, ring, walk, i, at, hv, t):
    """Loads all tiles of a step but dO."""
    step, chunk, tok0, k0 = at.step, at.chunk, at.tok0, at.k0
    slot = ring.slot(step)
    T.tma_copy(x.vn[chunk, hv, t, :, :], s.tok[3 * slot + VN, :, :], barrier=ring.barrier(step))
    T.tma_copy(x.y[chunk, hv, t, :, :], s.tok[3 * slot + Y, :, :], barrier=ring.barrier(step))
    for n, state in enumerate((x.h, x.ds)):
        T.tma_copy(
            state[chunk, hv, t * PANEL : t * PANEL + PANEL, k0 : k0 + PART],
            s.state[2 * slot + n, :, :],
            barrier=ring.barrier(step),
        )
    if walk.last_part(i):  # rows past a tail's end enter no product and no result
        T.tma_copy(x.v[tok0 : tok0 + CHUNK, hv, t, :], s.v[slot, :, :], barrier=ring.barrier(step))


@T.macro
def load(q, k, x, s, ring, walk):
    at = Variables("chunk head k0 slot tok0 rows tails step")
    at["tails"] = 0
    at["step"] = 0
    for i in rolled(walk.num_pairs):
        at["chunk"] = walk.chunk(i)
        at["head"] = walk.head(i)
        at["k0"] = walk.part(i) * PART
        at["tok0"] = walk.chunks[at.chunk, 0]
        at["rows"] = walk.chunks[at.chunk, 1]
        at["slot"] = ring.qk.slot(i)
        ring.qk.acquire(i)  # 1
        if at.rows == CHUNK:
            fetch_keys(q, k, s, at, ring.qk.full, tail=False)
        else:  # rows past the end must not enter a product: 0 * NaN is NaN
            fetch_keys(q, k, s, at, ring.tail, tail=True)
            T.barrier_arrive(ring.tail[0])
            T.barrier_wait(ring.tail[0], at.tails % 2)
            at["tails"] += 1
            clear_tail(s.qk, 2 * at.slot + QUERY, at.rows, PART)
            clear_tail(s.qk, 2 * at.slot + KEY, at.rows, PART)
            T.fence_proxy_async()  # zeros: written by threads, read by wgmma
        ring.qk.commit(i)
        for r in rolled(walk.group):
            for t in rolled(walk.num_tiles):
                hv = at.head * walk.group + r
                at["slot"] = ring.rows.slot(at.step)
                ring.rows.acquire(at.step)
                fetch_values(x, s, ring.rows, walk, i, at, hv, t)
                if at.rows == CHUNK:
                    T.tma_copy(
                        x.do[at.tok0 : at.tok0 + CHUNK, hv, t, :],
                        s.tok[3 * at.slot + DO, :, :],
                        barrier=ring.rows.barrier(at.step),
                    )
                else:
                    T.tma_copy(
                        x.do[at.tok0 : at.tok0 + CHUNK, hv, t, :],
                        s.tok[3 * at.slot + DO, :, :],
                        barrier=ring.tail[0],
                    )
                    T.barrier_arrive(ring.tail[0])
                    T.barrier_wait(ring.tail[0], at.tails % 2)
                    at["tails"] += 1
                    clear_tail(s.tok, 3 * at.slot + DO, at.rows, PANEL)
                    T.fence_proxy_async()  # zeros: written by threads, read by wgmma
                ring.rows.commit(at.step)
                at["step"] += 1
