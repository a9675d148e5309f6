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

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import (
    CHAIN_PASSES,
    GATE_ROWS,
    TILE,
    Rows,
    StateRows,
    first_turn,
    last_turn,
    named_barriers,
    turns,
)
from qla_kernels.gdn.kernels.chain.roles import load_role, store_role
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
from qla_kernels.tile.record import Variables
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Role, Schedule, Tile, free, full
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


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

PASS_CONFIGS = CHAIN_PASSES


def schedule(variant: Variant) -> Schedule:
    dtype = variant.dtype
    slots = {"q": 2, "k": 2, "v": 2, "gate": 2, "a": 2, "p": 2, "o": variant.states, "tail": 5}
    return Schedule(
        roles=(
            Role(
                "state",
                warps=4 * variant.states,
                regs=240 if variant.states == 2 else 256,
                waits=(*full("q", "k", "v", "gate", "a", "p"), "o_free"),
                signals=(*free("q", "k", "v", "gate", "a", "p"), ("o_full", WARPGROUP_THREADS)),
                computes="S, W, V', O",
                uses=("wgmma",),
            ),
            load_role(24, "q, k, v, A, P", "q", "k", "v", "a", "p"),
            load_role(24, "exponentials of gamma, beta", "gate", name="gates", tail=False),
            store_role(24, "O out", "o"),
            Role("padding", warps=1, regs=24, computes="zeros into rows of no sequence"),
        ),
        rings=slots,
        named=named_barriers(variant.states),
        tiles={
            "q": Tile((slots["q"], CHUNK, variant.K), dtype, swizzled=True),
            "k": Tile((slots["k"], CHUNK, variant.K), dtype, swizzled=True),
            "v": Tile((slots["v"], CHUNK, variant.tile_v), dtype, swizzled=True),
            "a": Tile((slots["a"], CHUNK, CHUNK), dtype, swizzled=True),
            "p": Tile((slots["p"], CHUNK, CHUNK), dtype, swizzled=True),
            "gate": Tile((slots["gate"], GATE_ROWS, CHUNK), "float32"),
            "o": Tile((slots["o"], CHUNK, TILE), dtype, swizzled=True),
        },
    )


def build(variant: Variant):
    plan = schedule(variant)
    K, dtype, states = variant.K, variant.dtype, variant.states
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_tiles, num_columns, num_sequences = T.dynamic("V, num_tiles, num_columns, num_sequences")
    num_h0, num_ht, num_starts, num_ends = T.dynamic("num_h0, num_ht, num_starts, num_ends")
    capacity, num_firsts = T.dynamic("capacity, num_firsts")
    rows, value_rows = (num_tokens, num_heads, K), (num_tokens, num_value_heads)

    @T.prim_func
    def wide_fwd(
        q: strided("q", "token head", rows, dtype),
        k: strided("k", "token head", rows, dtype),
        v: strided("v", "token head tile", (*value_rows, num_tiles, variant.tile_v), dtype),
        A: T.Tensor((*value_rows, 1, CHUNK), dtype),
        P: T.Tensor((*value_rows, 1, CHUNK), dtype),
        gates: T.Tensor((capacity, num_value_heads, GATE_ROWS, CHUNK), "float32"),
        first_chunk: T.Tensor((num_firsts,), "int32"),
        spans: strided("span", "step", (num_sequences, 2), "int32"),
        starts_of: T.Tensor((num_starts,), "int32"),
        ends_of: T.Tensor((num_ends,), "int32"),
        h0: strided("h0", "n h k v", (num_h0, num_value_heads, K, V), "float32"),
        o: T.Tensor((*value_rows, num_columns, TILE), dtype),
        ht: strided("ht", "n h k v", (num_ht, num_value_heads, K, V), "float32"),
        has_h0: T.int32,
        has_ht: T.int32,
    ):
        with T.Kernel(num_sequences * num_tiles, num_value_heads, threads=plan.block) as (x, hv):
            T.import_source(SOURCE)
            s, ring = tiles(plan), rings(plan)
            item = Variables("n i_tile begin length num_chunks")
            here = (x, spans, num_tokens)
            turn = turns(plan)
            T.pdl_sync()
            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            if warpgroup < states:
                T.set_max_nreg(plan.role("state").regs, 1)
                find(*here, num_tiles, item)
                item["num_chunks"] = T.shfl_sync(item.num_chunks, 0)  # uniform, and known to be
                r_s = T.alloc_fragment((TILE, K), "float32")  # S^T: here from first to last chunk
                enters, leaves = StateRows(h0, has_h0, starts_of), StateRows(ht, has_ht, ends_of)
                enter(variant, r_s, enters, warpgroup, item, hv)
                first_turn(turn, warpgroup)
                state(variant, r_s, s, ring, turn, item.num_chunks)
                last_turn(turn, warpgroup)
                find(*here, T.shfl_sync(num_tiles, 0), item)  # there were no registers to keep it
                leave(variant, r_s, leaves, warpgroup, item, hv)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < 32:
                    find(*here, num_tiles, item)
                    group = num_value_heads // num_heads
                    inputs = [  # in the order in which the state gives their slots back
                        (Rows(q, (hv // group,), s.q), ring.q),
                        (Rows(v, (hv, item.i_tile), s.v), ring.v),
                        (Rows(A, (hv, 0), s.a), ring.a),
                        (Rows(P, (hv, 0), s.p), ring.p),
                        (Rows(k, (hv // group,), s.k), ring.k),
                    ]
                    load(inputs, [], 0, ring.tail, item.begin, item.length, 0)
                elif tx < 64:
                    find(*here, num_tiles, item)
                    load_gates(gates, first_chunk[item.n], hv, s.gate, ring.gate, item.num_chunks)
                elif tx < 96:
                    find(*here, num_tiles, item)
                    store(states, o, s.o, ring.o, item, hv)
                else:
                    find(*here, num_tiles, item)
                    item["begin"] = inside(spans[num_sequences - 1, 1], num_tokens) + item.n
                    if has_h0 == 2:  # other tokens belong to other nodes of a tree
                        item["begin"] = num_tokens
                    padding = (item.begin, num_tokens, num_sequences, hv)
                    for w in range(states):
                        clear_padding(o, *padding, item.i_tile * states + w)

    return wide_fwd
