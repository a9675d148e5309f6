"""segment_scan -- the state that enters each segment, from what segment_map left of each.

One CTA per sequence, value head and 32 columns of V. The first segment starts from h0 or 0. What
enters any other, `states` has already where the segment before it is warm or first; where that one
is cold, `states` has its b, and
    S_{p+1} = M_p S_p + b_p                                                         [K, 32]
In reverse it is the gradient of the state that leaves each segment, from what segment_map_bwd left:
the last segment ends in dht or 0, and dS_{p-1} = M_p^T dS_p + b'_p.

`states` are transposed, [V, K], in fp32; M and S are each the sum of two terms of 16 bits: a
rounding to 16 bits a segment would add up. The terms of S lie side by side, so that each term of M
is read once for both.

Steps (numbers appear again in the roles):
    1 load    M of a cold segment
    2 fold    M S; meanwhile S out, b in
    3 fold    M S + b in two terms, for both warpgroups

Bounded by latency, and by reading M. Why this shape: only cold heads take a product, and those of
one head depend on one another. Which segments they are is read 32 at a time, a lane each; M is
fetched for the segment after while the one before is folded. A warpgroup has 64 rows of what comes
out and needs all of what went in, by way of shared memory: 1.7 us a segment, where 64 columns whose
state stays in registers took 2.5.
"""

from typing import NamedTuple

import tilelang.language as T

from qla_kernels.tile.loops import rolled
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import Role, Schedule


class Variant(NamedTuple):
    K: int
    reverse: bool


VARIANTS = tuple(Variant(K, reverse) for K in (128, 64) for reverse in (False, True))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # barriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index is one of a segment that there is
}

SLOTS = 3
ROWS, COLUMNS = 64, 32  # of S that a warpgroup, and a CTA, computes
TERM = "bfloat16"  # of M and S, whatever the dtype of k: fp32's range, and 16 digits in two terms
FOLDED = 8  # the folding warpgroups' named barrier


