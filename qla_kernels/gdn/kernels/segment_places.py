"""segment_places -- where the segments of a pool's sequences end, and which checkpoints they keep.

For segment p of sequence n, with b chunks of the sequence before it:
    ends[p]    = the slot of the sequence's final state where p ends the sequence, else -1
    first      = the chunks before the sequence's first checkpoint; negative: it keeps none
    done       = how many checkpoints are not after the first b > 0 chunks
    chunks[p]  = first + done every - b, the chunks of p before its first checkpoint; -1 for none
    entries[p] = entry_of[n] + done
A segment of no sequence ends nowhere and keeps nothing.

Steps (numbers appear again in the code); a thread has one segment:
    1  find its sequence by bisection of first_segment
    2  count the checkpoints before it

Bounded by the launch. Why this shape: torch took a dozen launches for these numbers.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.tables import find, inside
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.schedule import Role, Schedule

PLACES_WARPS = 4


class Variant(NamedTuple):
    dtype: str  # of the slots and entries


VARIANTS = (Variant("int32"),)

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # indices are guarded by the rows


def schedule(variant: Variant) -> Schedule:
    return Schedule(roles=(Role("place", warps=PLACES_WARPS, regs=40, computes="a segment"),))


def build(variant: Variant):
    plan = schedule(variant)
    num_bounds, rows, capacity, N = T.dynamic("num_bounds, rows, capacity, N")
    num_entries, num_first, step = T.dynamic("num_entries, num_first, step")

    @T.prim_func
    def segment_places(
        cu_seqlens: T.StridedTensor((num_bounds,), (step,), "int32"),
        bounds: T.Tensor((rows,), "int32"),
        first_segment: T.Tensor((num_bounds,), "int32"),
        ends_of: T.Tensor((rows,), "int32"),
        end_slot: T.Tensor((N,), variant.dtype),
        entry_of: T.Tensor((num_entries,), variant.dtype),
        first_chunk: T.Tensor((num_first,), variant.dtype),
        ends: T.Tensor((capacity,), "int32"),
        chunks: T.Tensor((capacity,), "int32"),
        entries: T.Tensor((capacity,), "int32"),
        every: T.int32,
        has_first: T.int32,
        num_tokens: T.int32,
    ):
        with T.Kernel(T.ceildiv(capacity, plan.threads), threads=plan.threads) as block:
            await_previous()
            p = block * plan.threads + T.get_thread_binding()
            if p < capacity:
                low = T.alloc_local((1,), "int32")
                before, first, done = (
                    T.alloc_var("int32"),
                    T.alloc_var("int32"),
                    T.alloc_var("int32"),
                )
                last = num_bounds - 1
                find(low, first_segment, last, p)  # 1
                n = low[0]
                ends[p] = -1
                if ends_of[p] >= 0:
                    ends[p] = end_slot[n]
                before = T.max(bounds[p] - inside(cu_seqlens[n], num_tokens), 0) // CHUNK  # 2
                first = every
                if has_first != 0:
                    first = first_chunk[n]
                done = 0
                if (before > 0) & (before >= first):
                    done = (before - first + every) // every
                chunks[p] = first + done * every - before
                if (first < 0) | (p >= first_segment[last]):
                    chunks[p] = -1
                entries[p] = entry_of[n] + done

    return segment_places
