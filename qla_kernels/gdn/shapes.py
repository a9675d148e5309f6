"""Sizes that host code and kernels share; the chunk's size is in tile/constants.py."""

WIDE = 256  # the K of kernels of their own; others have 64 and 128

L2NORM_EPSILON = 1e-6  # added to a row's sum of squares
STATE_PIECE = 4  # numbers of a decoding state that a thread reads or writes in one access
TAIL_PLACES = 128  # tokens that a slot of a pool has room for behind its anchor: two chunks
NEW_TOKENS = 8  # the most tokens of a sequence that one step of anchored_fwd computes
STEP_COLUMNS = 4  # of a sequence's row in anchored_fwd's table: slot, place, kept, count
