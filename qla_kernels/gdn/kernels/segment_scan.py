"""segment_scan -- the state that enters each segment, from the b and M of segment_map.

One CTA per sequence, value head and 16 or 32 columns of V. The first segment starts from h0 or 0.
If the segment before another one is warm or first, `states` already has the state that enters. If
the segment before it, p, is cold, `states` has b_p, and this kernel computes
    S_{p+1} = M_p S_p + b_p                                                    [K, columns]
In reverse it computes the gradient of the state that leaves each segment, from the b' of
segment_map_bwd: the last segment ends in dht or 0, and dS_{p-1} = M_p^T dS_p + b'_p.

`states` are transposed, [V, K], in fp32. M and S are each a sum of two terms of 16 bits, because
errors of a single rounding to 16 bits would add up over segments. The terms of S lie side by side,
so that each term of M is read once for both.

Steps (numbers appear again in the roles):
    1 load    M of a cold segment, and b
    2 fold    M S; meanwhile S to its staging tile, and b to registers
    3 fold    M S + b in two terms, for both warpgroups
    4 store   S

Bounded by latency, and by the bandwidth of shared memory, from which every warpgroup reads each
term of M and of S. Why this shape: only cold segments take a product, and the products of one head
depend on one another. The flags of cold segments are read 32 at a time, one by each lane. M and b
of the next cold segment are loaded while the one before is folded. A warpgroup computes 64 rows of
the result and needs all rows of S, which it gets by way of shared memory. S and b in fp32 pass
through shared memory as well: when threads read and wrote `states` themselves, four rows an
instruction, that was half of the time. CTAs of 16 columns take a quarter less time than those of
32, if the GPU has room for all of them. Segments come from segment_plan, all of whose numbers are
rows of `states`, whatever the bounds are.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.roles import load_role, store_role
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import Named, Role, Schedule, Tile
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    K: int
    reverse: bool
    columns: int  # columns of S that a CTA computes


VARIANTS = tuple(
    Variant(K, reverse, columns)
    for K in (128, 64)
    for reverse in (False, True)
    for columns in (16, 32)
)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # barriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index is one of a segment that there is
}

SCAN_SLOTS = 2
SCAN_ROWS = 64  # rows of S that a warpgroup computes
TERM = "bfloat16"  # of M and S, whatever the dtype of k: fp32's range, and 16 digits in two terms


def schedule(variant: Variant) -> Schedule:
    K, columns = variant.K, variant.columns
    panel = (SCAN_ROWS, K) if variant.reverse else (K, SCAN_ROWS)
    folds = tuple(
        Role(
            f"fold{w}",
            warps=4,
            regs=168,
            waits=("m_full", "s_free"),
            signals=("m_free", "s_full"),
            computes="64 rows of M S + b",
            uses=("wgmma",),
        )
        for w in range(variant.K // SCAN_ROWS)
    )
    return Schedule(
        roles=(
            *folds,
            load_role(168, "M, b", "m", tail=False),
            store_role(168, "S out", "s"),
            Role("spare", warps=2, regs=168, computes="fills the warpgroup"),
        ),
        rings={"m": SCAN_SLOTS, "s": SCAN_SLOTS},
        named={"folded": Named(sum(role.threads for role in folds))},
        tiles={
            "m": Tile((SCAN_SLOTS, 2, K // SCAN_ROWS, *panel), TERM),
            "s": Tile((2, K, 2 * columns), TERM),  # in two terms
            "b": Tile((SCAN_SLOTS, columns, K), "float32", swizzled=True),
            "out": Tile((SCAN_SLOTS, columns, K), "float32", swizzled=True),  # S on its way out
        },
    )


class Segments(NamedTuple):
    """A sequence's segments, in the order of the walk; the first and the last are not folded."""

    states: Any  # [segments, HV, V, K]
    maps: Any  # [segments, HV, 2, K, K]
    cold: Any  # [segments, HV]
    origin: Any  # the first one
    direction: int
    num_steps: Any
    n: Any
    hv: Any
    v0: Any


