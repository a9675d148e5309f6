"""pool_states -- moves states between the slots of a pool and rows of their own.

For row n, of slot s = slot_of[n], which names a slot if null_slot < s < the number of slots:
    rows[n] = pool[s], or 0 if s names no slot      gathers
    pool[s] = rows[n], if s names a slot            otherwise                          [HV K V]

Steps (numbers appear again in the role); a CTA owns 2048 numbers of a head's state, a thread 8:
    1 load    its numbers, all before the first is stored
    2 store   them, rounded to the dtype of where they go

Bounded by memory, and where there are few states by latency. Why this shape: one launch, where
torch took several that found out which slots there are, and no program could repeat them. States
have any strides in a pool, and neighbouring threads take neighbouring numbers of the last axis: the
host gives both sides with the axis last that lies end to end in the pool. Slots are numbered in 64
bits: a pool may have more than 2^31 numbers.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.schedule import Role, Schedule
from qla_kernels.tile.strided import strided

POOL_WARPS = 8
POOL_NUMBERS = 8  # of a thread


class Variant(NamedTuple):
    pool: str  # dtype of the pool


VARIANTS = (Variant("float32"), Variant("bfloat16"))

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # slots and numbers are guarded


def schedule(variant: Variant) -> Schedule:
    return Schedule(roles=(Role("copy", warps=POOL_WARPS, regs=64, computes="numbers of a state"),))


@T.macro
def copy(pool, rows, slot_of, null_slot, gathers, n, hv, first):
    thread = T.get_thread_binding()
    r_x = T.alloc_local((POOL_NUMBERS,), "float32")
    slot = T.alloc_var("int32")
    num_slots, columns = pool.shape[0], pool.shape[3]
    numbers = pool.shape[2] * columns
    slot = slot_of[n]
    is_slot = (slot > null_slot) & (slot < num_slots)
    for i in T.unroll(POOL_NUMBERS):  # 1
        at = first + i * 32 * POOL_WARPS + thread
        r_x[i] = 0.0
        if at < numbers:
            if gathers == 0:
                r_x[i] = rows[n, hv, at // columns, at % columns]
            elif is_slot:
                r_x[i] = pool[T.cast(slot, "int64"), hv, at // columns, at % columns]
    for i in T.unroll(POOL_NUMBERS):  # 2
        at = first + i * 32 * POOL_WARPS + thread
        if at < numbers:
            if gathers != 0:
                rows[n, hv, at // columns, at % columns] = r_x[i]
            elif is_slot:
                pool[T.cast(slot, "int64"), hv, at // columns, at % columns] = r_x[i]


def build(variant: Variant):
    plan = schedule(variant)
    num_slots, num_rows, num_value_heads = T.dynamic("num_slots, num_rows, num_value_heads")
    lines, columns = T.dynamic("lines, columns")
    each = POOL_NUMBERS * plan.threads
    state = num_value_heads, lines, columns

    @T.prim_func
    def pool_states(
        pool: strided("pool", "n h l c", (num_slots, *state), variant.pool),
        rows: strided("row", "n h l c", (num_rows, *state), "float32"),
        slot_of: T.Tensor((num_rows,), "int32"),
        null_slot: T.int32,
        gathers: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(lines * columns, each), num_value_heads, num_rows, threads=plan.threads
        ) as (part, hv, n):
            await_previous()
            copy(pool, rows, slot_of, null_slot, gathers, T.cast(n, "int64"), hv, part * each)

    return pool_states
