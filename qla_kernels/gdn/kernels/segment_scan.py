"""segment_scan -- the state that enters each segment, from what segment_map left of each.

One CTA per sequence, value head and 64 columns of V. The first segment starts from h0 or 0. What
enters any other, `states` has already where the segment before it is warm or first; where that one
is cold, `states` has its b, and
    S_{p+1} = M_p S_p + b_p                                                         [K, V]
In reverse it is the gradient of the state that leaves each segment, from what segment_map_bwd left:
the last segment ends in dht or 0, and dS_{p-1} = M_p^T dS_p + b'_p.

S is kept transposed, [V, K], in fp32; M and S are each the sum of two terms of 16 bits, and the
product is that of all but the two small ones: a rounding to 16 bits a segment would add up.

Steps (numbers appear again in the roles):
    1 load    M of a cold segment
    2 fold    b, while it is waited for; S in two terms; M S + b; out

Bounded by latency, and by reading M. Why this shape: only cold heads take a product, and those of
one head depend on one another. Which segments they are is read 32 at a time, a lane each; M is
fetched for the segment after while the one before is folded. It is stored transposed, which is the
right operand of S^T M^T as it lies, and of dS^T M the other way up.
"""

from typing import NamedTuple

import tilelang.language as T

from qla_kernels.gdn.chain import TILE
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import Role, Schedule


class Variant(NamedTuple):
    K: int
    reverse: bool


VARIANTS = tuple(Variant(K, reverse) for K in (128, 64) for reverse in (False, True))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index is one of a segment that there is
}

SLOTS = 3
TERM = "bfloat16"  # of M and S, whatever the dtype of k: fp32's range, and 16 digits in two terms


def schedule(v: Variant) -> Schedule:
    return Schedule(
        roles=(
            Role(
                "fold",
                warps=4,
                regs=240,
                waits=("m_full",),
                signals=("m_free",),
                computes="M S + b",
                uses=("wgmma",),
            ),
            Role(
                "load",
                warps=1,
                regs=240,
                waits=("m_free",),
                signals=("m_full",),
                computes="M",
                uses=("tma_load",),
            ),
            Role("spare", warps=3, regs=240, computes="fills the warpgroup"),
        ),
        rings={"m": SLOTS},
        smem_bytes=SLOTS * 2 * v.K * v.K * 2 + 1024,  # M; barriers and alignment
    )


@T.macro
def load(maps, cold, s_m, ring, origin, direction, num_steps, hv):
    lane = T.get_thread_binding() % 32
    flag, step, i = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    step = 0
    for base in rolled(T.ceildiv(num_steps, 32)):
        i = T.min(base * 32 + lane + 1, num_steps)
        flag = cold[origin + direction * i, hv]
        for j in rolled(T.min(32, num_steps - base * 32)):
            if T.shfl_sync(flag, j) != 0:
                ring.acquire(step)  # 1
                for term in T.unroll(2):
                    T.tma_copy(
                        maps[origin + direction * (base * 32 + j + 1), hv, term, :, :],
                        s_m[ring.slot(step), term, :, :],
                        barrier=ring.barrier(step),
                    )
                ring.commit(step)
                step += 1


@T.macro
def fold(
    v, given, states, cold, s_m, ring, origin, direction, num_steps, n, hv, v0, has_given
):  # fmt: skip
    lane = T.get_thread_binding() % 32
    r_s = T.alloc_fragment((TILE, v.K), "float32")  # S^T
    r_b = T.alloc_fragment((TILE, v.K), "float32")
    r_high = T.alloc_fragment((TILE, v.K), TERM)
    r_low = T.alloc_fragment((TILE, v.K), TERM)
    flag, step, i = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    p, known = T.alloc_var("int32"), T.alloc_var("int32")
    if has_given != 0:
        for r, c in T.Parallel(TILE, v.K):
            r_s[r, c] = given[n, hv, c, v0 + r]
    else:
        T.clear(r_s)
    for r, c in T.Parallel(TILE, v.K):
        states[origin, hv, v0 + r, c] = r_s[r, c]
    step = 0
    known = origin  # the segment that r_s enters
    for base in rolled(T.ceildiv(num_steps, 32)):
        i = T.min(base * 32 + lane + 1, num_steps)
        flag = cold[origin + direction * i, hv]
        for j in rolled(T.min(32, num_steps - base * 32)):
            if T.shfl_sync(flag, j) != 0:
                p = origin + direction * (base * 32 + j + 1)
                for r, c in T.Parallel(TILE, v.K):  # 2
                    r_b[r, c] = states[p + direction, hv, v0 + r, c]
                if known != p:
                    for r, c in T.Parallel(TILE, v.K):
                        r_s[r, c] = states[p, hv, v0 + r, c]
                T.copy(r_s, r_high)
                for r, c in T.Parallel(TILE, v.K):
                    r_low[r, c] = r_s[r, c] - r_high[r, c]
                ring.wait(step)
                for term, r_term in ((0, r_low), (1, r_high), (0, r_high)):
                    T.wgmma_gemm(
                        r_term,
                        s_m[ring.slot(step), term, :, :],
                        r_s,
                        transpose_B=v.reverse,
                        clear_accum=r_term is r_low,
                    )
                T.wait_wgmma(0)
                ring.release(step)
                step += 1
                for r, c in T.Parallel(TILE, v.K):
                    r_s[r, c] += r_b[r, c]
                for r, c in T.Parallel(TILE, v.K):
                    states[p + direction, hv, v0 + r, c] = r_s[r, c]
                known = p + direction


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
            (num_bounds - 1) * num_value_heads * (V // TILE), threads=plan.threads
        ) as block:
            s_m = T.alloc_shared((SLOTS, 2, K, K), TERM)
            m_full = T.alloc_barrier([plan.arrivals("m_full")] * SLOTS)
            m_free = T.alloc_barrier([plan.arrivals("m_free")] * SLOTS)
            ring = Ring(m_full, m_free, SLOTS)
            n, hv, v0 = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            first, last = T.alloc_var("int32"), T.alloc_var("int32")
            v0 = block % (V // TILE) * TILE
            hv = block // (V // TILE) % num_value_heads
            n = block // (V // TILE) // num_value_heads
            first = first_segment[n]
            last = first_segment[n + 1] - 1
            # neither the first nor the last segment is folded
            walk = (last if v.reverse else first, -1 if v.reverse else 1, last - first - 1)

            tx = T.get_thread_binding()
            if tx < plan.end("fold"):
                fold(v, given, states, cold, s_m, ring, *walk, n, hv, v0, has_given)
            elif tx < plan.end("load"):
                load(maps, cold, s_m, ring, *walk, hv)

    name = f"segment_scan_k{v.K}" + "_reverse" * v.reverse
    return segment_scan.with_attr("global_symbol", name)
