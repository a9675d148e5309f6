"""solve_score -- all of a chunk that does not depend on V, for wide_fwd: A, P and exponentials.

Per chunk (C = 64 tokens, rows are tokens) and value head; e and d as in wide_fwd:
    L_ij  = beta_i e^{gamma_i - gamma_j} <k_i, k_j>, i > j         [C, C]
    A     = (I + L)^-1                                             [C, C], rounded once to 16 bits
    P_ij  = scale e^{gamma_i - gamma_j} <q_i, k_j>, i >= j         [C, C], rounded once to 16 bits
    the rows of a gate slot, see chain/layout.py                   [C] each, in fp32

Steps (numbers appear again in the roles), for each chunk this CTA visits with its key head:
    1 load   q and k of the chunk
    2 solve  K K^T and Q K^T, kept in registers for all value heads of the key head
      and for each of them:
    3 gates  the head's gamma, beta and decays to blocks' ends, as `gate` made them
    4 solve  A and P to staging tiles; the exponentials to memory
    5 store  write A and P: TMA stores, or predicated rows if the chunk is a tail

Bounded by memory: 16 KB of A and P, and 64/r KB of q and k (r value heads a key head), per value
head. Why this shape: as kkt_solve, with room for two CTAs on an SM. Rows of q and k past a chunk's
end may hold anything: of A, L's rows and columns there are replaced by zero; of P, they reach rows
that are not stored. Chunks come from a table that a kernel of this package made, so they lie inside
the tensors: see tables.py.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.gated_tiles import SCRATCH_BYTES, SOURCE
from qla_kernels.gdn.kernels.chain.layout import (
    BETA,
    BETA_E,
    DECAY_TO_BLOCK_END,
    GAMMA,
    GATE_ROWS,
    LAST,
    SCALE_E,
    D,
    Rows,
    slot_of,
)
from qla_kernels.gdn.kernels.chain.roles import load_role, store_role
from qla_kernels.gdn.kernels.kkt_solve import GATES_IN, ChunkWalk, gates_in
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import ONE, WARPGROUP_THREADS, Named, Role, Schedule, Tile
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    dtype: str  # of q, k, A, P
    K: int  # head size


VARIANTS = tuple(Variant(dtype, 256) for dtype in ("bfloat16", "float16"))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by `rows` or by the tables
}

CTAS_PER_SM = 2


def schedule(variant: Variant) -> Schedule:
    K, dtype = variant.K, variant.dtype
    slots = {"qk": 1, "gate": 2, "tiles": 2}
    return Schedule(
        roles=(
            Role(
                "solve",
                warps=4,
                regs=184,
                waits=("qk_full", "gate_full", "tiles_free"),
                signals=("qk_free", "gate_free", "tiles_full"),
                computes="k k^T, q k^T; L; A = (I + L)^-1; P; exponentials of gamma, beta out",
                uses=("wgmma", "mma"),
            ),
            load_role(40, "q, k", "qk", tail=False),
            load_role(40, GATES_IN, "gate", name="gates", tail=False, elected=ONE),
            store_role(40, "A and P out", "tiles"),
            Role(
                "padding", warps=1, regs=40, computes="zeros into rows of A, g_cum of no sequence"
            ),
        ),
        rings=slots,
        named={"solve": Named(WARPGROUP_THREADS)},
        tiles={
            "q": Tile((slots["qk"], CHUNK, K), dtype),
            "k": Tile((slots["qk"], CHUNK, K), dtype),
            "a": Tile((slots["tiles"], CHUNK, CHUNK), dtype, swizzled=True),
            "p": Tile((slots["tiles"], CHUNK, CHUNK), dtype, swizzled=True),
            "l": Tile((SCRATCH_BYTES // 4,), "float32"),  # scratch
            "gate": Tile((slots["gate"], 3, CHUNK), "float32"),
        },
        ctas_per_sm=CTAS_PER_SM,
    )


@T.macro
def load(inputs, ring, walk):
    num_steps = walk.num_steps
    for i in rolled(num_steps):
        ring.acquire(i)  # 1
        for rows in inputs:
            rows.copy(walk.tok0(i), ring.slot(i), ring.barrier(i))
        ring.commit(i)


@T.macro
def put_gates(s_gate, slot, out, chunk, head, r, scale):
    thread = T.get_thread_binding()
    t = thread % CHUNK
    gamma, last = s_gate[slot, GAMMA, t], s_gate[slot, GAMMA, CHUNK - 1]
    beta = s_gate[slot, BETA, t]
    if thread < CHUNK:
        out[chunk, head, r, GAMMA, t] = gamma
        out[chunk, head, r, BETA, t] = beta
        out[chunk, head, r, BETA_E, t] = beta * T.exp2(gamma)
        out[chunk, head, r, LAST, t] = T.exp2(last)
    else:
        out[chunk, head, r, DECAY_TO_BLOCK_END, t] = s_gate[slot, DECAY_TO_BLOCK_END, t]
        out[chunk, head, r, SCALE_E, t] = scale * T.exp2(gamma)
        out[chunk, head, r, D, t] = T.exp2(last - gamma)


@T.macro
def solve(s, ring, meet, walk, out, scale):
    num_steps, group = walk.num_steps, walk.group
    thread = T.get_thread_binding()
    r_kk = T.alloc_fragment((CHUNK, CHUNK), "float32")
    r_qk = T.alloc_fragment((CHUNK, CHUNK), "float32")
    for slot, j in T.grid(ring.tiles.stages, CHUNK // 2):  # above the diagonal zero for good
        s.a[slot, thread // 2, thread % 2 * (CHUNK // 2) + j] = 0
        s.p[slot, thread // 2, thread % 2 * (CHUNK // 2) + j] = 0
    for i in T.serial(num_steps):
        rows = walk.rows(i)
        ring.qk.wait(i)
        keys, queries = s.k[ring.qk.slot(i), :, :], s.q[ring.qk.slot(i), :, :]
        T.wgmma_gemm(keys, keys, r_kk, transpose_B=True, clear_accum=True)  # 2
        T.wgmma_gemm(queries, keys, r_qk, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        ring.qk.release(i)
        for r in T.serial(group):
            step_i = i * group + r
            slot = ring.tiles.slot(step_i)
            ring.gate.wait(step_i)
            ring.tiles.acquire(step_i)
            T.call_extern(  # 4
                "handle",
                "qla::gated_inverse",
                r_kk.data,
                slot_of(s.gate, ring.gate.slot(step_i)),
                T.access_ptr(s.l[0], "rw", SCRATCH_BYTES // 4),
                slot_of(s.a, slot),
                rows,
                meet.id(),
                step_i,
            )
            T.call_extern(
                "handle",
                "qla::gated_scores",
                r_qk.data,
                slot_of(s.gate, ring.gate.slot(step_i)),
                slot_of(s.p, slot),
                scale,
            )
            put_gates(s.gate, ring.gate.slot(step_i), out, walk.chunk(i), walk.head, r, scale)
            ring.gate.release(step_i)
            T.fence_proxy_async()  # the tiles: written by threads, read by the TMA stores
            ring.tiles.commit(step_i)


@T.macro
def put_tile(x, tile, slot, tok0, rows, head, r):
    lane = T.get_thread_binding() % 32
    if rows == CHUNK:  # 5
        T.tma_copy(tile[slot, :, :], x[tok0 : tok0 + CHUNK, head, r, :])
    else:
        for i in rolled(T.ceildiv(rows, 4)):  # 4 rows of 8 pieces of 16 bytes
            if i * 4 + lane // 8 < rows:
                for e in T.vectorized(8):
                    x[tok0 + i * 4 + lane // 8, head, r, lane % 8 * 8 + e] = tile[
                        slot, i * 4 + lane // 8, lane % 8 * 8 + e
                    ]


@T.macro
def store(A, P, s, ring, walk):
    num_steps = walk.num_steps
    for i in rolled(num_steps):
        tok0 = walk.tok0(i)
        rows = walk.rows(i)
        for r in rolled(walk.group):
            step_i = i * walk.group + r
            ring.wait(step_i)
            put_tile(A, s.a, ring.slot(step_i), tok0, rows, walk.head, r)
            put_tile(P, s.p, ring.slot(step_i), tok0, rows, walk.head, r)
            T.tma_store_wait(0)
            ring.release(step_i)


@T.macro
def clear_saved(A, g_cum, walk, num_chunks):
    """Writes zeros to the rows of A and g_cum behind the last chunk; the CTAs share them."""
    lane = T.get_thread_binding() % 32
    end = T.alloc_var("int32")
    end = 0
    if num_chunks > 0:
        end = walk.chunks[num_chunks - 1, 0] + walk.chunks[num_chunks - 1, 1]
    for j in rolled(T.ceildiv(A.shape[0] - end - walk.first, walk.step)):
        row = end + walk.first + j * walk.step
        for r in rolled(walk.group):
            if lane < CHUNK // 8:
                for e in T.vectorized(8):
                    A[row, walk.head, r, lane * 8 + e] = 0
            if lane == 0:
                g_cum[row, walk.head, r] = 0


def build(variant: Variant):
    plan, dtype = schedule(variant), variant.dtype
    num_tokens, num_heads, group = T.dynamic("num_tokens, num_heads, group")
    capacity = T.dynamic("capacity")
    rows, value_rows = (num_tokens, num_heads, variant.K), (num_tokens, num_heads, group)

    @T.prim_func
    def solve_score(
        q: strided("q", "token head", rows, dtype),
        k: strided("k", "token head", rows, dtype),
        gates: T.Tensor((capacity, num_heads, group, 3, CHUNK), "float32"),
        chunks: T.Tensor((capacity, 2), "int32"),
        num_chunks: T.Tensor((1,), "int32"),
        A: T.Tensor((*value_rows, CHUNK), dtype),
        P: T.Tensor((*value_rows, CHUNK), dtype),
        g_cum: T.Tensor(value_rows, "float32"),
        out: T.Tensor((capacity, num_heads, group, GATE_ROWS, CHUNK), "float32"),
        scale: T.float32,
        walkers: T.int32,
    ):
        with T.Kernel(num_heads, walkers, threads=plan.threads) as (head, first):
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            s, ring = tiles(plan), rings(plan)
            await_previous()
            num_steps, step = T.alloc_var("int32"), walkers
            num_steps = T.ceildiv(num_chunks[0] - first, step)
            walk = ChunkWalk(chunks, head, first, step, num_steps, group)
            tx = T.get_thread_binding()
            if tx < plan.end("solve"):
                T.set_max_nreg(plan.role("solve").regs, 1)
                solve(s, ring, NamedBarrier(plan, "solve"), walk, out, scale)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    load([Rows(q, (head,), s.q), Rows(k, (head,), s.k)], ring.qk, walk)
                elif tx < plan.end("gates"):
                    gates_in(gates, s.gate, ring.gate, walk)
                elif tx < plan.end("store"):
                    store(A, P, s, ring.tiles, walk)
                else:
                    clear_saved(A, g_cum, walk, num_chunks[0])

    return solve_score
