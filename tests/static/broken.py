"""A small warp-specialised kernel, and ways to break it, one at a time.

C = A B^T for one tile of 128 x 64: `load` fills a ring, `upper` and `lower` own 64 rows each and
write them out through shared memory. Every defect compiles; none of them may pass the gate.
"""

import types
from typing import Any, NamedTuple

import tilelang.language as T

from qla_kernels.runtime.jit import Kernel
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import ONE, Named, Role, Schedule

ROWS, N, BK, STAGES = 64, 64, 64, 2
LAUNCH_REGISTERS = 168  # what ptxas gives each of 384 threads

DEFECTS = {  # what is wrong -> what the gate has to say
    "upper never releases": "barrier ab_free: role upper should arrive on it and never does",
    "lower never waits": "barrier ab_full: role lower should wait on it and never does",
    "half of lower releases": "barrier ab_free: 64 threads of role lower arrive on it",
    "wrong arrive count": "barrier ab_free: initialised with arrive count 128; the schedule's",
    "a barrier nobody arrives on": "barrier extra: nobody arrives on it",
    "a slot too few": "barrier ab_full: 2 slots in the code; the schedule says 3",
    "another register count": "role load: set_max_nreg 32; the schedule says 24",
    "a warp without set_max_nreg": "role load: set_max_nreg missing; the schedule says 24",
    "spills": "B loaded; none declared",
    "shared memory miscounted": "the schedule says 81920 B",
    "plain loads for TMA": "role load: no tma_load instruction",
    "serialised wgmma": "ptxas: ",
    "one named barrier for two roles": "named barrier 8: for 128 threads, executed by upper (128",
    "undeclared named barriers": "named barrier 8: for 128 threads; none such in the schedule",
    "another count of threads": "named barrier upper (8): threads in the code: 128; the schedule",
    "named barriers in another order": "named barrier upper (10): threads in the code: none; the",
    "one fragment for two roles": "fragment r_upper: used by roles upper, lower",
    "roles dispatched one by one": "s_lower and s_upper overlap",
    "CTAs that cannot share an SM": "registers: 168 a thread at launch x 384 threads x 2 CTAs",
}


class Variant(NamedTuple):
    defect: str = ""


def schedule(v: Variant) -> Schedule:
    regs = 72 if v.defect == "CTAs that cannot share an SM" else 216
    load_regs = 72 if v.defect == "plain loads for TMA" else 24
    smem = STAGES * (2 * ROWS + N) * BK * 2 + 2 * ROWS * N * 4  # the ring, C
    return Schedule(
        roles=(
            Role("upper", 4, regs, ("ab_full",), ("ab_free",), "C[:64]", ("wgmma",)),
            Role("lower", 4, regs, ("ab_full",), ("ab_free",), "C[64:]", ("wgmma",)),
            Role("load", 1, load_regs, ("ab_free",), (("ab_full", ONE),), "A, B", ("tma_load",)),
            Role("spare", 3, load_regs, computes="fills the warpgroup"),
        ),
        rings={"ab": 3 if v.defect == "a slot too few" else STAGES},
        smem_bytes=smem + (0 if v.defect == "shared memory miscounted" else 1024),  # barriers
        named={} if v.defect == "undeclared named barriers" else named(v.defect),
        ctas_per_sm=2 if v.defect == "CTAs that cannot share an SM" else 1,
    )


def named(defect: str) -> dict[str, Named]:
    threads = 160 if defect == "another count of threads" else 128
    barriers = {"upper": Named(threads), "lower": Named(128)}
    if defect == "named barriers in another order":
        barriers = {"lower": Named(128), "third": Named(128), "upper": Named(128)}
    return barriers