def rows_of(reverse, w):
    """Returns the slices of a stored M that warpgroup w needs for its 64 rows; M is transposed."""
    rows, whole = slice(w * SCAN_ROWS, (w + 1) * SCAN_ROWS), slice(None)
    return (rows, whole) if reverse else (whole, rows)


@T.macro
def load(variant, s, ring, walk):
    origin, direction, num_steps = walk.origin, walk.direction, walk.num_steps
    hv, v0 = walk.hv, walk.v0
    lane = T.get_thread_binding() % 32
    flag, step, i = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    p = T.alloc_var("int32")
    step = 0
    for base in rolled(T.ceildiv(num_steps, 32)):
        i = T.min(base * 32 + lane + 1, num_steps)
        flag = walk.cold[origin + direction * i, hv]
        for j in rolled(T.min(32, num_steps - base * 32)):
            if T.shfl_sync(flag, j) != 0:
                p = origin + direction * (base * 32 + j + 1)
                ring.acquire(step)  # 1
                for w in range(variant.K // SCAN_ROWS):
                    for term in range(2):
                        T.tma_copy(
                            walk.maps[(p, hv, term, *rows_of(variant.reverse, w))],
                            s.m[ring.slot(step), term, w, :, :],
                            barrier=ring.barrier(step),
                        )
                T.tma_copy(
                    walk.states[p + direction, hv, v0 : v0 + variant.columns, :],
                    s.b[ring.slot(step), :, :],
                    barrier=ring.barrier(step),
                )
                ring.commit(step)
                step += 1


@T.macro
def store(variant, s_out, ring, walk):
    """Stores the state that enters each cold segment; the fold's warpgroups write other states."""
    origin, direction, num_steps = walk.origin, walk.direction, walk.num_steps
    hv, v0 = walk.hv, walk.v0
    lane = T.get_thread_binding() % 32
    flag, step, i = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    step = 0
    for base in rolled(T.ceildiv(num_steps, 32)):
        i = T.min(base * 32 + lane + 1, num_steps)
        flag = walk.cold[origin + direction * i, hv]
        for j in rolled(T.min(32, num_steps - base * 32)):
            if T.shfl_sync(flag, j) != 0:
                ring.wait(step)
                T.tma_copy(  # 4
                    s_out[ring.slot(step), :, :],
                    walk.states[
                        origin + direction * (base * 32 + j + 1), hv, v0 : v0 + variant.columns, :
                    ],
                )
                T.tma_store_wait(0)
                ring.release(step)
                step += 1


@T.macro
def put(r_s, states, p, hv, v0, k0):
    for r, c in T.Parallel(*r_s.shape):
        states[p, hv, v0 + c, k0 + r] = r_s[r, c]


@T.macro
def take(r_s, states, p, hv, v0, k0):
    for r, c in T.Parallel(*r_s.shape):
        r_s[r, c] = states[p, hv, v0 + c, k0 + r]


@T.macro
def hand_round(r_s, s_s, slot, w, folded):
    columns = r_s.shape[1]
    for r, c in T.Parallel(SCAN_ROWS, columns):  # 3
        s_s[slot, w * SCAN_ROWS + r, c] = r_s[r, c]
    for r, c in T.Parallel(SCAN_ROWS, columns):
        s_s[slot, w * SCAN_ROWS + r, columns + c] = r_s[r, c] - T.cast(
            T.cast(r_s[r, c], TERM), "float32"
        )
    T.fence_proxy_async()  # S: written by threads, read by wgmma
    folded.sync()


@T.macro
def fold(variant, w, s, ring, walk, given, has_given, folded):
    """Computes 64 rows of every state; `given` is the one at the walk's first segment, if any."""
    states, cold = walk.states, walk.cold
    origin, direction, num_steps = walk.origin, walk.direction, walk.num_steps
    n, hv, v0 = walk.n, walk.hv, walk.v0
    lane = T.get_thread_binding() % 32
    r_x = T.alloc_fragment((SCAN_ROWS, 2 * variant.columns), "float32")  # M times each term of S
    r_s = T.alloc_fragment((SCAN_ROWS, variant.columns), "float32")
    r_b = T.alloc_fragment((SCAN_ROWS, variant.columns), "float32")
    flag, step, i = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    p, known = T.alloc_var("int32"), T.alloc_var("int32")
    k0 = w * SCAN_ROWS
    if has_given != 0:
        for r, c in T.Parallel(SCAN_ROWS, variant.columns):
            r_s[r, c] = given[n, hv, k0 + r, v0 + c]
    else:
        T.clear(r_s)
    step = 0
    known = origin  # the segment that r_s enters; r_s is written when another state replaces it
    for base in rolled(T.ceildiv(num_steps, 32)):
        i = T.min(base * 32 + lane + 1, num_steps)
        flag = cold[origin + direction * i, hv]
        for j in rolled(T.min(32, num_steps - base * 32)):
            if T.shfl_sync(flag, j) != 0:
                p = origin + direction * (base * 32 + j + 1)
                if known != p:
                    put(r_s, states, known, hv, v0, k0)
                    take(r_s, states, p, hv, v0, k0)
                    hand_round(r_s, s.s, step % 2, w, folded)
                ring.m.wait(step)
                for term in range(2):  # 2
                    T.wgmma_gemm(
                        s.m[ring.m.slot(step), term, w, :, :],
                        s.s[step % 2, :, :],
                        r_x,
                        transpose_A=not variant.reverse,
                        clear_accum=term == 0,
                    )
                ring.s.acquire(step)
                for r, c in T.Parallel(SCAN_ROWS, variant.columns):
                    s.out[ring.s.slot(step), c, k0 + r] = r_s[r, c]
                for r, c in T.Parallel(SCAN_ROWS, variant.columns):
                    r_b[r, c] = s.b[ring.m.slot(step), c, k0 + r]
                T.fence_proxy_async()  # S: written by threads, read by the TMA store
                ring.s.commit(step)
                T.wait_wgmma(0)
                for r, c in T.Parallel(SCAN_ROWS, variant.columns):
                    r_s[r, c] = r_x[r, c] + r_b[r, c]
                ring.m.release(step)
                step += 1
                for r, c in T.Parallel(SCAN_ROWS, variant.columns):
                    r_s[r, c] += r_x[r, variant.columns + c]
                hand_round(r_s, s.s, step % 2, w, folded)
                known = p + direction
    put(r_s, states, known, hv, v0, k0)


def build(variant: Variant):
    plan = schedule(variant)
    K = variant.K
    num_value_heads, V = T.dynamic("num_value_heads, V")
    num_bounds, capacity, num_given = T.dynamic("num_bounds, capacity, num_given")

    @T.prim_func
    def segment_scan(
        first_segment: T.Tensor((num_bounds,), "int32"),
        given: strided("given", "n h k v", (num_given, num_value_heads, K, V), "float32"),
        states: T.Tensor((capacity, num_value_heads, V, K), "float32"),
        maps: T.Tensor((capacity, num_value_heads, 2, K, K), TERM),
        cold: T.Tensor((capacity, num_value_heads), "int32"),
        has_given: T.int32,
    ):
        with T.Kernel(
            (num_bounds - 1) * num_value_heads * (V // variant.columns), threads=plan.threads
        ) as block:
            s, ring = tiles(plan), rings(plan)
            n, hv, v0 = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            first, last = T.alloc_var("int32"), T.alloc_var("int32")
            await_previous()
            v0 = block % (V // variant.columns) * variant.columns
            hv = block // (V // variant.columns) % num_value_heads
            n = block // (V // variant.columns) // num_value_heads
            first = first_segment[n]
            last = first_segment[n + 1] - 1
            ends = (last, -1) if variant.reverse else (first, 1)
            walk = Segments(states, maps, cold, *ends, last - first - 1, n, hv, v0)
            tx = T.get_thread_binding()
            folded = NamedBarrier(plan, "folded")
            if tx < plan.end("fold0"):
                fold(variant, 0, s, ring, walk, given, has_given, folded)
            elif K > SCAN_ROWS and tx < plan.end("fold1"):
                fold(variant, 1, s, ring, walk, given, has_given, folded)
            elif tx < plan.end("load"):
                load(variant, s, ring.m, walk)
            elif tx < plan.end("store"):
                store(variant, s.out, ring.s, walk)

    return segment_scan
