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

TILE = 64  # columns of V that one state warpgroup owns
TURN = 8  # named barriers 8 and 9: the state warpgroups' turns on the tensor cores

# rows of a gate slot; gated_tiles.cuh reads the first three
GATE_ROWS = 7
GAMMA, BETA, FALL, BETA_E, SCALE_E, D, LAST = range(GATE_ROWS)


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
    """The rows of one head of a tensor, and the shared slots to which `copy` brings a chunk."""

    tensor: Any  # [tokens, .., width]
    head: tuple[Any, ...]  # an index for each dimension between tokens and width
    shared: Any  # [slots, CHUNK, width]

    def copy(self, tok0, slot, barrier):
        rows = self.tensor[(slice(tok0, tok0 + CHUNK), *self.head, slice(None))]
        return T.tma_copy(rows, self.shared[slot, :, :], barrier=barrier)


def slot_of(tiles, slot):
    """Returns the address of a slot of `tiles` [slots, ..] in shared memory, for inline CUDA."""
    size = functools.reduce(operator.mul, tiles.shape[1:])
    return T.access_ptr(tiles[(slot, *[0] * (len(tiles.shape) - 1))], "rw", size)


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


@T.macro
def take_turn(w, states):
    if states == 2:
        T.call_extern("handle", "tl::__sync_thread_partial", TURN + w, 256)


@T.macro
def give_turn(w, states):
    if states == 2:
        T.call_extern("handle", "tl::__named_barrier_arrive", TURN + 1 - w, 256)
