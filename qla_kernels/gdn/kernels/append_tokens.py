"""append_tokens -- puts new tokens behind a pool's sequences, and tells anchored_fwd where.

For sequence n, with slot s, and its new tokens t = 0 .. T - 1:
    place   = (lengths[s] + t) % 128 of slot s, of k, v, g and beta
    steps   = (s, 128 s + place of the tail's first token, tokens of the tail before, T)     [4]
    lengths, anchored of s, as anchored_fwd leaves the slot

Slots may lie any distance apart, as in pages of an engine, and more than 2^31 numbers in all.

Steps (numbers appear again in the code); a CTA has one sequence:
    1  read the slot's numbers
    2  copy the tokens
    3  write the numbers and the row of `steps`, by one thread

Bounded by the launch: 0.4 KB a value head. Why this shape: anchored_fwd loads whole boxes of a
tail by TMA, the new tokens with them, so they have to be there before; and one CTA has to change a
slot's numbers after all that compute with it have read them, so they read `steps` instead.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.shapes import NEW_TOKENS, STEP_COLUMNS, TAIL_PLACES
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule
from qla_kernels.tile.strided import strided

APPEND_WARPS = 8
APPEND_PIECE = 8  # numbers of k or v that a thread copies at once: 16 bytes

SOURCE = """
namespace qla {
// Strides are known to be whole pieces only at run time: the compiler would take single numbers.
template <class T> __device__ __forceinline__ void copy_piece(T *to, const T *from) {
  *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from);
}
}  // namespace qla
"""


class Variant(NamedTuple):
    dtype: str  # of k and v


VARIANTS = (Variant("bfloat16"), Variant("float16"))

PASS_CONFIGS = {
    "tl.disable_thread_storage_sync": True,  # no shared memory; written out once
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the slot and the sizes
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("copy", warps=APPEND_WARPS, regs=64, computes="tokens to their places"),),
        ctas_per_sm=4,
    )


@T.macro
def copy_rows(x, to, n, slot, length, tokens, heads, pieces):
    """Copies rows [tokens, heads, 8 pieces] of x to their places."""
    thread = T.get_thread_binding()
    total = tokens * heads * pieces
    for i in rolled(T.ceildiv(total, 32 * APPEND_WARPS)):
        at = i * 32 * APPEND_WARPS + thread
        if at < total:
            t = at // (heads * pieces)
            head, piece = at // pieces % heads, at % pieces
            place = (length + t) % TAIL_PLACES
            T.call_extern(
                "handle",
                "qla::copy_piece",
                T.access_ptr(to[slot, place, head, piece * APPEND_PIECE], "w", APPEND_PIECE),
                T.access_ptr(x[n, t, head, piece * APPEND_PIECE], "r", APPEND_PIECE),
            )


def build(variant: Variant):
    plan = schedule(variant)
    N, num_tokens, H, HV, K, V = T.dynamic("N, num_tokens, H, HV, K, V")
    num_slots, index = T.dynamic("num_slots, index")
    tail, gates = (num_slots, TAIL_PLACES), (N, num_tokens, HV)

    @T.prim_func
    def append_tokens(
        k: strided("k", "b t h", (N, num_tokens, H, K), variant.dtype),
        v: strided("v", "b t h", (N, num_tokens, HV, V), variant.dtype),
        g: T.Tensor(gates, "float32"),
        beta: T.Tensor(gates, "float32"),
        state_indices: T.StridedTensor((N,), (index,), "int32"),
        k_tail: strided("k", "n", (*tail, H, K), variant.dtype),
        v_tail: strided("v", "n", (*tail, HV, V), variant.dtype),
        g_tail: strided("g", "n", (*tail, HV), "float32"),
        beta_tail: strided("beta", "n", (*tail, HV), "float32"),
        anchored: strided("anchored", "n", (num_slots,), "int32"),
        lengths: strided("lengths", "n", (num_slots,), "int32"),
        steps: T.Tensor((N, STEP_COLUMNS), "int32"),
        null_slot: T.int32,  # for padding
    ):
        with T.Kernel(N, threads=plan.threads) as n:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            thread = T.get_thread_binding()
            slot, length, anchor, kept = (T.alloc_var("int32") for _ in range(4))
            await_previous()
            slot = state_indices[n]  # 1
            if (slot >= num_slots) | (slot == null_slot):
                slot = -1
            length = 0
            anchor = 0
            if slot >= 0:
                length = lengths[slot]
                anchor = anchored[slot]
            # What `reject` took back may have been wrong: a tail holds no less and no more.
            kept = T.max(T.min(length - anchor, TAIL_PLACES - NEW_TOKENS), 0)
            length = anchor + kept
            T.sync_threads()  # all have read the slot's numbers
            if slot >= 0:  # 2
                copy_rows(k, k_tail, n, slot, length, num_tokens, H, K // APPEND_PIECE)
                copy_rows(v, v_tail, n, slot, length, num_tokens, HV, V // APPEND_PIECE)
                for i in rolled(T.ceildiv(num_tokens * HV, 32 * APPEND_WARPS)):
                    at = i * 32 * APPEND_WARPS + thread
                    if at < num_tokens * HV:
                        place = (length + at // HV) % TAIL_PLACES
                        g_tail[slot, place, at % HV] = g[n, at // HV, at % HV]
                        beta_tail[slot, place, at % HV] = beta[n, at // HV, at % HV]
            if thread == 0:  # 3
                steps[n, 0] = slot
                steps[n, 1] = T.max(slot, 0) * TAIL_PLACES + anchor % TAIL_PLACES
                steps[n, 2] = kept
                steps[n, 3] = num_tokens
                if slot >= 0:
                    lengths[slot] = length + num_tokens
                    if kept >= CHUNK:  # this step's anchored_fwd puts that chunk into the anchor
                        anchored[slot] = anchor + CHUNK

    return append_tokens
