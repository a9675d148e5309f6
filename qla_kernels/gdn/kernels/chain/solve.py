"""Roles of the forward that make A and P of each chunk, ahead of the state.

fused_fwd.py states the maths and the steps. The warp-level work is inline CUDA, see
gated_tiles.cuh; the macros here decide which part of it runs during which product.
"""

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import slot_of
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.named_barriers import sync
from qla_kernels.tile.schedule import WARPGROUP_THREADS


@T.macro
def start_product(c, s_left, left_slot, s_right, right_slot, K):
    T.call_extern(
        "handle",
        f"qla::start_product<{K}>",
        c.data,
        slot_of(s_left, left_slot),
        slot_of(s_right, right_slot),
    )


@T.macro
def finish_product(c):
    T.call_extern("handle", "qla::finish_product", c.data)


@T.macro
def put_scores(c, s, ring, i, scale):
    ring.p.acquire(i)
    T.call_extern(
        "handle",
        "qla::gated_scores",
        c.data,
        slot_of(s.gate, ring.gate.slot(i)),
        slot_of(s.p, ring.p.slot(i)),
        scale,
    )
    ring.gate.release(i)
    T.fence_proxy_async()  # P: written by threads, read by wgmma
    ring.p.commit(i)


@T.macro
def clear_above(tile, first, step):
    """Zeroes a team's slots, once: later writes never go above the diagonal."""
    thread = T.get_thread_binding()
    for slot in rolled(first, tile.shape[0], step):
        for j in T.unroll(CHUNK // 16):
            for e in T.vectorized(8):
                tile[slot, thread // 2, thread % 2 * (CHUNK // 2) + j * 8 + e] = 0


@T.macro
def put_lower(c, s, gate_slot, scratch, barrier):
    sync(barrier, WARPGROUP_THREADS)  # the scratch's previous contents have been read
    T.call_extern(
        "handle", "qla::gated_lower", c.data, slot_of(s.gate, gate_slot), slot_of(s.l, scratch)
    )


@T.macro
def put_below(s, ring, scratch, i, turn):
    """Solves A below its diagonal blocks, and commits the slot of A."""
    T.call_extern(
        "handle", "qla::solve_below", slot_of(s.l, scratch), slot_of(s.a, ring.a.slot(i)), turn
    )
    T.fence_proxy_async()  # A: written by threads, read by wgmma
    ring.a.commit(i)


@T.macro
def score(K, s, ring, num_chunks, scale):
    """Makes P of each chunk; for calls in which A is given."""
    c = T.alloc_local((32,), "float32")  # Q K^T in accumulator registers
    for i in T.serial(num_chunks):
        ring.q.wait(i)
        ring.k.wait(i)
        start_product(c, s.q, ring.q.slot(i), s.k, ring.k.slot(i), K)  # 3
        ring.gate.wait(i)
        finish_product(c)
        ring.q.release(i)
        ring.k.release(i)
        put_scores(c, s, ring, i, scale)


@T.macro
def solve(K, s, ring, meet, num_chunks, scale):
    """Makes L and P of each chunk, and completes A of the chunk before, by one warpgroup.

    Meanwhile `invert` inverts the diagonal blocks of L. The last pass only completes A of the last
    chunk. Its products repeat those of the pass before and are not used: without them there would
    be branches around a product in flight.
    """
    c = T.alloc_local((32,), "float32")  # K K^T, then Q K^T, in accumulator registers
    now, before, passes = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    passes = T.if_then_else(num_chunks > 0, num_chunks + 1, 0)
    for i in T.serial(passes):
        now = T.min(i, num_chunks - 1)
        before = i - 1
        ring.k.wait(now)
        start_product(c, s.k, ring.k.slot(now), s.k, ring.k.slot(now), K)  # 3
        ring.gate.wait(now)
        finish_product(c)
        put_lower(c, s, ring.gate.slot(now), ring.l.slot(i), meet.id())
        if i < num_chunks:
            ring.l.commit(i)
        ring.q.wait(now)
        start_product(c, s.q, ring.q.slot(now), s.k, ring.k.slot(now), K)
        if i > 0:
            ring.l.acquire(before + ring.l.stages)  # `invert` has released it: blocks are inverted
            put_below(s, ring, ring.l.slot(before), before, i)
        finish_product(c)
        if i < num_chunks:
            ring.q.release(i)
            ring.k.release(i)
            put_scores(c, s, ring, i, scale)


@T.macro
def invert(s, ring, num_chunks):
    """Inverts the diagonal blocks of I + L, 16 x 16 each, for every chunk.

    One warp does so while `solve` computes the rest. It reads L in shared memory, and writes the
    inverses over L's diagonal blocks and to those of the shared tile of A.
    """
    for i in rolled(num_chunks):
        ring.l.wait(i)
        ring.a.acquire(i)
        T.call_extern(  # 3
            "handle",
            "qla::invert_diagonals",
            slot_of(s.l, ring.l.slot(i)),
            slot_of(s.a, ring.a.slot(i)),
        )
        T.fence_proxy_async()  # A: written by threads, read by wgmma
        ring.l.release(i)


@T.macro
def solve_in_teams(teams, first_warpgroup, K, s, ring, meet, num_chunks, scale):
    """Makes A and P of chunks team, team + teams, ...; each solving warpgroup is a team.

    At most one product is in flight: Q K^T during the inversion of the diagonal blocks, and the
    next chunk's K K^T during the solve of the blocks below them.
    """
    c = T.alloc_local((32,), "float32")  # K K^T, then Q K^T, in accumulator registers
    team, steps, last = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    after = T.alloc_var("int32")
    team = T.shfl_sync(T.get_thread_binding(1) - first_warpgroup, 0)  # uniform, and known to be
    steps = T.ceildiv(num_chunks - team, teams)
    last = team + (steps - 1) * teams
    if steps > 0:
        ring.k.wait(team)
        start_product(c, s.k, ring.k.slot(team), s.k, ring.k.slot(team), K)
        finish_product(c)
    for step in T.serial(steps):
        i = step * teams + team
        ring.gate.wait(i)
        put_lower(c, s, ring.gate.slot(i), team, meet.id(team))  # 3
        ring.q.wait(i)
        start_product(c, s.q, ring.q.slot(i), s.k, ring.k.slot(i), K)
        ring.a.acquire(i)
        T.call_extern(
            "handle", "qla::invert_own_diagonal", slot_of(s.l, team), slot_of(s.a, ring.a.slot(i))
        )
        finish_product(c)
        ring.q.release(i)
        ring.k.release(i)
        put_scores(c, s, ring, i, scale)
        after = T.min(i + teams, last)  # the last pass repeats its own product, unused
        ring.k.wait(after)
        start_product(c, s.k, ring.k.slot(after), s.k, ring.k.slot(after), K)
        meet.sync(team)
        put_below(s, ring, team, i, step)
        finish_product(c)