def build(v: Variant) -> Any:
    plan = schedule(v)
    defect = v.defect
    free_count = 128 if defect == "wrong arrive count" else plan.arrivals("ab_free")
    own_id = {"upper": 8, "lower": 9}  # by hand, so that the schedule can differ
    load_regs = 32 if defect == "another register count" else plan.role("load").regs
    first_loader = plan.start("load") + (32 if defect == "a warp without set_max_nreg" else 0)

    @T.macro
    def load(A, B, s_a, s_b, ab, num_steps):
        if T.get_thread_binding() >= first_loader:
            T.set_max_nreg(load_regs, 0)
        if T.get_thread_binding() < plan.end("load"):
            for k in T.serial(num_steps):
                ab.acquire(k)
                if defect in ("plain loads for TMA", "spills"):  # 24 registers are not enough
                    T.copy(A[:, k * BK : (k + 1) * BK], s_a[ab.slot(k), :, :])
                    T.copy(B[:, k * BK : (k + 1) * BK], s_b[ab.slot(k), :, :])
                else:
                    T.tma_copy(
                        A[:, k * BK : (k + 1) * BK], s_a[ab.slot(k), :, :], barrier=ab.barrier(k)
                    )
                    T.tma_copy(
                        B[:, k * BK : (k + 1) * BK], s_b[ab.slot(k), :, :], barrier=ab.barrier(k)
                    )
                if T.shuffle_elect(32):
                    ab.commit(k)

    @T.macro
    def consume(name, row0, C, s_a, s_b, s_c, r_c, ab, num_steps):
        T.set_max_nreg(plan.role(name).regs, int(plan.role(name).regs > LAUNCH_REGISTERS))
        T.clear(r_c)
        for k in T.serial(num_steps):
            if defect != f"{name} never waits":
                ab.wait(k)
            T.wgmma_gemm(
                s_a[ab.slot(k), row0 : row0 + ROWS, :],
                s_b[ab.slot(k), :, :],
                r_c,
                transpose_B=True,
            )
            if defect == "serialised wgmma":  # touches the accumulators before they are there
                for i, j in T.Parallel(ROWS, N):
                    r_c[i, j] *= 2.0
            T.wait_wgmma(0)
            if defect == f"half of {name} releases":
                if T.get_thread_binding() < plan.start(name) + 64:
                    ab.release(k)
            elif defect != f"{name} never releases":
                ab.release(k)
        T.copy(r_c, s_c)
        T.sync_threads(8 if defect == "one named barrier for two roles" else own_id[name], 128)
        for i, j in T.Parallel(ROWS, N):
            C[row0 + i, j] = s_c[ROWS - 1 - i, j]  # reversed: other threads' rows

    @T.prim_func
    def broken(
        A: T.Tensor((2 * ROWS, T.dynamic("K")), "bfloat16"),
        B: T.Tensor((N, T.dynamic("K")), "bfloat16"),
        C: T.Tensor((2 * ROWS, N), "float32"),
    ):
        with T.Kernel(1, threads=plan.threads) as _:
            s_a = T.alloc_shared((STAGES, 2 * ROWS, BK), "bfloat16")
            s_b = T.alloc_shared((STAGES, N, BK), "bfloat16")
            s_upper = T.alloc_shared((ROWS, N), "float32")
            s_lower = T.alloc_shared((ROWS, N), "float32")
            r_upper = T.alloc_fragment((ROWS, N), "float32")
            r_lower = T.alloc_fragment((ROWS, N), "float32")
            ab_full = T.alloc_barrier([plan.arrivals("ab_full")] * STAGES)
            ab_free = T.alloc_barrier([free_count] * STAGES)
            ab = Ring(ab_full, ab_free, STAGES)
            num_steps = A.shape[1] // BK
            tx = T.get_thread_binding()
            if defect == "a barrier nobody arrives on":
                extra = T.alloc_barrier(1)
                T.barrier_wait(extra, 1)
            if defect == "roles dispatched one by one":
                with T.ws(0):
                    consume("upper", 0, C, s_a, s_b, s_upper, r_upper, ab, num_steps)
                with T.ws(1):
                    consume("lower", ROWS, C, s_a, s_b, s_lower, r_lower, ab, num_steps)
                with T.ws(2):
                    load(A, B, s_a, s_b, ab, num_steps)
            elif tx < plan.end("upper"):
                consume("upper", 0, C, s_a, s_b, s_upper, r_upper, ab, num_steps)
            elif tx < plan.end("lower"):
                if defect == "one fragment for two roles":
                    consume("lower", ROWS, C, s_a, s_b, s_lower, r_upper, ab, num_steps)
                else:
                    consume("lower", ROWS, C, s_a, s_b, s_lower, r_lower, ab, num_steps)
            else:
                load(A, B, s_a, s_b, ab, num_steps)

    return broken


def kernel(*defects: str) -> Kernel:
    """The kernel as it should be, or with one defect a variant, in the shape of a kernel module."""
    module: Any = types.ModuleType("broken")
    module.VARIANTS = tuple(map(Variant, defects or ("",)))
    module.PASS_CONFIGS = {"tl.disable_thread_storage_sync": True}
    module.schedule, module.build = schedule, build
    return Kernel("tests", "broken", module)
