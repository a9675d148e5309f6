"""fused_fwd -- the gated delta rule, forward: CTAs walk items, a sequence, value head and V tile.

Per chunk (C = 64 tokens; gamma, e = e^gamma and d = e^(gamma_last - gamma) restart in each; S is
the state, kept transposed, [V, K], in fp32 registers from the first chunk to the last):
    L_ij  = beta_i e^(gamma_i - gamma_j) <k_i, k_j>, i > j                          [C, C]
    A     = (I + L)^-1                                                              [C, C]
    P_ij  = scale e^(gamma_i - gamma_j) <q_i, k_j>, i >= j                          [C, C]
    W^T   = beta V^T - (beta e) S K^T                                               [V, C]
    V'^T  = W^T A^T                                                                 [V, C]
    O^T   = (scale e) S Q^T + V'^T P^T                                              [V, C]
    S     = e^gamma_last S + (d V'^T) K                                             [V, K]

Steps (numbers appear again in the roles):
    1 load    q, k, v of a chunk, and A where it is given; rows past a tail's end become zero
    2 gate    gamma, beta, decays to blocks' ends, beta e, scale e, d, e^gamma_last of a chunk
    3 solve   K K^T, then A, unless given; Q K^T, then P: up to two chunks ahead of the state.
              The inverses of A's diagonal blocks are a long chain of small steps: if there is one
              solving warpgroup, a separate warp makes them, while that warpgroup works on the next
              chunk
    4 state   S to 16 bits; S K^T and S Q^T
    5 state   W^T; V'^T
    6 state   S and O^T
    7 out     O, and A if the backward will want it: TMA, or predicated rows of a tail

Bounded by latency, then by shared memory, which the right operands of all products come from.
Why this shape: the chain S -> W -> V' -> S determines the time of a chunk, so nothing on it leaves
the registers: every product's left operand is the previous accumulator, rounded in place, and its
right operand is a tile that both state warpgroups share. A state warpgroup owns 64 columns of V for
the whole sequence. Two of them alternate on the tensor cores, each computing while the other's
products run, and leave registers for one solving warpgroup. With a single state warpgroup there is
room for two solving ones, which take alternate chunks. The solve's small dependent products wait
for the state's large ones, so for long chains it may be faster to solve beforehand, in kkt_solve,
and to pass A.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.forward import OnTheWay, gate, state
from qla_kernels.gdn.kernels.chain.gated_tiles import SCRATCH_BYTES, SOURCE
from qla_kernels.gdn.kernels.chain.items import After, count_chunks, locate
from qla_kernels.gdn.kernels.chain.layout import (
    GATE_ROWS,
    TILE,
    Rows,
    first_turn,
    last_turn,
    named_barriers,
    turns,
)
from qla_kernels.gdn.kernels.chain.pools import SOURCE as POOLS
from qla_kernels.gdn.kernels.chain.shares import SOURCE as SHARES
from qla_kernels.gdn.kernels.chain.shares import Shares, table_types
from qla_kernels.gdn.kernels.chain.solve import clear_above, invert, score, solve, solve_in_teams
from qla_kernels.gdn.kernels.chain.transfer import clear_padding, clear_saved, load, store
from qla_kernels.gdn.kernels.tables import inside
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.language import make_full_bank_swizzled_layout
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Role, Schedule, Signal


class Variant(NamedTuple):
    dtype: str  # of q, k, v, o, A
    K: int  # q and k have so many numbers or fewer: `size`
    tile_v: int  # columns of V a CTA computes: 64 or 128
    solves: bool  # or is given A
    pool: str = ""  # dtype of states that are in slots of a pool
    shares: bool = False  # CTAs have equal shares of all chunks, which cut items: chain/shares.py

    @property
    def states(self) -> int:
        return self.tile_v // TILE

    @property
    def teams(self) -> int:
        """Number of warpgroups that make A and P, each for its own chunks."""
        return 2 if self.solves and self.states == 1 else 1

    @property
    def first_state(self) -> int:
        """The first state warpgroup: two of them come after the solving one that they wait for."""
        return self.teams if self.states == 2 else 0

    @property
    def first_solve(self) -> int:
        """The first warpgroup that makes A and P."""
        return 0 if self.states == 2 else self.states

    @property
    def pooled(self) -> bool:
        return self.pool != ""

    @property
    def keeps(self) -> bool:
        """True if states on the way can be kept."""
        return self.pooled and self.solves

    @property
    def inverts(self) -> bool:
        """True if a separate warp inverts A's diagonal blocks."""
        return self.solves and self.states == 2


