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
from qla_kernels.gdn.kernels.chain.forward import RawGates
from qla_kernels.gdn.kernels.chain.forward import gate as raw_gate
from qla_kernels.gdn.kernels.chain.gated_tiles import SCRATCH_BYTES
from qla_kernels.gdn.kernels.chain.gated_tiles import SOURCE as GATED_TILES
from qla_kernels.gdn.kernels.chain.layout import GATE_ROWS, TILE, Rows, named_barriers
from qla_kernels.gdn.kernels.chain.roles import gate_role, load_role
from qla_kernels.gdn.kernels.chain.window import SOURCE, columns, solve, warm_chunks
from qla_kernels.gdn.kernels.tables import sequence_span
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.record import Variables
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import Role, Schedule, Tile, free, full
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


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


def schedule(variant: Variant) -> Schedule:
    dtype = variant.dtype
    slots = {"rows": 3, "gate": 4, "tail": 1}
    waits, releases = full("rows", "gate"), free("rows", "gate")
    solve_roles: tuple[Role, ...] = ()
    if variant.solves:
        slots["a"] = 2
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
    smem = {
        "k": Tile((slots["rows"], CHUNK, variant.K), dtype),
        "v": Tile((slots["rows"], CHUNK, TILE), dtype, swizzled=True),
        "a": Tile((slots["a" if variant.solves else "rows"], CHUNK, CHUNK), dtype, swizzled=True),
        "gate": Tile((slots["gate"], GATE_ROWS, CHUNK), "float32"),
        "sum": Tile((12 if variant.solves else 8,), "float32", align=1024),  # a number a warp
    }
    if variant.solves:
        smem["l"] = Tile((SCRATCH_BYTES // 4,), "float32")
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
            load_role(40, "k, v" + ", A" * (not variant.solves), "rows"),
            gate_role(40),
            Role("spare", warps=2, regs=40, computes="fills the warpgroup"),
        ),
        rings=slots,
        named=named_barriers(states=1, solving=int(variant.solves)),
        tiles=smem,
        ctas_per_sm=1 if variant.solves else 2,
    )


def build(variant: Variant):
    plan = schedule(variant)
    K, dtype = variant.K, variant.dtype
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_tiles, capacity = T.dynamic("V, num_tiles, capacity")
    num_h0, num_bounds, size = T.dynamic("num_h0, num_bounds, size")
    narrow_tokens, saved_tokens = T.dynamic("narrow_tokens, saved_tokens")
    grown_tokens = T.dynamic("grown_tokens")
    value_rows = num_tokens, num_value_heads

    @T.prim_func
    def segment_map(
        k: strided("k", "token head", (num_tokens, num_heads, size), dtype),
        v: strided("v", "token head tile", (*value_rows, num_tiles, TILE), dtype),
        g: T.Tensor(value_rows, "float32"),
        beta: T.Tensor(value_rows, "float32"),
        beta16: T.Tensor((narrow_tokens, num_value_heads), dtype),
        growth: T.Tensor((grown_tokens, num_value_heads), "float32"),
        A: T.Tensor((saved_tokens, num_value_heads, CHUNK), dtype),
        bounds: T.Tensor((num_bounds,), "int32"),
        starts_of: T.Tensor((num_bounds,), "int32"),
        ends_of: T.Tensor((num_bounds,), "int32"),
        heads: T.Tensor((num_value_heads,), "int32"),
        h0: strided("h0", "n h k v", (num_h0, num_value_heads, K, V), "float32"),
        starts: T.Tensor((capacity, num_value_heads, V, K), "float32"),
        maps: T.Tensor((capacity, num_value_heads, 2, K, K), "bfloat16"),
        cold: T.Tensor((capacity, num_value_heads), "int32"),
        limit: T.float32,
        has_h0: T.int32,
        beta_is_16: T.int32,
        grows: T.int32,
        early: T.int32,
    ):
        grid = (capacity, num_tiles + K // TILE, num_value_heads)
        with T.Kernel(*grid, threads=plan.threads) as (p, i_slice, place):
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source((GATED_TILES if variant.solves else "") + SOURCE)
            s, ring = tiles(plan), rings(plan)
            item = Variables("n kh hv column of_map begin length num_chunks warm has_start is_cold")
            if early == 0:
                await_previous()
            item["hv"] = heads[place]
            item["kh"] = item.hv // (num_value_heads // num_heads)
            item["of_map"] = 0
            item["column"] = i_slice * TILE
            if i_slice >= num_tiles:
                item["of_map"] = 1
                item["column"] = (i_slice - num_tiles) * TILE
            item["n"] = starts_of[p]
            sequence_span(bounds, p, num_tokens, item.begin, item.length)
            item["num_chunks"] = 0
            item["is_cold"] = -1  # another CTA decides
            item["warm"] = 0
            item["has_start"] = 0
            # a first segment needs no M
            if (ends_of[p] < 0) & ((item.of_map == 0) | (item.n < 0)):
                item["num_chunks"] = T.ceildiv(item.length, CHUNK)
            tx = T.get_thread_binding()
            gates = RawGates(g, beta, beta16, beta_is_16, g)
            if (early != 0) & (grows != 0):  # growth comes from the kernel before
                await_previous()
            if item.num_chunks > 0:
                item["warm"] = warm_chunks(  # 1
                    K, k, gates, growth, grows, s.sum, item, limit,
                    at_end=True, cumulated=not variant.solves,
                )  # fmt: skip
                if item.warm > 0:
                    item["begin"] += (item.num_chunks - item.warm) * CHUNK
                    item["length"] -= (item.num_chunks - item.warm) * CHUNK
                    item["num_chunks"] = item.warm
                elif item.n >= 0:
                    item["has_start"] = has_h0
                if i_slice == 0:
                    item["is_cold"] = T.if_then_else((item.warm == 0) & (item.n < 0), 1, 0)
                if (item.of_map != 0) & (item.warm > 0):
                    item["num_chunks"] = 0  # a warm segment needs no M either

            if tx < plan.end("state"):
                T.set_max_nreg(plan.role("state").regs, 1)
                columns(variant, s, ring, h0, starts, maps, p, item)
            elif variant.solves and tx < plan.end("solve"):
                T.set_max_nreg(plan.role("solve").regs, 0)
                meet = NamedBarrier(plan, "solve")
                solve(s, ring, meet, item.num_chunks, plan.start("solve"))
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    if (early != 0) & (grows == 0):  # A comes from the kernel before
                        await_previous()
                    if (item.is_cold >= 0) & (tx == plan.start("load")):
                        cold[p, item.hv] = item.is_cold
                    always = [Rows(k, (item.kh,), s.k)]
                    if not variant.solves:
                        always.append(Rows(A, (item.hv,), s.a))
                    if item.of_map == 0:
                        values = Rows(v, (item.hv, i_slice), s.v)
                        load([values, *always], ring.rows, ring.tail, item, False)
                    else:
                        load(always, ring.rows, ring.tail, item, False)
                elif tx < plan.end("gate"):
                    if variant.solves:
                        raw_gate(gates, s.gate, ring.gate, item, 1.0)
                    else:
                        gate(g, beta, s.gate, ring.gate, item, False, None)

    return segment_map
