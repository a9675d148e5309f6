"""wide_fwd -- fused_fwd's chain for K = 256: A and P are given.

CTAs walk items, a sequence, value head and V tile. Per chunk (C = 64 tokens; gamma, e = e^gamma and
d = e^(gamma_last - gamma) restart in each; S is the state, kept transposed, [V, K], in fp32
registers from the first chunk to the last):
    W^T   = beta V^T - (beta e) S K^T                                               [V, C]
    V'^T  = W^T A^T                                                                 [V, C]
    O^T   = (scale e) S Q^T + V'^T P^T                                              [V, C]
    S     = e^gamma_last S + (d V'^T) K                                             [V, K]

Steps (numbers appear again in the roles):
    1 load    q, k, v, A and P of a chunk; rows past a tail's end become zero
    2 gate    beta, beta e, scale e, d, e^gamma_last of a chunk
    3 state   S to 16 bits, 32 columns of K at a time; S K^T and S Q^T
    4 state   W^T; V'^T
    5 state   S and O^T
    6 out     O: TMA, or predicated rows of a tail

Bounded by the tensor cores with 128 columns of V, by the latency of the chain with 64.
Why this shape: S^T of 64 columns of V takes 128 registers of a thread, half of what there is. The
other half has room for three 64 x 64 accumulators, but not for S^T in 16 bits, which takes 64: so
it is rounded while the products run that read it. No registers are left for warpgroups that make A
and P, and these depend on K alone, not on the tile of V: solve_score makes them once for all tiles.
As in fused_fwd, two state warpgroups alternate on the tensor cores and share the tiles of q and k,
which are two thirds of the bytes that a CTA reads.
"""

import functools
from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import (
    GATE_ROWS,
    TILE,
    Rows,
    first_turn,
    last_turn,
    named_barriers,
    turns,
)
from qla_kernels.gdn.kernels.chain.transfer import clear_padding, load
from qla_kernels.gdn.kernels.chain.wide import (
    SOURCE,
    enter,
    find,
    leave,
    load_gates,
    state,
    store,
)
from qla_kernels.gdn.kernels.tables import inside
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.language import make_full_bank_swizzled_layout
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Role, Schedule


class Variant(NamedTuple):
    dtype: str  # of q, k, v, o, A, P
    K: int
    tile_v: int  # columns of V a CTA computes: 64 or 128

    @property
    def states(self) -> int:
        return self.tile_v // TILE


VARIANTS = tuple(
    Variant(dtype, 256, tile_v) for dtype in ("bfloat16", "float16") for tile_v in (128, 64)
)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the sequence's length
    "tl.disable_buffer_init_check": True,  # staging tiles: see `put_out`
}


def schedule(variant: Variant) -> Schedule:
    rings = {"q": 2, "k": 2, "v": 2, "gate": 2, "a": 2, "p": 2, "o": variant.states, "tail": 5}
    return Schedule(
        roles=(
            Role(
                "state",
                warps=4 * variant.states,
                regs=240 if variant.states == 2 else 256,
                waits=("q_full", "k_full", "v_full", "gate_full", "a_full", "p_full", "o_free"),
                signals=(
                    "q_free",
                    "k_free",
                    "v_free",
                    "gate_free",
                    "a_free",
                    "p_free",
                    ("o_full", WARPGROUP_THREADS),
                ),
                computes="S, W, V', O",
                uses=("wgmma",),
            ),
            Role(
                "load",
                warps=1,
                regs=24,
                waits=("q_free", "k_free", "v_free", "a_free", "p_free", "tail_full"),
                signals=("q_full", "k_full", "v_full", "a_full", "p_full", "tail_full"),
                computes="q, k, v, A, P",
                uses=("tma_load",),
            ),
            Role(
                "gates",
                warps=1,
                regs=24,
                waits=("gate_free",),
                signals=("gate_full",),
                computes="exponentials of gamma, beta",
                uses=("tma_load",),
            ),
            Role(
                "store",
                warps=1,
                regs=24,
                waits=("o_full",),
                signals=("o_free",),
                computes="O out",
                uses=("tma_store",),
            ),
            Role("padding", warps=1, regs=24, computes="zeros into rows of no sequence"),
        ),
        rings=rings,
        named=named_barriers(variant.states),
        # q and k; v and O; A and P; gates; barriers and alignment
        smem_bytes=(rings["q"] + rings["k"]) * CHUNK * variant.K * 2
        + rings["v"] * CHUNK * variant.tile_v * 2
        + rings["o"] * CHUNK * TILE * 2
        + (rings["a"] + rings["p"]) * CHUNK * CHUNK * 2
        + rings["gate"] * GATE_ROWS * CHUNK * 4
        + 1024,
    )