CHOICES = (64, True), (128, True), (128, False)  # tile_v and solves
# Pools are of servers, whose models compute in bf16 and have K = 128. With a pool in bf16 the state
# role of 128 columns spills, and ptxas serialises its products.
VARIANTS = tuple(
    Variant(dtype, K, tile_v, solves)
    for dtype in ("bfloat16", "float16")
    for K in (128, 64)
    for tile_v, solves in CHOICES
) + tuple(
    Variant("bfloat16", 128, tile_v, solves, pool)
    for pool, choices in (("float32", CHOICES), ("bfloat16", CHOICES[:1]))
    for tile_v, solves in choices
)
VARIANTS += tuple(Variant(dtype, 128, 128, True, shares=True) for dtype in ("bfloat16", "float16"))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the sequence's length
    "tl.disable_buffer_init_check": True,  # staging tiles: see `put_out`
}


def schedule(variant: Variant) -> Schedule:
    state_regs, solve_regs, load_regs = 232, 120, 40
    if variant.states == 2:
        state_regs, solve_regs, load_regs = (192, 88, 40) if variant.K == 128 else (176, 96, 64)
    elif variant.keeps:  # what it keeps on the way has a place and a number of chunks
        state_regs, solve_regs = 248, 112
    rings = {"k": 3, "q": 3, "v": 2, "gate": 4, "a": 2, "p": 2, "o": variant.states}
    rings["tail"] = 3 if variant.solves else 4  # tensors
    if variant.inverts:
        rings |= {"k": 4, "q": 2, "l": 2}
    elif variant.solves:
        rings |= {"k": 4, "q": 4}

    def solving(*signals: Signal) -> tuple[Signal, ...]:
        return signals if variant.solves else ()

    def given(*names: str) -> tuple[str, ...]:
        return () if variant.solves else names

    def inverting(*names: str) -> tuple[str, ...]:
        return names if variant.inverts else ()

    chain_role = Role(
        "state",
        warps=4 * variant.states,
        regs=state_regs,
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
    )
    solving_role = Role(
        "solve" if variant.solves else "score",
        warps=4 * variant.teams,
        regs=solve_regs,
        waits=(
            "q_full",
            "k_full",
            "gate_full",
            *inverting("l_free"),
            *(("a_free",) if variant.solves and not variant.inverts else ()),
            "p_free",
        ),
        signals=(
            *((s, WARPGROUP_THREADS) for s in ("q_free", "k_free", "gate_free", "p_full")),
            *inverting("l_full"),
            *solving(("a_full", WARPGROUP_THREADS)),
        ),
        computes="A, P" if variant.solves else "P",
        uses=("wgmma", *solving("mma")),
    )
    return Schedule(
        roles=(
            *((solving_role, chain_role) if variant.first_state else (chain_role, solving_role)),
            Role(
                "load",
                warps=1,
                regs=load_regs,
                waits=("q_free", "k_free", "v_free", *given("a_free"), "tail_full"),
                signals=("q_full", "k_full", "v_full", *given("a_full"), "tail_full"),
                computes="q, k, v" + ", A" * (not variant.solves),
                uses=("tma_load",),
            ),
            Role(
                "gate",
                warps=1,
                regs=load_regs,
                waits=("gate_free",),
                signals=("gate_full",),
                computes="gamma and its exponentials, beta" + "; g_cum out" * variant.solves,
            ),
            Role(
                "store",
                warps=1,
                regs=load_regs,
                waits=("o_full", *solving("a_full")),
                signals=("o_free", *solving("a_free")),
                computes="O" + " and A" * variant.solves + " out",
                uses=("tma_store",),
            ),
            Role(
                "invert" if variant.inverts else "padding",
                warps=1,
                regs=load_regs,
                waits=inverting("l_full", "a_free"),
                signals=inverting("l_free"),
                computes="A's diagonal blocks; " * variant.inverts
                + "zeros into rows of no sequence",
                uses=inverting("mma"),
            ),
        ),
        rings=rings,
        named=named_barriers(variant.states, variant.teams if variant.solves else 0),
        # q and k; v and O; A and P; gates; scratch; barriers and alignment
        smem_bytes=(rings["q"] + rings["k"]) * CHUNK * variant.K * 2
        + rings["v"] * CHUNK * variant.tile_v * 2
        + rings["o"] * CHUNK * TILE * 2
        + (rings["a"] + rings["p"]) * CHUNK * CHUNK * 2
        + rings["gate"] * GATE_ROWS * CHUNK * 4
        + 2 * SCRATCH_BYTES * variant.solves
        + 3 * WARPGROUP_THREADS * 4 * variant.states * variant.keeps
        + 1024,
    )


