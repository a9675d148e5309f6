"""Layouts and helpers of all kernels that walk a sequence's chunks with a state in registers.

The roles are in the other files of this folder. They are apart from the kernel files, which state
the maths and number the steps, because several kernels use the same roles.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Named, Schedule

TILE = 64  # columns of V that one state warpgroup owns

# How TileLang compiles a chain over the chunks of a sequence, from which states or outputs leave.
CHAIN_PASSES = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the sequence's length
    "tl.disable_buffer_init_check": True,  # staging tiles: see `put_out`, `stage`; and halves.py
}

# Rows of a gate slot; gated_tiles.cuh reads the first three. DECAY_TO_BLOCK_END of a token is the
# decay from it to the last token of its block of 16; D that to the last token of the chunk.
GATE_ROWS = 7
GAMMA, BETA, DECAY_TO_BLOCK_END, BETA_E, SCALE_E, D, LAST = range(GATE_ROWS)


def accumulator_layout(rows: int, columns: int) -> T.Fragment:
    """Returns a layout for a (columns, rows) fragment: that of a (rows, columns) wgmma accumulator.

    x[c, r] is then in a register of the same thread as an accumulator's y[r, c], and a copy of x to
    or from shared memory becomes a transposing stmatrix or ldmatrix.
    """
    return T.Fragment(
        [columns, rows],
        forward_fn=lambda c, r: (
            r // 16 * 32 + r % 8 * 4 + c % 8 // 2,
            c // 8 * 4 + r % 16 // 8 * 2 + c % 2,
        ),
    )


class Rows(NamedTuple):
    """The rows of one head of a tensor, and the shared slots to which `copy` brings a chunk.

    Columns that the tensor lacks become zeros: TMA fills a box that reaches past a tensor's end.
    """

    tensor: Any  # [tokens, .., width or less]
    head: tuple[Any, ...]  # an index for each dimension between tokens and width
    shared: Any  # [slots, CHUNK, width]

    def copy(self, tok0, slot, barrier):
        width = self.shared.shape[2]
        rows = self.tensor[(slice(tok0, tok0 + CHUNK), *self.head, slice(0, width))]
        return T.tma_copy(rows, self.shared[slot, :, :], barrier=barrier)


class StateRows(NamedTuple):
    """A tensor of states, and the rows at which those of sequences enter or leave a chain.

    The row of a sequence, or of a segment or a node of a tree, may be none: a negative number.
    """

    tensor: Any  # [rows, HV, K, V]
    has: Any  # 0: no sequence has a row; 1: sequence n has row n; 2: it has row of[n]
    of: Any


@T.macro
def find_row(states, n, row: T.Ref, null_slot=None):
    """Sets row to that of sequence n, or to -1 if it has none.

    Rows that a caller names may be any numbers: null_slot and lower ones are then no state.
    """
    row = -1
    if states.has == 1:
        row = n
    if states.has == 2:
        row = states.of[n]
        if null_slot is not None:
            if (row <= null_slot) | (row >= states.tensor.shape[0]):
                row = -1


def slot_of(tiles, slot, access="rw"):
    """Returns the address of a slot of `tiles` [slots, ..] in shared memory, for inline CUDA.

    `access` tells TileLang whether the slot is read or written there.
    """
    size = functools.reduce(operator.mul, tiles.shape[1:])
    return T.access_ptr(tiles[(slot, *[0] * (len(tiles.shape) - 1))], access, size)


@T.macro
def load_transposed(s_v, slot, w, r_vt):
    """Loads V^T of a state warpgroup to accumulator registers by four transposing ldmatrix."""
    lane = T.get_thread_binding() % 32
    warp = T.get_thread_binding() // 32 % 4
    for i in T.unroll(CHUNK // 16):
        T.call_extern(
            "handle",
            "tl::ptx_ldmatrix_x4_trans",
            T.access_ptr(
                s_v[
                    slot,
                    i * 16 + lane // 16 * 8 + lane % 8,
                    w * TILE + warp * 16 + lane // 8 % 2 * 8,
                ],
                "r",
                8,
            ),
            T.access_ptr(r_vt[i * 16 + lane % 4 * 2, warp * 16 + lane // 4], "w", 8),
        )


def named_barriers(states: int, solving: int = 0) -> dict[str, Named]:
    """Returns the named barriers of a kernel with so many state and solving warpgroups.

    A barrier has the same id in all kernels: "turn", a copy for each of two state warpgroups, by
    which they take turns on the tensor cores; "solve", for the threads of a solving warpgroup, a
    copy each.
    """
    return {
        "turn": Named(2 * WARPGROUP_THREADS, copies=2, used=states == 2),
        "solve": Named(WARPGROUP_THREADS, copies=max(solving, 1), used=solving > 0),
    }


def turns(plan: Schedule) -> NamedBarrier | None:
    """Returns the state warpgroups' turns on the tensor cores; None for a single warpgroup."""
    return NamedBarrier(plan, "turn") if plan.named["turn"].used else None


@T.macro
def first_turn(turn, w):
    """Gives the first of two state warpgroups the first turn."""
    if turn is not None:
        if w == 1:
            turn.arrive(0)


@T.macro
def take_turn(turn, w):
    if turn is not None:
        turn.sync(w)


@T.macro
def give_turn(turn, w):
    if turn is not None:
        turn.arrive(1 - w)


@T.macro
def last_turn(turn, w):
    """Takes the turn that the second of two state warpgroups gives last, so that it is used up."""
    if turn is not None:
        if w == 0:
            turn.sync(0)
