"""Defines the sizes that host code and kernels share."""

BLOCK = 64  # tokens; the mask's slashes are diagonals of such blocks
TILE = 2 * BLOCK  # rows of a query tile: a shard is a whole number of them
WORD = 32  # diagonals of a word of the index
OBSERVED = 64  # queries that an index is estimated from
UNIT = 30  # the masses of one head's observed attention add up to 2^UNIT
SHARE = 20  # recall targets are integers of 2^-SHARE
