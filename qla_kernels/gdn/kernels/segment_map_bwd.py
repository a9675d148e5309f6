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
from qla_kernels.gdn.kernels.chain.cumulated import gate, load, score
from qla_kernels.gdn.kernels.chain.gated_tiles import SOURCE as GATED_TILES
from qla_kernels.gdn.kernels.chain.layout import GATE_ROWS, TILE, Rows
from qla_kernels.gdn.kernels.chain.window import SOURCE, gradient_columns, warm_chunks
from qla_kernels.gdn.kernels.tables import sequence_span
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.language import make_full_bank_swizzled_layout
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import Role, Schedule


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

BACKWARD_RINGS = {"rows": 3, "gate": 4, "p": 2}
CTA_WARPS = 12


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(
            Role(
                "state",
                warps=4,
                regs=240,
                waits=("rows_full", "gate_full", "p_full"),
                signals=("rows_free", "gate_free", "p_free"),
                computes="dS, dV', Y; b' out",
                uses=("wgmma",),
            ),
            Role(
                "score",
                warps=4,
                regs=120,
                waits=("rows_full", "gate_full", "p_free"),
                signals=("rows_free", "gate_free", "p_full"),
                computes="P",
                uses=("wgmma",),
            ),
            Role(
                "load",
                warps=1,
                regs=40,
                waits=("rows_free", "tail_full"),
                signals=("rows_full", "tail_full"),
                computes="q, k, dO, A",
                uses=("tma_load",),
            ),
            Role(
                "gate",
                warps=1,
                regs=40,
                waits=("gate_free",),
                signals=("gate_full",),
                computes="gamma and its exponentials, beta",
            ),
            Role("spare", warps=2, regs=40, computes="fills the warpgroup"),
        ),
        rings=BACKWARD_RINGS,
        # q, k, dO, A; P; gates; sums; barriers and alignment
        smem_bytes=BACKWARD_RINGS["rows"] * CHUNK * (2 * variant.K + TILE + CHUNK) * 2
        + BACKWARD_RINGS["p"] * CHUNK * CHUNK * 2
        + BACKWARD_RINGS["gate"] * GATE_ROWS * CHUNK * 4
        + CTA_WARPS * 4
        + 1024,
    )


