"""`broken`'s product by a CTA of two-dimensional threads, and ways to break that.

C = A B^T, 128 x 64: rows 0 and 1 of the CTA, a warpgroup each, run the same code for 64 rows of C
each and take turns on the tensor cores; row 2 loads and stores.
"""

import types
from typing import Any, NamedTuple

import tilelang.language as T

from qla_kernels.runtime.jit import Kernel
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import ONE, Named, Role, Schedule

ROWS, N, BK, STAGES = 64, 64, 64, 2
GROUP = 128  # threads of a warpgroup

DEFECTS = {
    "count of both twins": "barrier c_full: initialised with arrive count 256; the schedule's",
    "part of each twin": "barrier c_full: 192 threads of role twins arrive on it; the schedule",
    "turns for three": "named barrier (computed, 384): for 384 threads, executed by twins (256",
    "undeclared turns": "named barrier (computed, 256): for 256 threads; none such in the schedule",
}


class Variant(NamedTuple):
    defect: str = ""


def schedule(v: Variant) -> Schedule:
    twins_signal = ("ab_free", ("c_full", GROUP))
    return Schedule(
        roles=(
            Role("twins", 8, 216, ("ab_full",), twins_signal, "C", ("wgmma",)),
            Role("load", 1, 24, ("ab_free",), (("ab_full", ONE),), "A, B", ("tma_load",)),
            Role("store", 1, 24, ("c_full",), (), "C out", ("tma_store",)),
            Role("spare", 2, 24, computes="fills the warpgroup"),
        ),
        rings={"ab": STAGES, "c": 2},
        named={} if v.defect == "undeclared turns" else named(v.defect),
        smem_bytes=STAGES * (2 * ROWS + N) * BK * 2 + 2 * ROWS * N * 2 + 1024,
    )


def named(defect: str) -> dict[str, Named]:
    return {"turn": Named(384 if defect == "turns for three" else 2 * GROUP, copies=2)}


def build(v: Variant) -> Any:
    plan = schedule(v)
    turn = NamedBarrier(Schedule(plan.roles, plan.rings, named(v.defect)), "turn")
    defect = v.defect
    c_count = 2 * GROUP if defect == "count of both twins" else plan.arrivals("c_full")
    signalling = 96 if defect == "part of each twin" else GROUP

    @T.macro
    def twins(w, s_a, s_b, s_c, c_full, ab, num_steps):
        r_c = T.alloc_fragment((ROWS, N), "float32")
        T.set_max_nreg(plan.role("twins").regs, 1)
        T.clear(r_c)
        if T.get_thread_binding(1) == 1:
            turn.arrive(0)  # twin 0 goes first
        for k in T.serial(num_steps):
            ab.wait(k)
            turn.sync(w)
            T.wgmma_gemm(s_a[ab.slot(k), w, :, :], s_b[ab.slot(k), :, :], r_c, transpose_B=True)
            turn.arrive(1 - w)
            T.wait_wgmma(0)
            ab.release(k)
        if T.get_thread_binding(1) == 0:
            turn.sync(0)  # the turn nobody takes
        T.copy(r_c, s_c[w, :, :])
        T.fence_proxy_async()
        if T.get_thread_binding() < signalling:
            T.barrier_arrive(c_full[w])

    @T.macro
    def load(A, B, s_a, s_b, ab, num_steps):
        for k in T.serial(num_steps):
            ab.acquire(k)
            for half in T.unroll(2):
                T.tma_copy(
                    A[half * ROWS : (half + 1) * ROWS, k * BK : (k + 1) * BK],
                    s_a[ab.slot(k), half, :, :],
                    barrier=ab.barrier(k),
                )
            T.tma_copy(B[:, k * BK : (k + 1) * BK], s_b[ab.slot(k), :, :], barrier=ab.barrier(k))
            if T.shuffle_elect(32):
                ab.commit(k)

    @T.macro
    def store(C, s_c, c_full):
        for half in T.serial(2):
            T.barrier_wait(c_full[half], 0)
            T.tma_copy(s_c[half, :, :], C[half * ROWS : (half + 1) * ROWS, :])
            T.tma_store_wait(0)

    @T.prim_func
    def broken_rows(
        A: T.Tensor((2 * ROWS, T.dynamic("K")), "bfloat16"),
        B: T.Tensor((N, T.dynamic("K")), "bfloat16"),
        C: T.Tensor((2 * ROWS, N), "bfloat16"),
    ):
        with T.Kernel(1, threads=(GROUP, plan.threads // GROUP)) as _:
            s_a = T.alloc_shared((STAGES, 2, ROWS, BK), "bfloat16")
            s_b = T.alloc_shared((STAGES, N, BK), "bfloat16")
            s_c = T.alloc_shared((2, ROWS, N), "bfloat16")
            ab_full = T.alloc_barrier([plan.arrivals("ab_full")] * STAGES)
            ab_free = T.alloc_barrier([plan.arrivals("ab_free")] * STAGES)
            c_full = T.alloc_barrier([c_count] * 2)
            ab = Ring(ab_full, ab_free, STAGES)
            num_steps = A.shape[1] // BK
            w = T.alloc_var("int32")
            w = T.get_thread_binding(1)
            if T.get_thread_binding(1) < 2:
                twins(w, s_a, s_b, s_c, c_full, ab, num_steps)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if T.get_thread_binding() < 32:
                    load(A, B, s_a, s_b, ab, num_steps)
                elif T.get_thread_binding() < 64:
                    store(C, s_c, c_full)

    return broken_rows


def kernel(*defects: str) -> Kernel:
    """The kernel as it should be, or with one defect a variant, in the shape of a kernel module."""
    module: Any = types.ModuleType("broken_rows")
    module.VARIANTS = tuple(map(Variant, defects or ("",)))
    module.PASS_CONFIGS = {"tl.disable_thread_storage_sync": True}
    module.schedule, module.build = schedule, build
    return Kernel("tests", "broken_rows", module)
