"""Sizes that host code and kernels share; the chunk's size is in tile/constants.py.

Head sizes stand here alone: refusals, variants, warm-up, documents and tests follow from them.
"""

KEY_STEP, MOST_KEYS = 16, 128
WIDE = 256  # K of kernels of their own; anchors do not have it, and a backward cuts no sequence
KEY_SIZES = (*range(KEY_STEP, MOST_KEYS + 1, KEY_STEP), WIDE)  # K that kernels run
KEY_ROOMS = (64, 128, WIDE)  # K of their variants; another K runs in the next larger one
VALUE_STEP, MOST_VALUES = 64, 512
VALUE_SIZES = tuple(range(VALUE_STEP, MOST_VALUES + 1, VALUE_STEP))  # V that kernels run
SHARED_KEYS = 128  # the K of fused_fwd's variants with equal shares
PART_COLUMNS = 128  # the most columns of V that chunk_grads takes: more are several value heads
NORM_SIZES = (64, 128)  # K = V of a decoding step with a norm
POOL_KEYS = 128  # the K with which fused_fwd reads and writes states in slots of a pool

# as messages and pages say it
KEYS = f"a multiple of {KEY_STEP} up to {MOST_KEYS}, or {WIDE}"
VALUES = f"a multiple of {VALUE_STEP} up to {MOST_VALUES}"
HEAD_SIZES = f"K {KEYS}, V {VALUES}"

L2NORM_EPSILON = 1e-6  # added to a row's sum of squares
STATE_PIECE = 4  # numbers of a decoding state that a thread reads or writes in one access
TAIL_PLACES = 128  # tokens that a slot of a pool has room for behind its anchor: two chunks
NEW_TOKENS = 8  # the most tokens of a sequence that one step of anchored_fwd computes
STEP_COLUMNS = 4  # of a sequence's row in anchored_fwd's table: slot, place, kept, count


_ROOM_OF = {K: min(room for room in KEY_ROOMS if room >= K) for K in KEY_SIZES}


def key_room(K: int) -> int:
    """Returns the K of the variants that run keys of K numbers; other columns count as zeros."""
    return _ROOM_OF[K]


def part_columns(V: int) -> int:
    """Returns the columns of each part of a value head, as which the backward computes it."""
    return V if V <= PART_COLUMNS else PART_COLUMNS if V % PART_COLUMNS == 0 else VALUE_STEP


VALUE_KERNELS = "wide_states", "wide_dstate", "wide_grads"


def leaves_values(K: int, V: int) -> bool:
    """Returns whether a backward runs VALUE_KERNELS: its chains leave V' and Y for wide_grads.

    Where they do not, chunk_grads computes both again. For K = 256 it has no registers. For value
    heads in several parts of 64 columns it takes more time, docs/lessons.md says how much.
    """
    in_narrow_parts = V > PART_COLUMNS and part_columns(V) == VALUE_STEP
    return K == WIDE or (key_room(K) == MOST_KEYS and in_narrow_parts)
