"""reject_tokens -- takes back tokens from the ends of a pool's sequences.

    lengths[state_indices[n]] -= num_tokens[n]     for each n whose index is a slot of a sequence

Steps (numbers appear again in the code); a thread has one sequence:
    1  find its slot; none for padding
    2  shorten it

Bounded by the launch. Why this shape: torch took seven launches, which no program can repeat.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.schedule import Role, Schedule
from qla_kernels.tile.strided import strided

REJECT_WARPS = 4


class Variant(NamedTuple):
    dtype: str  # of lengths


VARIANTS = (Variant("int32"),)

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # indices are guarded by the sizes


def schedule(variant: Variant) -> Schedule:
    return Schedule(roles=(Role("shorten", warps=REJECT_WARPS, regs=40, computes="a length"),))


def build(variant: Variant):
    plan = schedule(variant)
    N, num_slots, index, number = T.dynamic("N, num_slots, index, number")

    @T.prim_func
    def reject_tokens(
        state_indices: T.StridedTensor((N,), (index,), "int32"),
        num_tokens: T.StridedTensor((N,), (number,), "int32"),
        lengths: strided("lengths", "n", (num_slots,), variant.dtype),
        null_slot: T.int32,  # for padding
    ):
        with T.Kernel(T.ceildiv(N, plan.threads), threads=plan.threads) as block:
            await_previous()
            n = block * plan.threads + T.get_thread_binding()
            if n < N:
                slot = state_indices[n]  # 1
                if (slot >= 0) & (slot < num_slots) & (slot != null_slot):
                    lengths[slot] = lengths[slot] - num_tokens[n]  # 2

    return reject_tokens
