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

from collections.abc import Mapping
from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.forward import OnTheWay, RawGates, gate, state
from qla_kernels.gdn.kernels.chain.gated_tiles import SCRATCH_BYTES, SOURCE
from qla_kernels.gdn.kernels.chain.items import After, Items, after, count_chunks, locate
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
from qla_kernels.gdn.kernels.chain.pools import SOURCE as POOLS
from qla_kernels.gdn.kernels.chain.roles import GATES, gate_role, load_role
from qla_kernels.gdn.kernels.chain.shares import SOURCE as SHARES
from qla_kernels.gdn.kernels.chain.shares import Shares, table_types
from qla_kernels.gdn.kernels.chain.solve import clear_above, invert, score, solve, solve_in_teams
from qla_kernels.gdn.kernels.chain.transfer import clear_padding, clear_saved, load, store
from qla_kernels.gdn.kernels.tables import inside
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.record import Variables
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Role, Schedule, Tile, each, free, full
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


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

PASS_CONFIGS = CHAIN_PASSES


def schedule(variant: Variant) -> Schedule:
    state_regs, solve_regs, load_regs = 232, 120, 40
    if variant.states == 2:
        state_regs, solve_regs, load_regs = (192, 88, 40) if variant.K == 128 else (176, 96, 64)
    elif variant.keeps:  # what it keeps on the way has a place and a number of chunks
        state_regs, solve_regs = 248, 112
    slots = {"q": 3, "k": 3, "v": 2, "gate": 4, "a": 2, "p": 2, "o": variant.states}
    slots["tail"] = 3 if variant.solves else 4  # tensors
    if variant.inverts:
        slots |= {"k": 4, "q": 2, "l": 2}
    elif variant.solves:
        slots |= {"k": 4, "q": 4}

    def solving(*names: str) -> tuple[str, ...]:
        return names if variant.solves else ()

    def given(*names: str) -> tuple[str, ...]:
        return () if variant.solves else names

    def inverting(*names: str) -> tuple[str, ...]:
        return names if variant.inverts else ()

    chain_role = Role(
        "state",
        warps=4 * variant.states,
        regs=state_regs,
        waits=(*full("q", "k", "v", "gate", "a", "p"), "o_free"),
        signals=(*free("q", "k", "v", "gate", "a", "p"), ("o_full", WARPGROUP_THREADS)),
        computes="S, W, V', O",
        uses=("wgmma",),
    )
    solving_role = Role(
        "solve" if variant.solves else "score",
        warps=4 * variant.teams,
        regs=solve_regs,
        waits=(
            *full("q", "k", "gate"),
            *inverting("l_free"),
            *(("a_free",) if variant.solves and not variant.inverts else ()),
            "p_free",
        ),
        signals=(
            *each((*free("q", "k", "gate"), "p_full"), WARPGROUP_THREADS),
            *inverting("l_full"),
            *each(solving("a_full"), WARPGROUP_THREADS),
        ),
        computes="A, P" if variant.solves else "P",
        uses=("wgmma", *solving("mma")),
    )
    return Schedule(
        roles=(
            *((solving_role, chain_role) if variant.first_state else (chain_role, solving_role)),
            load_role(
                load_regs, "q, k, v" + ", A" * (not variant.solves), "q", "k", "v", *given("a")
            ),
            gate_role(load_regs, GATES + "; g_cum out" * variant.solves),
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
        rings=slots,
        named=named_barriers(variant.states, variant.teams if variant.solves else 0),
        tiles=shared(variant, slots),
    )


def shared(variant: Variant, slots: Mapping[str, int]) -> dict[str, Tile]:
    """Returns the tiles of a CTA."""
    dtype = variant.dtype
    smem = {
        "k": Tile((slots["k"], CHUNK, variant.K), dtype, swizzled=True),
        "q": Tile((slots["q"], CHUNK, variant.K), dtype, swizzled=True),
        "v": Tile((slots["v"], CHUNK, variant.tile_v), dtype, swizzled=True),
        "a": Tile((slots["a"], CHUNK, CHUNK), dtype, swizzled=True),
        "p": Tile((slots["p"], CHUNK, CHUNK), dtype, swizzled=True),
        "gate": Tile((slots["gate"], GATE_ROWS, CHUNK), "float32"),
        "o": Tile((slots["o"], CHUNK, TILE), dtype, swizzled=True),
    }
    if variant.solves:  # scratch
        smem["l"] = Tile((2, SCRATCH_BYTES // 4), "float32")
    if variant.keeps:
        smem["next"] = Tile((variant.states, 3, WARPGROUP_THREADS), "int32")
    return smem


def build(variant: Variant):
    plan = schedule(variant)
    K, states = variant.K, variant.states
    first_state, first_solve = variant.first_state, variant.first_solve

    def of_states(warpgroup):
        before_the_end = warpgroup < first_state + states
        return (warpgroup >= first_state) & before_the_end if first_state else before_the_end

    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_tiles, num_columns, num_sequences = T.dynamic("V, num_tiles, num_columns, num_sequences")
    num_h0, num_ht, saved_tokens = T.dynamic("num_h0, num_ht, saved_tokens")
    num_starts, num_ends, size = T.dynamic("num_starts, num_ends, size")
    num_kept, num_firsts, num_untils = T.dynamic("num_kept, num_firsts, num_untils")
    held, entry = variant.pool or "float32", (num_kept, num_value_heads, K, V)
    kept_type = strided("kept", "n h k v", entry, "float32")  # not written
    if variant.pooled:
        kept_type = strided("kept", "n h k v", (*entry, T.dynamic("kept_size")), "uint8")
    entries_type = T.Tensor((num_firsts,), "int32")
    until_type = T.Tensor((num_untils,), "int32")
    if variant.shares:  # which has no pool, uses the same arguments for its tables
        entries_type, until_type, kept_type = table_types(num_firsts, num_untils, states, K)
    rows, value_rows = (num_tokens, num_heads, size), (num_tokens, num_value_heads)

    @T.prim_func
    def fused_fwd(
        q: strided("q", "token head", rows, variant.dtype),
        k: strided("k", "token head", rows, variant.dtype),
        v: strided("v", "token head tile", (*value_rows, num_tiles, variant.tile_v), variant.dtype),
        g: T.Tensor(value_rows, "float32"),
        beta: T.Tensor(value_rows, "float32"),
        beta16: T.Tensor(value_rows, variant.dtype),
        spans: strided("span", "step", (num_sequences, 2), "int32"),
        starts_of: T.Tensor((num_starts,), "int32"),
        ends_of: T.Tensor((num_ends,), "int32"),
        h0: strided("h0", "n h k v", (num_h0, num_value_heads, K, V), held),
        o: T.Tensor((num_tokens, num_value_heads, num_columns, TILE), variant.dtype),
        ht: strided("ht", "n h k v", (num_ht, num_value_heads, K, V), held),
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
            s, ring = tiles(plan), rings(plan)
            item = Variables("hv n kh begin length num_chunks first i_tile saves")
            tails, num_items = T.alloc_var("int32"), T.alloc_var("int32")
            item["first"] = 0  # number of chunks of earlier items: the rings' next step
            num_items = T.ceildiv(num_sequences * num_value_heads * num_tiles - block, ctas)

            shares = Shares(entries_of, until_of, checkpoints, block) if variant.shares else None
            shape = (spans, num_tokens, num_heads, num_value_heads, num_tiles, training)
            items = Items(block, ctas, shares, *shape)
            turn = turns(plan)
            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            # The kernel before this one has waited for its predecessor in every CTA, so all kernels
            # up to that predecessor have ended. `early`: q, k, v, gates and A come from these.
            if early == 0:
                T.pdl_sync()
            if variant.shares:
                num_items = shares.num_pieces
            kept = None
            if variant.pooled:
                s_next = s.next if variant.keeps else None
                kept = OnTheWay(checkpoints, entries_of, until_of, every, keeps, null_slot, s_next)
            if of_states(warpgroup):
                T.set_max_nreg(plan.role("state").regs, 1)
                first_turn(turn, warpgroup - first_state)
                if early != 0:  # only h0 comes from the kernel before; o is written after it
                    T.pdl_sync()
                enters, leaves = StateRows(h0, has_h0, starts_of), StateRows(ht, has_ht, ends_of)
                for j in rolled(num_items):
                    locate(items, j, item)
                    item["num_chunks"] = T.shfl_sync(item.num_chunks, 0)  # uniform, and known to be
                    now = after(ring, item.first, o=item.first * states)
                    state(variant, s, now, turn, enters, leaves, item, kept, shares, j)
                    item["first"] += item.num_chunks
                last_turn(turn, warpgroup - first_state)
            elif warpgroup < states + variant.teams:
                T.set_max_nreg(plan.role("solve" if variant.solves else "score").regs, 0)
                if variant.solves:
                    clear_above(s.a, warpgroup - first_solve, variant.teams)
                clear_above(s.p, warpgroup - first_solve, variant.teams)
                count_chunks(items, num_items, item.num_chunks)
                item["num_chunks"] = T.shfl_sync(item.num_chunks, 0)  # uniform, and known to be
                meet = NamedBarrier(plan, "solve")
                if variant.inverts:
                    solve(K, s, ring, meet, item.num_chunks, scale)
                elif variant.solves:
                    teams = variant.teams
                    solve_in_teams(teams, first_solve, K, s, ring, meet, item.num_chunks, scale)
                else:
                    score(K, s, ring, item.num_chunks, scale)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < 32:
                    tails = 0
                    for j in rolled(num_items):
                        locate(items, j, item)
                        now = after(ring, item.first)
                        leading = [(Rows(k, (item.kh,), s.k), now.k)]
                        others = [(Rows(v, (item.hv, item.i_tile), s.v), now.v)]
                        queries = (Rows(q, (item.kh,), s.q), now.q)
                        if variant.inverts:  # P comes late, and there is no room for more of Q
                            others.insert(0, queries)
                        else:
                            leading.append(queries)
                        if not variant.solves:
                            others.append((Rows(A, (item.hv, 0), s.a), now.a))
                        ahead = ring.k.stages - ring.v.stages
                        load(leading, others, ahead, ring.tail, item.begin, item.length, tails)
                        item["first"] += item.num_chunks
                        if item.length % CHUNK != 0:
                            tails += 1
                elif tx < 64:
                    gates = RawGates(g, beta, beta16, beta_is_16, g_cum)
                    for j in rolled(num_items):
                        locate(items, j, item)
                        now = After(ring.gate, item.first)
                        gate(gates, s.gate, now, item, scale, variant.solves)
                        item["first"] += item.num_chunks
                elif tx < 96:
                    for j in rolled(num_items):
                        locate(items, j, item)
                        now = after(ring, item.first, o=item.first * states)
                        store(o, A, s, now, item, variant.solves)
                        item["first"] += item.num_chunks
                else:
                    if variant.inverts:
                        count_chunks(items, num_items, item.num_chunks)
                        invert(s, ring, item.num_chunks)
                    for j in rolled(num_items):
                        locate(items, j, item)
                        item["begin"] = inside(spans[num_sequences - 1, 1], num_tokens) + item.n
                        if not variant.pooled:
                            if has_h0 == 2:  # other tokens belong to other nodes of a tree
                                item["begin"] = num_tokens
                        if variant.shares:
                            if shares.takes(j) != 0:
                                item["begin"] = num_tokens  # the piece with the start does it
                        padding = (item.begin, num_tokens, num_sequences, item.hv)
                        for w in rolled(states):
                            clear_padding(o, *padding, item.i_tile * states + w)
                        if item.saves != 0:
                            clear_saved(A, g_cum, *padding)

    return fused_fwd
