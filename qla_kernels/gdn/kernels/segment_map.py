"""segment_map -- the map of a segment from its start state to its end state: S_end = M S_start + b.

One CTA per segment, value head and 64 columns of [b | M]. b, with columns of V, is the end state if
the segment starts from 0. M, with columns of K, is the end state if it starts from the identity and
all values are 0. A sequence's last segment is skipped: no later segment needs its end state. Its
first segment starts from the initial state, so its b is the end state itself and needs no M.

Per chunk, with X, 64 columns of b or M, kept transposed in fp32 registers from the first chunk to
the last, and e and d as in fused_fwd:
    W^T   = beta V^T - (beta e) X K^T                                               [64, C]
    V'^T  = W^T A^T                                                                 [64, C]
    X     = e^gamma_last X + (d V'^T) K                                             [64, K]

Most heads forget: |M| <= prod_t e^{g_t} max(1, |1 - beta_t |k_t|^2|). If this bound over the last w
chunks is below e^limit, b of these chunks alone serves as the segment's end state. Such a head is
warm: it runs w chunks, mostly a few, and needs no M. Other heads are cold: they run the whole
segment, with V / 64 + K / 64 CTAs, and segment_scan combines their b and M.

Steps (numbers appear again in the code):
    1 all     w: sum the gates from the segment's end, with kkt_solve's growth or, without it, with
              norms of keys, which are read for the chunks in w only
    2 load    k, A if it is given, and v for columns of b, of a chunk
    3 gate    beta, beta e, d, e^gamma_last of a chunk
    4 solve   K K^T, then A, unless given
    5 state   X K^T from X in 16 bits; W^T
    6 state   V'^T; meanwhile X decayed
    7 state   X
    8 state   write b as the next segment's start state; write M in two terms of 16 bits

Bounded by the latency of the chain 5, 6, 7, and by the time at which CTAs of cold heads begin:
heads that are probably cold come first. Why this shape: it is chunk_states' chain, with one state
warpgroup and, if A is given, room for two CTAs on an SM, each computing while the other waits. For
long batches A is given, and fused_fwd uses it as well. For short ones this kernel solves for A, in
the few chunks of a window, which avoids three more launches.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.cumulated import gate, load
from qla_kernels.gdn.kernels.chain.forward import gate as raw_gate
from qla_kernels.gdn.kernels.chain.gated_tiles import SCRATCH_BYTES
from qla_kernels.gdn.kernels.chain.gated_tiles import SOURCE as GATED_TILES
from qla_kernels.gdn.kernels.chain.layout import GATE_ROWS, TILE, Rows, named_barriers
from qla_kernels.gdn.kernels.chain.window import SOURCE, columns, solve, warm_chunks
from qla_kernels.gdn.kernels.tables import sequence_span
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.language import make_full_bank_swizzled_layout
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import Role, Schedule


class Variant(NamedTuple):
    dtype: str  # of k, v
    K: int  # q and k have so many numbers or fewer: `size`
    solves: bool  # from g, or is given A and cumulated gates


VARIANTS = tuple(
    Variant(dtype, K, solves)
    for dtype in ("bfloat16", "float16")
    for K in (128, 64)
    for solves in (True, False)
)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order what crosses warps, but for step 1
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the segment's length
    "tl.disable_shared_memory_reuse": True,  # copies are under way while a slow warp reads s_sum
}

MAP_RINGS = {"rows": 3, "gate": 4}


def schedule(variant: Variant) -> Schedule:
    rings, waits, releases = dict(MAP_RINGS), ("rows_full", "gate_full"), ("rows_free", "gate_free")
    solve_roles: tuple[Role, ...] = ()
    if variant.solves:
        rings["a"] = 2
        solve_roles = (
            Role(
                "solve",
                warps=4,
                regs=120,
                waits=(*waits, "a_free"),
                signals=(*releases, "a_full"),
                computes="A",
                uses=("wgmma", "mma"),
            ),
        )
        waits, releases = (*waits, "a_full"), (*releases, "a_free")
    return Schedule(
        roles=(
            Role(
                "state",
                warps=4,
                regs=208,
                waits=waits,
                signals=releases,
                computes="X, W, V'; b or M out",
                uses=("wgmma",),
            ),
            *solve_roles,
            Role(
                "load",
                warps=1,
                regs=40,
                waits=("rows_free", "tail_full"),
                signals=("rows_full", "tail_full"),
                computes="k, v" + ", A" * (not variant.solves),
                uses=("tma_load",),
            ),
            Role(
                "gate",
                warps=1,
                regs=40,
                waits=("gate_free",),
                signals=("gate_full",),
                computes="exponentials of gamma, beta",
            ),
            Role("spare", warps=2, regs=40, computes="fills the warpgroup"),
        ),
        rings=rings,
        named=named_barriers(states=1, solving=int(variant.solves)),
        # k, v; A; gates; sums, on a kilobyte of their own; scratch; barriers and alignment
        smem_bytes=rings["rows"] * CHUNK * (variant.K + TILE) * 2
        + rings["a" if variant.solves else "rows"] * CHUNK * CHUNK * 2
        + rings["gate"] * GATE_ROWS * CHUNK * 4
        + 1024
        + SCRATCH_BYTES * variant.solves
        + 1024,
        ctas_per_sm=1 if variant.solves else 2,
    )


def build(variant: Variant):
    plan = schedule(variant)
    K, rings, warps = variant.K, plan.rings, plan.threads // 32
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_tiles, capacity = T.dynamic("V, num_tiles, capacity")
    num_h0, num_bounds, size = T.dynamic("num_h0, num_bounds, size")
    narrow_tokens, saved_tokens = T.dynamic("narrow_tokens, saved_tokens")
    grown_tokens = T.dynamic("grown_tokens")
    k_token, k_head = T.dynamic("k_token, k_head")
    v_token, v_head, v_tile = T.dynamic("v_token, v_head, v_tile")
    h0_n, h0_h, h0_k, h0_v = T.dynamic("h0_n, h0_h, h0_k, h0_v")

    @T.prim_func
    def segment_map(
        k: T.StridedTensor((num_tokens, num_heads, size), (k_token, k_head, 1), variant.dtype),
        v: T.StridedTensor(
            (num_tokens, num_value_heads, num_tiles, TILE),
            (v_token, v_head, v_tile, 1),
            variant.dtype,
        ),
        g: T.Tensor((num_tokens, num_value_heads), "float32"),
        beta: T.Tensor((num_tokens, num_value_heads), "float32"),
        beta16: T.Tensor((narrow_tokens, num_value_heads), variant.dtype),
        growth: T.Tensor((grown_tokens, num_value_heads), "float32"),
        A: T.Tensor((saved_tokens, num_value_heads, CHUNK), variant.dtype),
        bounds: T.Tensor((num_bounds,), "int32"),
        starts_of: T.Tensor((num_bounds,), "int32"),
        ends_of: T.Tensor((num_bounds,), "int32"),
        heads: T.Tensor((num_value_heads,), "int32"),
        h0: T.StridedTensor((num_h0, num_value_heads, K, V), (h0_n, h0_h, h0_k, h0_v), "float32"),
        starts: T.Tensor((capacity, num_value_heads, V, K), "float32"),
        maps: T.Tensor((capacity, num_value_heads, 2, K, K), "bfloat16"),
        cold: T.Tensor((capacity, num_value_heads), "int32"),
        limit: T.float32,
        has_h0: T.int32,
        beta_is_16: T.int32,
        grows: T.int32,
        early: T.int32,
    ):
        with T.Kernel(capacity, num_tiles + K // TILE, num_value_heads, threads=plan.threads) as (
            p,
            i_slice,
            place,
        ):
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source((GATED_TILES if variant.solves else "") + SOURCE)
            s_k = T.alloc_shared((rings["rows"], CHUNK, K), variant.dtype)
            s_v = T.alloc_shared((rings["rows"], CHUNK, TILE), variant.dtype)
            s_a = T.alloc_shared(
                (rings["a" if variant.solves else "rows"], CHUNK, CHUNK), variant.dtype
            )
            s_gate = T.alloc_shared((rings["gate"], GATE_ROWS, CHUNK), "float32")
            s_sum = T.alloc_shared((warps,), "float32")
            T.annotate_layout({s: make_full_bank_swizzled_layout(s) for s in (s_v, s_a)})
            rows_full = T.alloc_barrier([plan.arrivals("rows_full")] * rings["rows"])
            rows_free = T.alloc_barrier([plan.arrivals("rows_free")] * rings["rows"])
            gate_full = T.alloc_barrier([plan.arrivals("gate_full")] * rings["gate"])
            gate_free = T.alloc_barrier([plan.arrivals("gate_free")] * rings["gate"])
            tail_full = T.alloc_barrier([plan.arrivals("tail_full")])
            rows = Ring(rows_full, rows_free, rings["rows"])
            gates = Ring(gate_full, gate_free, rings["gate"])
            a_ring = None
            if variant.solves:
                s_l = T.alloc_shared((SCRATCH_BYTES // 4,), "float32")
                a_full = T.alloc_barrier([plan.arrivals("a_full")] * rings["a"])
                a_free = T.alloc_barrier([plan.arrivals("a_free")] * rings["a"])
                a_ring = Ring(a_full, a_free, rings["a"])

            n, kh, hv = (T.alloc_var("int32") for _ in range(3))
            column, of_map = T.alloc_var("int32"), T.alloc_var("int32")
            begin, length, num_chunks = (T.alloc_var("int32") for _ in range(3))
            warm, has_start = T.alloc_var("int32"), T.alloc_var("int32")
            is_cold = T.alloc_var("int32")
            if early == 0:
                await_previous()
            hv = heads[place]
            kh = hv // (num_value_heads // num_heads)
            of_map = 0
            column = i_slice * TILE
            if i_slice >= num_tiles:
                of_map = 1
                column = (i_slice - num_tiles) * TILE
            n = starts_of[p]
            sequence_span(bounds, p, num_tokens, begin, length)
            num_chunks = 0
            is_cold = -1  # another CTA decides
            warm = 0
            has_start = 0
            if (ends_of[p] < 0) & ((of_map == 0) | (n < 0)):  # a first segment needs no M
                num_chunks = T.ceildiv(length, CHUNK)
            tx = T.get_thread_binding()
            if (early != 0) & (grows != 0):  # growth comes from the kernel before
                await_previous()
            if num_chunks > 0:
                warm = warm_chunks(  # 1
                    K, k, g, growth, grows, beta, beta16, beta_is_16, s_sum, begin, length,
                    kh, hv, limit, at_end=True, cumulated=not variant.solves,
                )  # fmt: skip
                if warm > 0:
                    begin += (num_chunks - warm) * CHUNK
                    length -= (num_chunks - warm) * CHUNK
                    num_chunks = warm
                elif n >= 0:
                    has_start = has_h0
                if i_slice == 0:
                    is_cold = T.if_then_else((warm == 0) & (n < 0), 1, 0)
                if (of_map != 0) & (warm > 0):
                    num_chunks = 0  # a warm segment needs no M either

            if tx < plan.end("state"):
                T.set_max_nreg(plan.role("state").regs, 1)
                columns(
                    K, variant.dtype, h0, starts, maps, s_k, s_v, s_a, s_gate, rows, gates, a_ring,
                    num_chunks, p, n, hv, column, of_map, has_start,
                )  # fmt: skip
            elif tx < plan.start("load"):  # no thread if A is given
                if variant.solves:
                    T.set_max_nreg(plan.role("solve").regs, 0)
                    solve(
                        s_k, s_gate, s_l, s_a, rows, gates, a_ring, NamedBarrier(plan, "solve"),
                        num_chunks, plan.start("solve"),
                    )  # fmt: skip
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                where = (begin, length, num_chunks)
                if tx < plan.end("load"):
                    if (early != 0) & (grows == 0):  # A comes from the kernel before
                        await_previous()
                    if (is_cold >= 0) & (tx == plan.start("load")):
                        cold[p, hv] = is_cold
                    always = [Rows(k, (kh,), s_k)]
                    if not variant.solves:
                        always.append(Rows(A, (hv,), s_a))
                    if of_map == 0:
                        values = Rows(v, (hv, i_slice), s_v)
                        load([values, *always], rows, tail_full, *where, False)
                    else:
                        load(always, rows, tail_full, *where, False)
                elif tx < plan.end("gate"):
                    if variant.solves:
                        raw_gate(g, beta, beta16, beta_is_16, g, s_gate, gates, *where, hv, 1.0, 0)
                    else:
                        gate(g, beta, s_gate, gates, *where, hv, False, None)

    return segment_map