def schedule(v: Variant) -> Schedule:
    folds = tuple(
        Role(
            f"fold{w}",
            warps=4,
            regs=168,
            waits=("m_full",),
            signals=("m_free",),
            computes="64 rows of M S + b",
            uses=("wgmma",),
        )
        for w in range(v.K // ROWS)
    )
    return Schedule(
        roles=(
            *folds,
            Role(
                "load",
                warps=1,
                regs=168,
                waits=("m_free",),
                signals=("m_full",),
                computes="M",
                uses=("tma_load",),
            ),
            Role("spare", warps=3, regs=168, computes="fills the warpgroup"),
        ),
        rings={"m": SLOTS},
        # M; S twice; barriers and alignment
        smem_bytes=SLOTS * 2 * v.K * v.K * 2 + 2 * v.K * 2 * COLUMNS * 2 + 1024,
    )


def rows_of(reverse, w):
    """Where the rows of M, or of M^T, are that warpgroup w computes; M is stored transposed."""
    rows, whole = slice(w * ROWS, (w + 1) * ROWS), slice(None)
    return (rows, whole) if reverse else (whole, rows)


@T.macro
def load(v, maps, cold, s_m, ring, origin, direction, num_steps, hv):
    lane = T.get_thread_binding() % 32
    flag, step, i = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    p = T.alloc_var("int32")
    step = 0
    for base in rolled(T.ceildiv(num_steps, 32)):
        i = T.min(base * 32 + lane + 1, num_steps)
        flag = cold[origin + direction * i, hv]
        for j in rolled(T.min(32, num_steps - base * 32)):
            if T.shfl_sync(flag, j) != 0:
                p = origin + direction * (base * 32 + j + 1)
                ring.acquire(step)  # 1
                for w in range(v.K // ROWS):
                    for term in range(2):
                        T.tma_copy(
                            maps[(p, hv, term, *rows_of(v.reverse, w))],
                            s_m[ring.slot(step), term, w, :, :],
                            barrier=ring.barrier(step),
                        )
                ring.commit(step)
                step += 1


@T.macro
def put(r_s, states, p, hv, v0, k0):
    for r, c in T.Parallel(ROWS, COLUMNS):
        states[p, hv, v0 + c, k0 + r] = r_s[r, c]


@T.macro
def take(r_s, states, p, hv, v0, k0):
    for r, c in T.Parallel(ROWS, COLUMNS):
        r_s[r, c] = states[p, hv, v0 + c, k0 + r]


@T.macro
def hand_round(r_s, s_s, slot, w, threads):
    for r, c in T.Parallel(ROWS, COLUMNS):  # 3
        s_s[slot, w * ROWS + r, c] = r_s[r, c]
    for r, c in T.Parallel(ROWS, COLUMNS):
        s_s[slot, w * ROWS + r, COLUMNS + c] = r_s[r, c] - T.cast(
            T.cast(r_s[r, c], TERM), "float32"
        )
    T.fence_proxy_async()  # S: written by threads, read by wgmma
    T.call_extern("handle", "tl::__sync_thread_partial", FOLDED, threads)


@T.macro
def fold(
    v, w, given, states, cold, s_m, s_s, ring, origin, direction, num_steps, n, hv, v0, has_given,
    threads,
):  # fmt: skip
    lane = T.get_thread_binding() % 32
    r_x = T.alloc_fragment((ROWS, 2 * COLUMNS), "float32")  # M times each term of S
    r_s = T.alloc_fragment((ROWS, COLUMNS), "float32")
    r_b = T.alloc_fragment((ROWS, COLUMNS), "float32")
    flag, step, i = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    p, known = T.alloc_var("int32"), T.alloc_var("int32")
    k0 = w * ROWS
    if has_given != 0:
        for r, c in T.Parallel(ROWS, COLUMNS):
            r_s[r, c] = given[n, hv, k0 + r, v0 + c]
    else:
        T.clear(r_s)
    step = 0
    known = origin  # the segment that r_s enters; kept back until it is of no use any more
    for base in rolled(T.ceildiv(num_steps, 32)):
        i = T.min(base * 32 + lane + 1, num_steps)
        flag = cold[origin + direction * i, hv]
        for j in rolled(T.min(32, num_steps - base * 32)):
            if T.shfl_sync(flag, j) != 0:
                p = origin + direction * (base * 32 + j + 1)
                if known != p:
                    put(r_s, states, known, hv, v0, k0)
                    take(r_s, states, p, hv, v0, k0)
                    hand_round(r_s, s_s, step % 2, w, threads)
                ring.wait(step)
                for term in range(2):  # 2
                    T.wgmma_gemm(
                        s_m[ring.slot(step), term, w, :, :],
                        s_s[step % 2, :, :],
                        r_x,
                        transpose_A=not v.reverse,
                        clear_accum=term == 0,
                    )
                put(r_s, states, p, hv, v0, k0)  # meanwhile: a fence would wait for these two
                take(r_b, states, p + direction, hv, v0, k0)
                T.wait_wgmma(0)
                ring.release(step)
                step += 1
                for r, c in T.Parallel(ROWS, COLUMNS):
                    r_s[r, c] = r_x[r, c] + r_b[r, c]
                for r, c in T.Parallel(ROWS, COLUMNS):
                    r_s[r, c] += r_x[r, COLUMNS + c]
                hand_round(r_s, s_s, step % 2, w, threads)
                known = p + direction
    put(r_s, states, known, hv, v0, k0)


def build(v: Variant):
    plan = schedule(v)
    K = v.K
    num_value_heads, V = T.dynamic("num_value_heads, V")
    num_bounds, capacity, num_given = T.dynamic("num_bounds, capacity, num_given")
    given_n, given_h, given_k, given_v = T.dynamic("given_n, given_h, given_k, given_v")

    @T.prim_func
    def segment_scan(
        first_segment: T.Tensor((num_bounds,), "int32"),
        given: T.StridedTensor(
            (num_given, num_value_heads, K, V), (given_n, given_h, given_k, given_v), "float32"
        ),
        states: T.Tensor((capacity, num_value_heads, V, K), "float32"),
        maps: T.Tensor((capacity, num_value_heads, 2, K, K), TERM),
        cold: T.Tensor((capacity, num_value_heads), "int32"),
        has_given: T.int32,
    ):
        with T.Kernel(
            (num_bounds - 1) * num_value_heads * (V // COLUMNS), threads=plan.threads
        ) as block:
            panel = (ROWS, K) if v.reverse else (K, ROWS)
            s_m = T.alloc_shared((SLOTS, 2, K // ROWS, *panel), TERM)
            s_s = T.alloc_shared((2, K, 2 * COLUMNS), TERM)
            m_full = T.alloc_barrier([plan.arrivals("m_full")] * SLOTS)
            m_free = T.alloc_barrier([plan.arrivals("m_free")] * SLOTS)
            ring = Ring(m_full, m_free, SLOTS)
            n, hv, v0 = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            first, last = T.alloc_var("int32"), T.alloc_var("int32")
            v0 = block % (V // COLUMNS) * COLUMNS
            hv = block // (V // COLUMNS) % num_value_heads
            n = block // (V // COLUMNS) // num_value_heads
            first = first_segment[n]
            last = first_segment[n + 1] - 1
            # neither the first nor the last segment is folded
            walk = (last if v.reverse else first, -1 if v.reverse else 1, last - first - 1)

            tx = T.get_thread_binding()
            threads = plan.start("load")
            whole = (given, states, cold, s_m, s_s, ring, *walk, n, hv, v0, has_given, threads)
            if tx < plan.end("fold0"):
                fold(v, 0, *whole)
            elif tx < plan.start("load"):  # nobody where K is 64
                if K > ROWS:
                    fold(v, 1, *whole)
            elif tx < plan.end("load"):
                load(v, maps, cold, s_m, ring, *walk, hv)

    name = f"segment_scan_k{v.K}" + "_reverse" * v.reverse
    return segment_scan.with_attr("global_symbol", name)
