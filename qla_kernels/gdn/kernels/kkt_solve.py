"""kkt_solve -- the gated inverse A of every chunk.

Per chunk (C = 64 tokens, rows are tokens) and value head:
    L_ij    = beta_i e^{gamma_i - gamma_j} <k_i, k_j>   for i > j  [C, C]
    A       = (I + L)^-1                                           [C, C], rounded once to 16 bits
    growth  = sum log max(1, |1 - beta_i |k_i|^2|), if asked for   of 16 tokens, at the last of them
Gates are applied before solving: every exponent is <= 0, so keys of any norm stay finite under
decay.

Steps (numbers appear again in the roles), for each chunk this CTA visits with its key head:
    1 load   k of the chunk
    2 solve  K K^T, kept in registers for all value heads of the key head
      and for each of them:
    3 gates  the head's gamma, beta and decays to blocks' ends, as `gate` made them
    4 solve  growth, from the diagonal of K K^T; L to scratch, its inverse to s_a
    5 store  write A: one TMA store, or predicated rows if the chunk is a tail

Bounded by memory: 8 KB of A and 16/r KB of k (K = 128, r value heads a key head) per value head.
Why this shape: one solve is a chain of small dependent steps that leaves every unit idle, so four
CTAs share an SM and hide each other's latency; K K^T is formed once per key head; CTAs stay and
walk the chunks, since a chunk takes about as long as starting a CTA. Rows of k past a chunk's end
may hold anything: they only reach rows and columns of L that are replaced by zero. Chunks come from
a table that a kernel of this package made, so they lie inside the tensors: see tables.py.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.gated_tiles import SCRATCH_BYTES, SOURCE
from qla_kernels.gdn.kernels.chain.roles import load_role, store_role
from qla_kernels.gdn.kernels.chain.window import SOURCE as GROWTH
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import ONE, WARPGROUP_THREADS, Named, Role, Schedule, Tile
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    dtype: str  # of k and A
    K: int  # k has so many numbers or fewer: `size`


VARIANTS = tuple(Variant(dtype, K) for dtype in ("bfloat16", "float16") for K in (128, 64))

# mbarriers order everything that crosses warps here; automatic barriers would only slow it down
PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by `rows` or by the tables
}

GATES_IN = "gamma, beta, decays to blocks' ends"


def schedule(variant: Variant) -> Schedule:
    slots = {"k": 1, "gate": 4, "a": 2}
    return Schedule(
        roles=(
            Role(
                "solve",
                warps=4,
                regs=96,
                waits=("k_full", "gate_full", "a_free"),
                signals=("k_free", "gate_free", "a_full"),
                computes="k k^T; L; A = (I + L)^-1",
                uses=("wgmma", "mma"),
            ),
            load_role(32, "k", "k", tail=False, elected=ONE),
            load_role(32, GATES_IN, "gate", name="gates", tail=False, elected=ONE),
            store_role(32, "A out", "a"),
            Role("spare", warps=1, regs=32, computes="fills the warpgroup"),
        ),
        rings=slots,
        named={"solve": Named(WARPGROUP_THREADS)},
        tiles={
            "k": Tile((slots["k"], CHUNK, variant.K), variant.dtype),
            "a": Tile((slots["a"], CHUNK, CHUNK), variant.dtype, swizzled=True),
            "l": Tile((SCRATCH_BYTES // 4,), "float32"),  # scratch
            "gate": Tile((slots["gate"], 3, CHUNK), "float32"),
        },
        ctas_per_sm=4,
    )


class ChunkWalk(NamedTuple):
    """The chunks that this CTA visits with its key head: first, first + step, ..."""

    chunks: Any  # [capacity, 2] first token and rows of each chunk
    head: Any
    first: Any
    step: Any
    num_steps: Any
    group: Any  # value heads a key head

    def chunk(self, i: Any) -> Any:
        return self.first + i * self.step

    def tok0(self, i: Any) -> Any:
        return self.chunks[self.chunk(i), 0]

    def rows(self, i: Any) -> Any:
        return self.chunks[self.chunk(i), 1]


@T.macro
def load(k, s_k, ring, walk):
    num_steps = walk.num_steps
    for i in rolled(num_steps):
        tok0 = walk.tok0(i)
        ring.acquire(i)  # 1
        T.tma_copy(
            k[tok0 : tok0 + CHUNK, walk.head, 0 : s_k.shape[2]],
            s_k[ring.slot(i), :, :],
            barrier=ring.barrier(i),
        )
        if T.shuffle_elect(32):
            ring.commit(i)


@T.macro
def gates_in(gates, s_gate, ring, walk):
    num_steps = walk.num_steps
    for i in rolled(num_steps):
        for r in rolled(walk.group):
            step_i = i * walk.group + r
            ring.acquire(step_i)  # 3
            T.tma_copy(
                gates[walk.chunk(i), walk.head, r, :, :],
                s_gate[ring.slot(step_i), :, :],
                barrier=ring.barrier(step_i),
            )
            if T.shuffle_elect(32):
                ring.commit(step_i)


@T.macro
def solve(s, ring, r_kk, meet, walk, growth, grows):
    num_steps, group = walk.num_steps, walk.group
    thread = T.get_thread_binding()
    for slot, j in T.grid(ring.a.stages, CHUNK // 2):  # above the diagonal A stays zero for good
        s.a[slot, thread // 2, thread % 2 * (CHUNK // 2) + j] = 0
    for i in T.serial(num_steps):
        rows = walk.rows(i)
        ring.k.wait(i)
        T.wgmma_gemm(  # 2
            s.k[ring.k.slot(i), :, :],
            s.k[ring.k.slot(i), :, :],
            r_kk,
            transpose_B=True,
            clear_accum=True,
        )
        T.wait_wgmma(0)
        ring.k.release(i)
        for r in T.serial(group):
            step_i = i * group + r
            ring.gate.wait(step_i)
            ring.a.acquire(step_i)
            if grows != 0:
                T.call_extern(  # 4
                    "handle",
                    "qla::put_growth",
                    r_kk.data,
                    T.access_ptr(s.gate[ring.gate.slot(step_i), 1, 0], "r", CHUNK),
                    T.access_ptr(growth[walk.tok0(i), walk.head, r], "w", 1),
                    growth.shape[1] * group,
                    rows,
                )
            T.call_extern(  # 4
                "handle",
                "qla::gated_inverse",
                r_kk.data,
                T.access_ptr(s.gate[ring.gate.slot(step_i), 0, 0], "r", 3 * CHUNK),
                T.access_ptr(s.l[0], "rw", SCRATCH_BYTES // 4),
                T.access_ptr(s.a[ring.a.slot(step_i), 0, 0], "w", CHUNK * CHUNK),
                rows,
                meet.id(),
                step_i,
            )
            ring.gate.release(step_i)
            T.fence_proxy_async()  # s.a: written by threads, read by the TMA store
            ring.a.commit(step_i)


@T.macro
def store(A, s_a, ring, walk):
    num_steps, head, group = walk.num_steps, walk.head, walk.group
    lane = T.get_thread_binding() % 32
    for i in rolled(num_steps):
        tok0 = walk.tok0(i)
        rows = walk.rows(i)
        for r in rolled(group):
            step_i = i * group + r
            slot = ring.slot(step_i)
            ring.wait(step_i)
            if rows == CHUNK:  # 5
                T.tma_copy(s_a[slot, :, :], A[tok0 : tok0 + CHUNK, head, r, :])
                T.tma_store_wait(0)
            else:
                for q in rolled(T.ceildiv(rows, 4)):  # 4 rows of 8 pieces of 16 bytes
                    if q * 4 + lane // 8 < rows:
                        for e in T.vectorized(8):
                            A[tok0 + q * 4 + lane // 8, head, r, lane % 8 * 8 + e] = s_a[
                                slot, q * 4 + lane // 8, lane % 8 * 8 + e
                            ]
            ring.release(step_i)


def build(variant: Variant):
    plan = schedule(variant)
    num_tokens, num_heads, group = T.dynamic("num_tokens, num_heads, group")
    capacity, grown_tokens, size = T.dynamic("capacity, grown_tokens, size")

    @T.prim_func
    def kkt_solve(
        k: strided("k", "token head", (num_tokens, num_heads, size), variant.dtype),
        gates: T.Tensor((capacity, num_heads, group, 3, CHUNK), "float32"),
        chunks: T.Tensor((capacity, 2), "int32"),
        num_chunks: T.Tensor((1,), "int32"),
        A: T.Tensor((num_tokens, num_heads, group, CHUNK), variant.dtype),
        growth: T.Tensor((grown_tokens, num_heads, group), "float32"),
        walkers: T.int32,
        grows: T.int32,
    ):
        with T.Kernel(num_heads, walkers, threads=plan.threads) as (head, first):
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE + GROWTH)
            s, ring = tiles(plan), rings(plan)
            r_kk = T.alloc_fragment((CHUNK, CHUNK), "float32")
            await_previous()
            num_steps, step = T.alloc_var("int32"), walkers
            num_steps = T.ceildiv(num_chunks[0] - first, step)
            walk = ChunkWalk(chunks, head, first, step, num_steps, group)
            tx = T.get_thread_binding()
            if tx < plan.end("solve"):
                T.set_max_nreg(plan.role("solve").regs, 1)
                solve(s, ring, r_kk, NamedBarrier(plan, "solve"), walk, growth, grows)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    load(k, s.k, ring.k, walk)
                elif tx < plan.end("gates"):
                    gates_in(gates, s.gate, ring.gate, walk)
                elif tx < plan.end("store"):
                    store(A, s.a, ring.a, walk)

    return kkt_solve