def build(variant: Variant):
    plan = schedule(variant)
    K, states, rings = variant.K, variant.states, plan.rings
    first_state, first_solve = variant.first_state, variant.first_solve

    def of_states(warpgroup):
        before_the_end = warpgroup < first_state + states
        return (warpgroup >= first_state) & before_the_end if first_state else before_the_end

    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_tiles, num_columns, num_sequences = T.dynamic("V, num_tiles, num_columns, num_sequences")
    num_h0, num_ht, saved_tokens = T.dynamic("num_h0, num_ht, saved_tokens")
    span_step, num_starts, num_ends = T.dynamic("span_step, num_starts, num_ends")
    q_token, q_head, k_token, k_head = T.dynamic("q_token, q_head, k_token, k_head")
    v_token, v_head, v_tile = T.dynamic("v_token, v_head, v_tile")
    h0_n, h0_h, h0_k, h0_v = T.dynamic("h0_n, h0_h, h0_k, h0_v")
    ht_n, ht_h, ht_k, ht_v = T.dynamic("ht_n, ht_h, ht_k, ht_v")
    kept_n, kept_h, kept_k, kept_v = T.dynamic("kept_n, kept_h, kept_k, kept_v")
    num_kept, num_firsts, num_untils = T.dynamic("num_kept, num_firsts, num_untils")
    kept_size, size = T.dynamic("kept_size, size")
    held = variant.pool or "float32"
    entry, steps = (num_kept, num_value_heads, K, V), (kept_n, kept_h, kept_k, kept_v)
    kept_type = T.StridedTensor(entry, steps, "float32")  # not written
    if variant.pooled:
        kept_type = T.StridedTensor((*entry, kept_size), (*steps, 1), "uint8")
    entries_type = T.Tensor((num_firsts,), "int32")
    until_type = T.Tensor((num_untils,), "int32")
    if variant.shares:  # which has no pool, uses the same arguments for its tables
        entries_type, until_type, kept_type = table_types(num_firsts, num_untils, states, K)

    @T.prim_func
    def fused_fwd(
        q: T.StridedTensor((num_tokens, num_heads, size), (q_token, q_head, 1), variant.dtype),
        k: T.StridedTensor((num_tokens, num_heads, size), (k_token, k_head, 1), variant.dtype),
        v: T.StridedTensor(
            (num_tokens, num_value_heads, num_tiles, variant.tile_v),
            (v_token, v_head, v_tile, 1),
            variant.dtype,
        ),
        g: T.Tensor((num_tokens, num_value_heads), "float32"),
        beta: T.Tensor((num_tokens, num_value_heads), "float32"),
        beta16: T.Tensor((num_tokens, num_value_heads), variant.dtype),
        spans: T.StridedTensor((num_sequences, 2), (span_step, 1), "int32"),
        starts_of: T.Tensor((num_starts,), "int32"),
        ends_of: T.Tensor((num_ends,), "int32"),
        h0: T.StridedTensor((num_h0, num_value_heads, K, V), (h0_n, h0_h, h0_k, h0_v), held),
        o: T.Tensor((num_tokens, num_value_heads, num_columns, TILE), variant.dtype),
        ht: T.StridedTensor((num_ht, num_value_heads, K, V), (ht_n, ht_h, ht_k, ht_v), held),
        checkpoints: kept_type,
        entries_of: entries_type,
        until_of: until_type,
        g_cum: T.Tensor((saved_tokens, num_value_heads), "float32"),
        A: T.Tensor((saved_tokens, num_value_heads, 1, CHUNK), variant.dtype),
        scale: T.float32,
        has_h0: T.int32,
        has_ht: T.int32,
        training: T.int32,
        beta_is_16: T.int32,
        ctas: T.int32,
        early: T.int32,
        every: T.int32,
        keeps: T.int32,
        null_slot: T.int32,
    ):
        with T.Kernel(ctas, threads=plan.block) as block:
            # TileLang initialises the barriers by one thread of each row of the block. All of these
            # write the same values, before the first synchronisation of the block.
            T.import_source(POOLS if variant.pooled else SHARES if variant.shares else SOURCE)
            s_k = T.alloc_shared((rings["k"], CHUNK, K), variant.dtype)
            s_q = T.alloc_shared((rings["q"], CHUNK, K), variant.dtype)
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
            gates = Ring(gate_full, gate_free, rings["gate"])
            a_ring = Ring(a_full, a_free, rings["a"])
            p_ring = Ring(p_full, p_free, rings["p"])
            if variant.solves:
                s_l = T.alloc_shared((2, SCRATCH_BYTES // 4), "float32")
            if variant.inverts:
                l_full = T.alloc_barrier([plan.arrivals("l_full")] * rings["l"])
                l_free = T.alloc_barrier([plan.arrivals("l_free")] * rings["l"])
                l_ring = Ring(l_full, l_free, rings["l"])
            o_ring = Ring(o_full, o_free, rings["o"])

            hv, n, kh = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            begin, length = T.alloc_var("int32"), T.alloc_var("int32")
            num_chunks, first = T.alloc_var("int32"), T.alloc_var("int32")
            i_tile, saves = T.alloc_var("int32"), T.alloc_var("int32")
            tails, items = T.alloc_var("int32"), T.alloc_var("int32")
            first = 0  # number of chunks of earlier items: the rings' next step
            items = T.ceildiv(num_sequences * num_value_heads * num_tiles - block, ctas)

            shares = Shares(entries_of, until_of, checkpoints) if variant.shares else None
            shape = (spans, num_tokens, num_heads, num_value_heads, num_tiles, training)
            walk = (block, ctas, shares, *shape)
            turn = turns(plan)
            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            # The kernel before this one has waited for its predecessor in every CTA, so all kernels
            # up to that predecessor have ended. `early`: q, k, v, gates and A come from these.
            if early == 0:
                T.pdl_sync()
            if variant.shares:
                items = shares.num_pieces(block)
            kept = None
            if variant.pooled:
                s_next = None
                if variant.keeps:
                    s_next = T.alloc_shared((states, 3, WARPGROUP_THREADS), "int32")
                kept = OnTheWay(checkpoints, entries_of, until_of, every, keeps, null_slot, s_next)
            if of_states(warpgroup):
                T.set_max_nreg(plan.role("state").regs, 1)
                first_turn(turn, warpgroup - first_state)
                if early != 0:  # only h0 comes from the kernel before; o is written after it
                    T.pdl_sync()
                for j in rolled(items):
                    locate(j, *walk, n, kh, hv, i_tile, begin, length, num_chunks, saves)
                    num_chunks = T.shfl_sync(num_chunks, 0)  # uniform, and known to be
                    state(
                        states, K, variant.dtype, h0, ht, s_q, s_k, s_v, s_gate, s_a, s_p, s_o,
                        After(q_ring, first), After(k_ring, first), After(v_ring, first),
                        After(gates, first), After(a_ring, first), After(p_ring, first),
                        After(o_ring, first * states), turn, num_chunks, n, hv,
                        i_tile * variant.tile_v, has_h0, has_ht, starts_of, ends_of, first_state,
                        kept, length, shares, block, j,
                    )  # fmt: skip
                    first += num_chunks
                last_turn(turn, warpgroup - first_state)
            elif warpgroup < states + variant.teams:
                T.set_max_nreg(plan.role("solve" if variant.solves else "score").regs, 0)
                if variant.solves:
                    clear_above(s_a, warpgroup - first_solve, variant.teams)
                clear_above(s_p, warpgroup - first_solve, variant.teams)
                count_chunks(items, *walk, num_chunks)
                num_chunks = T.shfl_sync(num_chunks, 0)  # uniform, and known to be
                if variant.inverts:
                    solve(
                        K, s_q, s_k, s_gate, s_l, s_a, s_p,
                        q_ring, k_ring, gates, l_ring, a_ring, p_ring,
                        NamedBarrier(plan, "solve"), num_chunks, scale,
                    )  # fmt: skip
                elif variant.solves:
                    solve_in_teams(
                        variant.teams, first_solve, K, s_q, s_k, s_gate, s_l, s_a, s_p,
                        q_ring, k_ring, gates, a_ring, p_ring, NamedBarrier(plan, "solve"),
                        num_chunks, scale,
                    )  # fmt: skip
                else:
                    score(
                        K, s_q, s_k, s_gate, s_p, q_ring, k_ring, gates, p_ring, num_chunks, scale
                    )
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < 32:
                    tails = 0
                    for j in rolled(items):
                        locate(j, *walk, n, kh, hv, i_tile, begin, length, num_chunks, saves)
                        leading = [(Rows(k, (kh,), s_k), After(k_ring, first))]
                        others = [(Rows(v, (hv, i_tile), s_v), After(v_ring, first))]
                        queries = (Rows(q, (kh,), s_q), After(q_ring, first))
                        if variant.inverts:  # P comes late, and there is no room for more of Q
                            others.insert(0, queries)
                        else:
                            leading.append(queries)
                        if not variant.solves:
                            others.append((Rows(A, (hv, 0), s_a), After(a_ring, first)))
                        ahead = rings["k"] - rings["v"]
                        load(leading, others, ahead, tail_full, begin, length, tails)
                        first += num_chunks
                        if length % CHUNK != 0:
                            tails += 1
                elif tx < 64:
                    for j in rolled(items):
                        locate(j, *walk, n, kh, hv, i_tile, begin, length, num_chunks, saves)
                        gate(
                            g, beta, beta16, beta_is_16, g_cum, s_gate, After(gates, first),
                            begin, length, num_chunks, hv, scale, saves if variant.solves else 0,
                        )  # fmt: skip
                        first += num_chunks
                elif tx < 96:
                    for j in rolled(items):
                        locate(j, *walk, n, kh, hv, i_tile, begin, length, num_chunks, saves)
                        store(
                            o, A, s_o, s_a, After(o_ring, first * states), After(a_ring, first),
                            begin, length, hv, i_tile * states, variant.solves, saves,
                        )  # fmt: skip
                        first += num_chunks
                else:
                    if variant.inverts:
                        count_chunks(items, *walk, num_chunks)
                        invert(s_l, s_a, l_ring, a_ring, num_chunks)
                    for j in rolled(items):
                        locate(j, *walk, n, kh, hv, i_tile, begin, length, num_chunks, saves)
                        begin = inside(spans[num_sequences - 1, 1], num_tokens) + n
                        if not variant.pooled:
                            if has_h0 == 2:  # other tokens belong to other nodes of a tree
                                begin = num_tokens
                        if variant.shares:
                            if shares.takes(block, j) != 0:
                                begin = num_tokens  # the piece with the item's start does it
                        padding = (begin, num_tokens, num_sequences, hv)
                        for w in rolled(states):
                            clear_padding(o, *padding, i_tile * states + w)
                        if saves != 0:
                            clear_saved(A, g_cum, *padding)

    return fused_fwd