def build(variant: Variant):
    plan = schedule(variant)
    K, states, rings = variant.K, variant.states, plan.rings
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_tiles, num_columns, num_sequences = T.dynamic("V, num_tiles, num_columns, num_sequences")
    num_h0, num_ht, span_step = T.dynamic("num_h0, num_ht, span_step")
    num_starts, num_ends = T.dynamic("num_starts, num_ends")
    capacity, num_firsts = T.dynamic("capacity, num_firsts")
    q_token, q_head, k_token, k_head = T.dynamic("q_token, q_head, k_token, k_head")
    v_token, v_head, v_tile = T.dynamic("v_token, v_head, v_tile")
    h0_n, h0_h, h0_k, h0_v = T.dynamic("h0_n, h0_h, h0_k, h0_v")
    ht_n, ht_h, ht_k, ht_v = T.dynamic("ht_n, ht_h, ht_k, ht_v")

    @T.prim_func
    def wide_fwd(
        q: T.StridedTensor((num_tokens, num_heads, K), (q_token, q_head, 1), variant.dtype),
        k: T.StridedTensor((num_tokens, num_heads, K), (k_token, k_head, 1), variant.dtype),
        v: T.StridedTensor(
            (num_tokens, num_value_heads, num_tiles, variant.tile_v),
            (v_token, v_head, v_tile, 1),
            variant.dtype,
        ),
        A: T.Tensor((num_tokens, num_value_heads, 1, CHUNK), variant.dtype),
        P: T.Tensor((num_tokens, num_value_heads, 1, CHUNK), variant.dtype),
        gates: T.Tensor((capacity, num_value_heads, GATE_ROWS, CHUNK), "float32"),
        first_chunk: T.Tensor((num_firsts,), "int32"),
        spans: T.StridedTensor((num_sequences, 2), (span_step, 1), "int32"),
        starts_of: T.Tensor((num_starts,), "int32"),
        ends_of: T.Tensor((num_ends,), "int32"),
        h0: T.StridedTensor((num_h0, num_value_heads, K, V), (h0_n, h0_h, h0_k, h0_v), "float32"),
        o: T.Tensor((num_tokens, num_value_heads, num_columns, TILE), variant.dtype),
        ht: T.StridedTensor((num_ht, num_value_heads, K, V), (ht_n, ht_h, ht_k, ht_v), "float32"),
        has_h0: T.int32,
        has_ht: T.int32,
    ):
        with T.Kernel(num_sequences * num_tiles, num_value_heads, threads=plan.block) as (x, hv):
            T.import_source(SOURCE)
            s_q = T.alloc_shared((rings["q"], CHUNK, K), variant.dtype)
            s_k = T.alloc_shared((rings["k"], CHUNK, K), variant.dtype)
            s_v = T.alloc_shared((rings["v"], CHUNK, variant.tile_v), variant.dtype)
            s_a = T.alloc_shared((rings["a"], CHUNK, CHUNK), variant.dtype)
            s_p = T.alloc_shared((rings["p"], CHUNK, CHUNK), variant.dtype)
            s_gate = T.alloc_shared((rings["gate"], GATE_ROWS, CHUNK), "float32")
            s_o = T.alloc_shared((rings["o"], CHUNK, TILE), variant.dtype)
            tiles = (s_k, s_q, s_v, s_a, s_p, s_o)
            T.annotate_layout({s: make_full_bank_swizzled_layout(s) for s in tiles})
            q_full = T.alloc_barrier([plan.arrivals("q_full")] * rings["q"])
            q_free = T.alloc_barrier([plan.arrivals("q_free")] * rings["q"])
            k_full = T.alloc_barrier([plan.arrivals("k_full")] * rings["k"])
            k_free = T.alloc_barrier([plan.arrivals("k_free")] * rings["k"])
            v_full = T.alloc_barrier([plan.arrivals("v_full")] * rings["v"])
            v_free = T.alloc_barrier([plan.arrivals("v_free")] * rings["v"])
            gate_full = T.alloc_barrier([plan.arrivals("gate_full")] * rings["gate"])
            gate_free = T.alloc_barrier([plan.arrivals("gate_free")] * rings["gate"])
            a_full = T.alloc_barrier([plan.arrivals("a_full")] * rings["a"])
            a_free = T.alloc_barrier([plan.arrivals("a_free")] * rings["a"])
            p_full = T.alloc_barrier([plan.arrivals("p_full")] * rings["p"])
            p_free = T.alloc_barrier([plan.arrivals("p_free")] * rings["p"])
            o_full = T.alloc_barrier([plan.arrivals("o_full")] * rings["o"])
            o_free = T.alloc_barrier([plan.arrivals("o_free")] * rings["o"])
            tail_full = T.alloc_barrier([plan.arrivals("tail_full")] * rings["tail"])
            q_ring = Ring(q_full, q_free, rings["q"])
            k_ring = Ring(k_full, k_free, rings["k"])
            v_ring = Ring(v_full, v_free, rings["v"])
            gate_ring = Ring(gate_full, gate_free, rings["gate"])
            a_ring = Ring(a_full, a_free, rings["a"])
            p_ring = Ring(p_full, p_free, rings["p"])
            o_ring = Ring(o_full, o_free, rings["o"])

            n, i_tile = T.alloc_var("int32"), T.alloc_var("int32")
            begin, length = T.alloc_var("int32"), T.alloc_var("int32")
            num_chunks = T.alloc_var("int32")
            found = (n, i_tile, begin, length, num_chunks)
            find_item = functools.partial(find, x, spans, num_tokens, num_tiles, *found)
            find_again = functools.partial(
                find, x, spans, num_tokens, T.shfl_sync(num_tiles, 0), *found
            )
            turn = turns(plan)
            T.pdl_sync()
            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            if warpgroup < states:
                T.set_max_nreg(plan.role("state").regs, 1)
                find_item()
                num_chunks = T.shfl_sync(num_chunks, 0)  # uniform, and known to be
                r_s = T.alloc_fragment((TILE, K), "float32")  # S^T: here from first to last chunk
                enter(
                    K, r_s, h0, has_h0, starts_of, n, hv, i_tile * variant.tile_v + warpgroup * TILE
                )
                first_turn(turn, warpgroup)
                state(
                    states, K, variant.dtype, r_s, s_q, s_k, s_v, s_gate, s_a, s_p, s_o,
                    q_ring, k_ring, v_ring, gate_ring, a_ring, p_ring, o_ring, turn, num_chunks,
                )  # fmt: skip
                last_turn(turn, warpgroup)
                find_again()  # there were no registers to keep n and i_tile
                leave(
                    K, r_s, ht, has_ht, ends_of, n, hv, i_tile * variant.tile_v + warpgroup * TILE
                )
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < 32:
                    find_item()
                    group = num_value_heads // num_heads
                    inputs = [  # in the order in which the state gives their slots back
                        (Rows(q, (hv // group,), s_q), q_ring),
                        (Rows(v, (hv, i_tile), s_v), v_ring),
                        (Rows(A, (hv, 0), s_a), a_ring),
                        (Rows(P, (hv, 0), s_p), p_ring),
                        (Rows(k, (hv // group,), s_k), k_ring),
                    ]
                    load(inputs, [], 0, tail_full, begin, length, 0)
                elif tx < 64:
                    find_item()
                    load_gates(gates, first_chunk[n], hv, s_gate, gate_ring, num_chunks)
                elif tx < 96:
                    find_item()
                    store(states, o, s_o, o_ring, begin, length, hv, i_tile * states)
                else:
                    find_item()
                    begin = inside(spans[num_sequences - 1, 1], num_tokens) + n
                    if has_h0 == 2:  # other tokens belong to other nodes of a tree
                        begin = num_tokens
                    for w in range(states):
                        clear_padding(o, begin, num_tokens, num_sequences, hv, i_tile * states + w)

    return wide_fwd
