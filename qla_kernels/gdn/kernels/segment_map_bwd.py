"""segment_map_bwd -- the gradient of the state that enters a segment: dS_start = M^T dS_end + b'.

One CTA per segment, value head and 64 columns of V. b' is dS_start if dS_end is 0. A sequence's
last segment starts from dht instead, so its b' is the gradient itself. Its first segment is
skipped: no earlier segment needs its gradient. M is segment_map's.

Per chunk, last one first, with dS kept transposed, [64, K], in fp32 registers, and A and P as in
fused_fwd:
    dV'^T   = d dS K^T + dO^T P                                                     [64, C]
    Y^T     = dV'^T A                                                               [64, C]
    dS      = e^gamma_last dS - (beta e Y^T) K + (scale e dO^T) Q                   [64, K]

Only the segment's first chunks are walked: the fewest whose map is below e^limit, or all chunks if
the map never is. For a warm head of segment_map the rest is negligible from this end, too, because
the map of all chunks is a product that contains the small one. For a cold head segment_scan adds
M^T dS_end in any case.

Steps (numbers appear again in the code):
    1 all     the number of first chunks to walk
    2 load    q, k, dO, A of a chunk; in a tail, rows past the end become zero
    3 gate    gamma, decays to blocks' ends, beta e, scale e, d, e^gamma_last of a chunk
    4 score   Q K^T, then P, one chunk ahead of the state
    5 state   dS K^T from dS in 16 bits, and dO^T P; dV'^T
    6 state   Y^T; meanwhile scale e dO^T, dS decayed
    7 state   dS += (scale e dO^T) Q; meanwhile beta e Y^T; then the product with K
    8 state   write b' as the gradient of the end state of the segment before

Bounded by the latency of the chain 5, 6, 7; heads come in segment_map's order. Why this shape: it
is dstate_chain's chain, in the same units.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain import cumulated as chain
from qla_kernels.gdn.kernels.chain.forward import RawGates
from qla_kernels.gdn.kernels.chain.gated_tiles import SOURCE as GATED_TILES
from qla_kernels.gdn.kernels.chain.layout import GATE_ROWS, TILE, Rows
from qla_kernels.gdn.kernels.chain.roles import GATES, gate_role, load_role, score_role
from qla_kernels.gdn.kernels.chain.window import SOURCE, gradient_columns, warm_chunks
from qla_kernels.gdn.kernels.tables import sequence_span
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.record import Variables
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import Role, Schedule, Tile, free, full
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    dtype: str  # of q, k, dO
    K: int  # q and k have so many numbers or fewer: `size`


VARIANTS = tuple(Variant(dtype, K) for dtype in ("bfloat16", "float16") for K in (128, 64))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order what crosses warps, but for step 1
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the segment's length
    "tl.disable_shared_memory_reuse": True,  # copies are under way while a slow warp reads s_sum
}


def schedule(variant: Variant) -> Schedule:
    K, dtype = variant.K, variant.dtype
    slots = {"rows": 3, "gate": 4, "p": 2}
    return Schedule(
        roles=(
            Role(
                "state",
                warps=4,
                regs=240,
                waits=full("rows", "gate", "p"),
                signals=free("rows", "gate", "p"),
                computes="dS, dV', Y; b' out",
                uses=("wgmma",),
            ),
            score_role(120, "rows"),
            load_role(40, "q, k, dO, A", "rows"),
            gate_role(40, GATES),
            Role("spare", warps=2, regs=40, computes="fills the warpgroup"),
        ),
        rings=slots,
        tiles={
            "k": Tile((slots["rows"], CHUNK, K), dtype),
            "q": Tile((slots["rows"], CHUNK, K), dtype),
            "do": Tile((slots["rows"], CHUNK, TILE), dtype, swizzled=True),
            "a": Tile((slots["rows"], CHUNK, CHUNK), dtype),
            "p": Tile((slots["p"], CHUNK, CHUNK), dtype, swizzled=True),
            "gate": Tile((slots["gate"], GATE_ROWS, CHUNK), "float32"),
            "sum": Tile((12,), "float32"),  # a number a warp
        },
    )


def build(variant: Variant):
    plan = schedule(variant)
    K, dtype = variant.K, variant.dtype
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_tiles, capacity = T.dynamic("V, num_tiles, capacity")
    num_dht, num_bounds, size = T.dynamic("num_dht, num_bounds, size")
    rows, value_rows = (num_tokens, num_heads, size), (num_tokens, num_value_heads)

    @T.prim_func
    def segment_map_bwd(
        q: strided("q", "token head", rows, dtype),
        k: strided("k", "token head", rows, dtype),
        do: strided("do", "token head tile", (*value_rows, num_tiles, TILE), dtype),
        g_cum: T.Tensor(value_rows, "float32"),
        beta: T.Tensor(value_rows, "float32"),
        A: T.Tensor((*value_rows, CHUNK), dtype),
        bounds: T.Tensor((num_bounds,), "int32"),
        starts_of: T.Tensor((num_bounds,), "int32"),
        ends_of: T.Tensor((num_bounds,), "int32"),
        heads: T.Tensor((num_value_heads,), "int32"),
        dht: strided("dht", "n h k v", (num_dht, num_value_heads, K, V), "float32"),
        ends: T.Tensor((capacity, num_value_heads, V, K), "float32"),
        scale: T.float32,
        limit: T.float32,
        has_dht: T.int32,
    ):
        with T.Kernel(capacity * num_value_heads * num_tiles, threads=plan.threads) as block:
            T.import_source(GATED_TILES + SOURCE)
            s, ring = tiles(plan), rings(plan)
            item = Variables(
                "p n kh hv i_tile column has_end begin length num_chunks warm", unit="float32"
            )
            await_previous()
            item["i_tile"] = block % num_tiles
            item["column"] = item.i_tile * TILE
            item["hv"] = heads[block // num_tiles // capacity]
            item["p"] = block // num_tiles % capacity
            item["kh"] = item.hv // (num_value_heads // num_heads)
            item["n"] = ends_of[item.p]
            sequence_span(bounds, item.p, num_tokens, item.begin, item.length)
            if starts_of[item.p] >= 0:
                item["length"] = 0
            item["has_end"] = 0
            tx = T.get_thread_binding()
            if item.length > 0:
                gates = RawGates(g_cum, beta, None, 0, g_cum)
                item["warm"] = warm_chunks(  # 1
                    K, k, gates, None, 0, s.sum, item, limit, at_end=False, cumulated=True
                )
                if item.warm > 0:
                    item["length"] = T.min(item.length, item.warm * CHUNK)
                elif item.n >= 0:
                    item["has_end"] = has_dht
            item["num_chunks"] = T.ceildiv(item.length, CHUNK)
            item["unit"] = 1  # as in dstate_chain
            if dtype == "bfloat16":
                if scale != 0:
                    item["unit"] = scale

            if tx < plan.end("state"):
                T.set_max_nreg(plan.role("state").regs, 1)
                gradient_columns(variant, s, ring, dht, ends, item)
            elif tx < plan.end("score"):
                T.set_max_nreg(plan.role("score").regs, 0)
                chain.score(s, ring, item.num_chunks, scale / item.unit, plan.start("score"))
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    inputs = [
                        Rows(k, (item.kh,), s.k),
                        Rows(q, (item.kh,), s.q),
                        Rows(do, (item.hv, item.i_tile), s.do),
                        Rows(A, (item.hv,), s.a),
                    ]
                    chain.load(inputs, ring.rows, ring.tail, item, True)
                elif tx < plan.end("gate"):
                    chain.gate(g_cum, beta, s.gate, ring.gate, item, True, scale)

    return segment_map_bwd
