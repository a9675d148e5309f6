"""Shared memory of chunk_grads, its rings and its walk, and the roles `load` and `gates`.

chunk_grads/__init__.py states the maths and the steps, with the numbers used here.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import (
    BETA,
    BETA_E,
    DECAY_TO_BLOCK_END,
    GAMMA,
    GATE_ROWS,
    LAST,
    SCALE_E,
    D,
)
from qla_kernels.tile.constants import CHUNK, LOG2E
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.mask import clear_tail
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.record import Record, Variables
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import Schedule, Tile
from qla_kernels.tile.tiles import tiles

PANEL = 64  # columns of V and of K that a panel warpgroup has

# Numbers of slots. One piece of code reads different matrices by the number of their slot.
QUERY, KEY = range(2)  # the two tiles of a turn
DO, VN, Y = range(3)  # slots of the tile `tok`; Y's slot holds dV' first
P, F = range(2)  # slots of `scores`; after a pair's last value head P's slot holds dP0

# Rows of a gate slot. Rows from FACTORS on scale the products of DO, VN and Y with a state.
# Rows are numbered as in chain/layout.py, but two of them hold other numbers.
ROW_E = BETA_E  # e, where a chain has beta e
ROW_MINUS_BETA_E = LAST  # -beta e, where a chain has e^gamma_last
FACTORS = SCALE_E

# Rows of a value head's sums, with one number for each token. Column sums take one row for each
# warp, which is 0 in columns to the right of the warp's own rows.
SUM_ROWS = 20
Y_W = 0  # <Y, W>, a row a panel
DOTS = 2  # <Q, dQi>, <K, dKi>, <K, dKu>, for each panel
X_ROWS = 8  # row sums of X: of dP0 o Q K^T and of F o K K^T
E_KK = 10  # row sums of -G o E o K K^T
STATE = 11  # e^gamma_last <dS, S0>, a number a warp
X_COLUMNS = 12  # column sums like X_ROWS


# Slots of rings. A step is a value head; in `qk`, a pair of chunk and key head.
GRAD_RINGS = {
    "qk": 1,
    "rows": 1,  # v, dO, A
    "h": 2,
    "ds": 1,
    "vn": 1,
    "y": 1,
    "dv": 1,  # v from the panel warpgroups to the store warp
    "tail": 1,
    "scores": 1,  # a step for each value head, and one more for each pair
    "gate": 2,
    "sums": 1,
}


def shared(variant: Any) -> dict[str, Tile]:
    """Returns the tiles in shared memory, with slots numbered as above."""
    K, V, dtype = variant.K, variant.V, variant.dtype
    return {
        # q, k of a pair; dS^T of its value heads; swapped in the next pair
        "turns": Tile((4, CHUNK, K), dtype, swizzled=True),
        "v": Tile((1, CHUNK, V), dtype, swizzled=True),  # v, then beta W, then dV
        # dO; V'; dV', then Y; the last two, or two more if V < K, also stage dQ and dK
        "tok": Tile((variant.tok, CHUNK, V), dtype, swizzled=True),
        "a": Tile((1, CHUNK, CHUNK), dtype, swizzled=True),
        # P; after the last value head the sums of dP0 and F
        "scores": Tile((2, CHUNK, CHUNK), dtype, swizzled=True),
        # S0^T, of alternate value heads
        "state": Tile((2 * (V // PANEL), PANEL, K), dtype, swizzled=True),
        "gate": Tile((GRAD_RINGS["gate"], GATE_ROWS, CHUNK), "float32"),
        "sums": Tile((SUM_ROWS, CHUNK), "float32"),
    }


def allocate(plan: Schedule) -> tuple[Any, Any]:
    """Returns the tiles, and the rings with the named barrier `own`.

    s.panels is the number of panels of V, which is the number of tiles of a state. The barrier has
    a copy for the threads of each panel warpgroup.
    """
    s, ring = tiles(plan), rings(plan)
    dv = Ring(ring.dv, ring.rows.free, GRAD_RINGS["dv"])
    s = Record(**vars(s), panels=s.tok.shape[2] // PANEL)
    return s, Record(**vars(ring) | {"dv": dv, "own": NamedBarrier(plan, "own")})


class ChunkWalk(NamedTuple):
    """The pairs of chunk and key head that this CTA visits: first, first + stride, ..."""

    chunks: Any  # [capacity, 2] first token and rows of each chunk
    first: Any
    stride: Any
    num_chunks: Any  # [1]
    num_heads: Any
    group: Any  # value heads a key head

    @property
    def num_pairs(self) -> Any:
        pairs = self.num_chunks[0] * self.num_heads
        return T.truncdiv(pairs - self.first + self.stride - 1, self.stride)

    def chunk(self, i: Any) -> Any:
        return T.truncdiv(self.first + i * self.stride, self.num_heads)

    def head(self, i: Any) -> Any:
        return T.truncmod(self.first + i * self.stride, self.num_heads)


PAIR = "chunk head tok0 rows"  # variables of `find_pair`


@T.macro
def find_pair(walk, i, at):
    """Sets chunk, head, tok0 and rows to what they are of pair i."""
    at["chunk"] = walk.chunk(i)
    at["head"] = walk.head(i)
    at["tok0"] = walk.chunks[at.chunk, 0]
    at["rows"] = walk.chunks[at.chunk, 1]


class GradInputs(NamedTuple):
    """The tensors that `load` reads."""

    q: Any  # [T, H, K]
    k: Any
    v: Any  # [T, H, r, V]
    do: Any
    A: Any  # [T, H, r, 64]
    h: Any  # [capacity, H, r, V, K]
    ds: "StateGradients"


@T.macro
def fetch_rows(x, s, at, r, barriers):
    tok0, head = at.tok0, at.head
    T.tma_copy(x.v[tok0 : tok0 + CHUNK, head, r, :], s.v[0, :, :], barrier=barriers[0])
    T.tma_copy(x.do[tok0 : tok0 + CHUNK, head, r, :], s.tok[DO, :, :], barrier=barriers[0])
    T.tma_copy(x.A[tok0 : tok0 + CHUNK, head, r, :], s.a[0, :, :], barrier=barriers[0])


@T.macro
def fetch_heads(x, s, turn, at, barriers):
    tok0, head, K = at.tok0, at.head, s.turns.shape[2]
    T.tma_copy(
        x.q[tok0 : tok0 + CHUNK, head, 0:K], s.turns[2 * turn + QUERY, :, :], barrier=barriers[0]
    )
    T.tma_copy(
        x.k[tok0 : tok0 + CHUNK, head, 0:K], s.turns[2 * turn + KEY, :, :], barrier=barriers[0]
    )


class StateGradients(NamedTuple):
    """Says where dstate_chain has left dS, the gradient of the state that leaves each chunk.

    With held = 0 all V rows of dS are in `ds`. With held = 1, rows 0 to 63 are elsewhere: in the
    chunk's rows of `dv` if the chunk has 64 tokens, and in tails[owner[chunk]] if it has fewer.
    """

    ds: Any  # [capacity, H, r, V - 64 held, K]
    dv: Any
    tails: Any
    owner: Any
    held: Any


@T.macro
def fetch_state(h, s, ring, at, r):
    chunk, head, step, K = at.chunk, at.head, at.step, s.state.shape[2]
    ring.acquire(step)
    for t in T.unroll(s.panels):
        T.tma_copy(
            h[chunk, head, r, t * PANEL : t * PANEL + PANEL, 0:K],
            s.state[ring.slot(step) * s.panels + t, :, :],
            barrier=ring.barrier(step),
        )
    ring.commit(step)


@T.macro
def fetch_gradient(of, s, turn, ring, at, r):
    chunk, tok0, rows, head, step = at.chunk, at.tok0, at.rows, at.head, at.step
    row, n, K = T.alloc_var("int32"), T.alloc_var("int32"), s.state.shape[2]
    for t in T.unroll(s.panels):
        row = t * PANEL - of.held * PANEL
        tile = s.turns[2 * turn + t, :, :]
        if row >= 0:
            T.tma_copy(
                of.ds[chunk, head, r, row : row + PANEL, 0:K], tile, barrier=ring.barrier(step)
            )
        elif rows == CHUNK:
            T.tma_copy(of.dv[tok0 : tok0 + CHUNK, head, r, 0:K], tile, barrier=ring.barrier(step))
        else:
            n = of.owner[chunk]
            T.tma_copy(of.tails[n, head, r, :, 0:K], tile, barrier=ring.barrier(step))
    ring.commit(step)


@T.macro
def load(x, s, ring, walk):
    K, V = s.turns.shape[2], s.v.shape[2]
    at = Variables("chunk head step tok0 rows tails")
    at["tails"] = 0
    for i in rolled(walk.num_pairs):
        find_pair(walk, i, at)
        for r in rolled(walk.group):
            at["step"] = i * walk.group + r
            fetch_state(x.h, s, ring.h, at, r)  # 1
            if at.rows == CHUNK:
                if r == 0:
                    ring.ds.acquire(at.step)  # the slot to which q and k go
                    fetch_heads(x, s, i % 2, at, ring.qk.full)
                    ring.qk.commit(i)
                ring.rows.acquire(at.step)
                fetch_rows(x, s, at, r, ring.rows.full)
            else:  # rows past the end must not enter a product: 0 * NaN is NaN
                ring.rows.acquire(at.step)
                fetch_rows(x, s, at, r, ring.tail)
                if r == 0:
                    ring.ds.acquire(at.step)
                    fetch_heads(x, s, i % 2, at, ring.tail)
                T.barrier_arrive(ring.tail[0])
                T.barrier_wait(ring.tail[0], at.tails % 2)
                at["tails"] += 1
                clear_tail(s.v, 0, at.rows, V)
                clear_tail(s.tok, DO, at.rows, V)
                clear_tail(s.a, 0, at.rows, CHUNK)
                if r == 0:
                    clear_tail(s.turns, 2 * (i % 2) + QUERY, at.rows, K)
                    clear_tail(s.turns, 2 * (i % 2) + KEY, at.rows, K)
                T.fence_proxy_async()  # zeros: written by threads, read by wgmma
                if r == 0:
                    ring.qk.commit(i)
            ring.rows.commit(at.step)
            if r == 0:
                ring.qk.acquire(i)  # q and k of the pair before are no longer in use
            else:
                ring.ds.acquire(at.step)
            fetch_gradient(x.ds, s, (i + 1) % 2, ring.ds, at, r)


@T.macro
def read_gates(g_cum, beta, r_gate, tok0, rows, head, r):
    """Reads gamma and beta of tokens 2 lane and 2 lane + 1 of a chunk into r_gate.

    Past the chunk's end gamma keeps its last value and beta is 0.
    """
    lane = T.get_thread_binding() % 32
    row, token = T.alloc_var("int32"), T.alloc_var("int32")  # in 32 bits, as sums are not
    for e in T.unroll(2):
        row = 2 * lane + e
        token = tok0 + T.min(row, rows - 1)
        r_gate[e] = g_cum[token, head, r]
        r_gate[2 + e] = T.if_then_else(row < rows, beta[token, head, r], 0)


@T.macro
def gates(g_cum, beta, s_gate, ring, walk, scale):
    lane = T.get_thread_binding() % 32
    r_gate = T.alloc_local((4,), "float32")  # of the next value head: two gamma, two beta
    gamma = T.alloc_local((2,), "float32")
    b = T.alloc_local((2,), "float32")
    step, after = T.alloc_var("int32"), T.alloc_var("int32")
    at = Variables(PAIR)
    at["chunk"] = walk.chunk(0)
    at["head"] = walk.head(0)
    if walk.num_pairs > 0:
        at["tok0"] = walk.chunks[at.chunk, 0]
        at["rows"] = walk.chunks[at.chunk, 1]
        read_gates(g_cum, beta, r_gate, at.tok0, at.rows, at.head, 0)
    for i in rolled(walk.num_pairs):
        for r in rolled(walk.group):
            step = i * walk.group + r
            slot = ring.slot(step)
            for e in T.unroll(2):
                gamma[e] = r_gate[e] * LOG2E
                b[e] = r_gate[2 + e]
            after = r + 1
            if after == walk.group:
                after = 0
                if i + 1 < walk.num_pairs:  # the last pass reads the last pair again, unused
                    at["chunk"] = walk.chunk(i + 1)
                    at["head"] = walk.head(i + 1)
                    at["tok0"] = walk.chunks[at.chunk, 0]
                    at["rows"] = walk.chunks[at.chunk, 1]
            # the values arrive while this value head is processed
            read_gates(g_cum, beta, r_gate, at.tok0, at.rows, at.head, after)
            last = T.shfl_sync(gamma[1], 31)
            end = T.shfl_sync(gamma[1], lane | 7)  # gamma of the last of 16 rows
            ring.acquire(step)  # 2
            for e in T.unroll(2):
                s_gate[slot, GAMMA, 2 * lane + e] = gamma[e]
                s_gate[slot, DECAY_TO_BLOCK_END, 2 * lane + e] = T.exp2(end - gamma[e])
                s_gate[slot, BETA, 2 * lane + e] = b[e]
                s_gate[slot, ROW_E, 2 * lane + e] = T.exp2(gamma[e])
                s_gate[slot, SCALE_E, 2 * lane + e] = scale * T.exp2(gamma[e])
                s_gate[slot, D, 2 * lane + e] = T.exp2(last - gamma[e])
                s_gate[slot, ROW_MINUS_BETA_E, 2 * lane + e] = -b[e] * T.exp2(gamma[e])
            ring.commit(step)
