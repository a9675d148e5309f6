"""How two state warpgroups with half of K each complete a sum over all of K: see halves.cuh.

Used where a state of 64 columns of V is too large for one warpgroup, as at K = 256. Arguments are
fragments [64, 64] in the layout of wgmma accumulators, and shared memory. All 256 threads of both
warpgroups make each call, with the same barrier, and `own` is the warpgroup's number. TileLang is
told that shared memory is read only: for a write it would insert a fence before the next product,
and none is needed, because no product reads these numbers there. Each function returns the
operation, which TileLang's builder places where the function was called.
"""

import math
from pathlib import Path
from typing import Any

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import TILE
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Named

SOURCE = Path(__file__).with_suffix(".cuh").read_text()

HALF = 128  # columns of K of a state warpgroup


def meeting(states: int = 2) -> Named:
    """Returns the named barrier at which two state warpgroups meet; one alone does not use it."""
    return Named(2 * WARPGROUP_THREADS, used=states == 2)


def sum_half(r_x: Any, s_low: Any, s_high: Any, own: int, barrier: int) -> Any:
    """Completes this warpgroup's 32 columns of r_x, of which each warpgroup has a summand.

    Summands pass through s_low and s_high, two tiles [1, 64, 64] of 16 bits that must be free.
    """
    low, high = _start(s_low), _start(s_high)
    return T.call_extern("handle", f"qla::sum_half<{own}>", r_x.data, low, high, barrier)


def share_half(r_x16: Any, s_low: Any, own: int, barrier: int) -> Any:
    """Replaces the other 32 columns of r_x16 by those of the other warpgroup.

    It follows a `sum_half` with the same s_low, and comes once between two of them.
    """
    return T.call_extern("handle", f"qla::share_half<{own}>", r_x16.data, _start(s_low), barrier)


def stage_half_transposed(r_x16: Any, s_tile: Any, own: int, slot: Any = 0) -> Any:
    """Writes the other warpgroup's 32 columns of r_x16 to rows of a slot of s_tile [.., 64, 64].

    The tile may be s_low or s_high. The warp that sends it by TMA makes the fence.
    """
    name, tile = f"qla::stage_half_transposed<{own}>", s_tile[slot, 0, 0]
    return T.call_extern("handle", name, r_x16.data, T.access_ptr(tile, "r", CHUNK * TILE))


def _start(shared: Any) -> Any:
    """Returns the address of a shared buffer, all of which is used."""
    return T.access_ptr(shared[(0,) * len(shared.shape)], "r", math.prod(shared.shape))
