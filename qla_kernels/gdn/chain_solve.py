"""The role that makes A and P of each chunk, ahead of the state.

fused_fwd states the maths and what each step is for. The warp-level work is inline CUDA, see
gated_tiles.cuh; which piece runs while which product is under way is decided here.
"""

import tilelang.language as T

from qla_kernels.gdn.chain import slot_of
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.math import CHUNK

SOLVE_BARRIER = 10  # and 11: a team's own named barrier


@T.macro
def start_product(c, s_left, s_right, slot, K):
    T.call_extern(
        "handle",
        f"qla::start_product<{K}>",
        c.data,
        slot_of(s_left, slot),
        slot_of(s_right, slot),
    )


@T.macro
def finish_product(c):
    T.call_extern("handle", "qla::finish_product", c.data)


@T.macro
def put_scores(c, s_gate, gate_ring, s_p, p_ring, i, scale):
    p_ring.acquire(i)
    T.call_extern(
        "handle",
        "qla::gated_scores",
        c.data,
        slot_of(s_gate, gate_ring.slot(i)),
        slot_of(s_p, p_ring.slot(i)),
        scale,
    )
    gate_ring.release(i)
    T.fence_proxy_async()  # P: written by threads, read by wgmma
    p_ring.commit(i)


@T.macro
def clear_above(tile, first, step):
    """Zero the slots of a team: nothing is ever written above the diagonal."""
    thread = T.get_thread_binding()
    for slot in rolled(first, tile.shape[0], step):
        for j in rolled(CHUNK // 2):
            tile[slot, thread // 2, thread % 2 * (CHUNK // 2) + j] = 0


@T.macro
def score(K, s_q, s_k, s_gate, s_p, qk, gate_ring, p_ring, num_chunks, scale):
    """P alone, where A is given."""
    c = T.alloc_local((32,), "float32")  # Q K^T in accumulator registers
    clear_above(s_p, 0, 1)
    for i in T.serial(num_chunks):
        qk.wait(i)
        start_product(c, s_q, s_k, qk.slot(i), K)  # 3
        gate_ring.wait(i)
        finish_product(c)
        qk.release(i)
        put_scores(c, s_gate, gate_ring, s_p, p_ring, i, scale)


@T.macro
def solve(
    first_group, teams, K, s_q, s_k, s_gate, s_l, s_a, s_p, qk, gate_ring, a_ring, p_ring,
    num_chunks, scale,
):  # fmt: skip
    """A and P of chunks team, team + teams, ..., for each warpgroup that is a team.

    While a product is under way its accumulator is the only one: Q K^T runs behind the inverses of
    the diagonal blocks, and the next K K^T behind the blocks below them.
    """
    c = T.alloc_local((32,), "float32")  # K K^T, then Q K^T, in accumulator registers
    team, steps, last = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    after, scratch = T.alloc_var("int32"), T.alloc_var("int32")
    buffers = s_l.shape[0] // teams
    team = T.shfl_sync(T.get_thread_binding(1) - first_group, 0)  # uniform, and known to be
    steps = T.ceildiv(num_chunks - team, teams)
    last = team + (steps - 1) * teams
    clear_above(s_a, team, teams)
    clear_above(s_p, team, teams)
    if steps > 0:
        qk.wait(team)
        start_product(c, s_k, s_k, qk.slot(team), K)
        finish_product(c)
    for step in T.serial(steps):
        i = step * teams + team
        scratch = team * buffers + step % buffers
        gate_ring.wait(i)
        if buffers == 1:  # the blocks solved before have left the scratch
            T.call_extern("handle", "tl::__sync_thread_partial", SOLVE_BARRIER + team, 128)
        T.call_extern(  # 3
            "handle",
            "qla::gated_lower",
            c.data,
            slot_of(s_gate, gate_ring.slot(i)),
            slot_of(s_l, scratch),
        )
        start_product(c, s_q, s_k, qk.slot(i), K)
        a_ring.acquire(i)
        T.call_extern(
            "handle", "qla::invert_diagonals", slot_of(s_l, scratch), slot_of(s_a, a_ring.slot(i))
        )
        finish_product(c)
        put_scores(c, s_gate, gate_ring, s_p, p_ring, i, scale)
        after = T.min(i + teams, last)  # the last pass repeats its own product, for no use
        qk.wait(after)
        start_product(c, s_k, s_k, qk.slot(after), K)
        T.call_extern(
            "handle",
            "qla::solve_below",
            slot_of(s_l, scratch),
            slot_of(s_a, a_ring.slot(i)),
            SOLVE_BARRIER + team,
            step,
        )
        T.fence_proxy_async()  # A: written by threads, read by wgmma
        a_ring.commit(i)
        finish_product(c)
        qk.release(i)