def build(variant: Variant):
    plan = schedule(variant)
    K = variant.K
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_tiles, capacity = T.dynamic("V, num_tiles, capacity")
    num_dht, num_bounds, size = T.dynamic("num_dht, num_bounds, size")
    q_token, q_head, k_token, k_head = T.dynamic("q_token, q_head, k_token, k_head")
    do_token, do_head, do_tile = T.dynamic("do_token, do_head, do_tile")
    dht_n, dht_h, dht_k, dht_v = T.dynamic("dht_n, dht_h, dht_k, dht_v")

    @T.prim_func
    def segment_map_bwd(
        q: T.StridedTensor((num_tokens, num_heads, size), (q_token, q_head, 1), variant.dtype),
        k: T.StridedTensor((num_tokens, num_heads, size), (k_token, k_head, 1), variant.dtype),
        do: T.StridedTensor(
            (num_tokens, num_value_heads, num_tiles, TILE),
            (do_token, do_head, do_tile, 1),
            variant.dtype,
        ),
        g_cum: T.Tensor((num_tokens, num_value_heads), "float32"),
        beta: T.Tensor((num_tokens, num_value_heads), "float32"),
        A: T.Tensor((num_tokens, num_value_heads, CHUNK), variant.dtype),
        bounds: T.Tensor((num_bounds,), "int32"),
        starts_of: T.Tensor((num_bounds,), "int32"),
        ends_of: T.Tensor((num_bounds,), "int32"),
        heads: T.Tensor((num_value_heads,), "int32"),
        dht: T.StridedTensor(
            (num_dht, num_value_heads, K, V), (dht_n, dht_h, dht_k, dht_v), "float32"
        ),
        ends: T.Tensor((capacity, num_value_heads, V, K), "float32"),
        scale: T.float32,
        limit: T.float32,
        has_dht: T.int32,
    ):
        with T.Kernel(capacity * num_value_heads * num_tiles, threads=plan.threads) as block:
            T.import_source(GATED_TILES + SOURCE)
            s_k = T.alloc_shared((BACKWARD_RINGS["rows"], CHUNK, K), variant.dtype)
            s_q = T.alloc_shared((BACKWARD_RINGS["rows"], CHUNK, K), variant.dtype)
            s_do = T.alloc_shared((BACKWARD_RINGS["rows"], CHUNK, TILE), variant.dtype)
            s_a = T.alloc_shared((BACKWARD_RINGS["rows"], CHUNK, CHUNK), variant.dtype)
            s_p = T.alloc_shared((BACKWARD_RINGS["p"], CHUNK, CHUNK), variant.dtype)
            s_gate = T.alloc_shared((BACKWARD_RINGS["gate"], GATE_ROWS, CHUNK), "float32")
            s_sum = T.alloc_shared((CTA_WARPS,), "float32")
            T.annotate_layout({s: make_full_bank_swizzled_layout(s) for s in (s_do, s_p)})
            rows_full = T.alloc_barrier([plan.arrivals("rows_full")] * BACKWARD_RINGS["rows"])
            rows_free = T.alloc_barrier([plan.arrivals("rows_free")] * BACKWARD_RINGS["rows"])
            gate_full = T.alloc_barrier([plan.arrivals("gate_full")] * BACKWARD_RINGS["gate"])
            gate_free = T.alloc_barrier([plan.arrivals("gate_free")] * BACKWARD_RINGS["gate"])
            p_full = T.alloc_barrier([plan.arrivals("p_full")] * BACKWARD_RINGS["p"])
            p_free = T.alloc_barrier([plan.arrivals("p_free")] * BACKWARD_RINGS["p"])
            tail_full = T.alloc_barrier([plan.arrivals("tail_full")])
            rows = Ring(rows_full, rows_free, BACKWARD_RINGS["rows"])
            gates = Ring(gate_full, gate_free, BACKWARD_RINGS["gate"])
            p_ring = Ring(p_full, p_free, BACKWARD_RINGS["p"])

            p, n, kh, hv = (T.alloc_var("int32") for _ in range(4))
            i_tile, column, has_end = (T.alloc_var("int32") for _ in range(3))
            begin, length, num_chunks = (T.alloc_var("int32") for _ in range(3))
            warm = T.alloc_var("int32")
            await_previous()
            i_tile = block % num_tiles
            column = i_tile * TILE
            hv = heads[block // num_tiles // capacity]
            p = block // num_tiles % capacity
            kh = hv // (num_value_heads // num_heads)
            n = ends_of[p]
            sequence_span(bounds, p, num_tokens, begin, length)
            if starts_of[p] >= 0:
                length = 0
            has_end = 0
            tx = T.get_thread_binding()
            if length > 0:
                warm = warm_chunks(  # 1
                    K, k, g_cum, None, 0, beta, None, 0, s_sum, begin, length, kh, hv, limit,
                    at_end=False, cumulated=True,
                )  # fmt: skip
                if warm > 0:
                    length = T.min(length, warm * CHUNK)
                elif n >= 0:
                    has_end = has_dht
            num_chunks = T.ceildiv(length, CHUNK)
            unit = T.alloc_var("float32")  # as in dstate_chain
            unit = 1
            if variant.dtype == "bfloat16":
                if scale != 0:
                    unit = scale

            if tx < plan.end("state"):
                T.set_max_nreg(plan.role("state").regs, 1)
                gradient_columns(
                    K, variant.dtype, dht, ends, s_q, s_k, s_do, s_a, s_p, s_gate, rows, gates,
                    p_ring, num_chunks, p, n, hv, column, has_end, unit,
                )  # fmt: skip
            elif tx < plan.end("score"):
                T.set_max_nreg(plan.role("score").regs, 0)
                score(
                    s_q, s_k, s_gate, s_p, rows, gates, p_ring, num_chunks, scale / unit,
                    plan.start("score"),
                )  # fmt: skip
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    load(
                        [
                            Rows(k, (kh,), s_k),
                            Rows(q, (kh,), s_q),
                            Rows(do, (hv, i_tile), s_do),
                            Rows(A, (hv,), s_a),
                        ],
                        rows, tail_full, begin, length, num_chunks, True,
                    )  # fmt: skip
                elif tx < plan.end("gate"):
                    gate(
                        g_cum, beta, s_gate, gates, begin, length, num_chunks, hv, True,
                        scale / unit,
                    )  # fmt: skip

    return segment_map_bwd
