"""Sizes that the host and the kernels share."""

PIECE = 4  # fp32 logits in a 16-byte access
COLUMNS = 8192  # of a block of the vocabulary, whose logits are in memory at a time
TOKENS = 16384  # rows of a block: 512 MiB of logits

# Flags of a launch
FIRST, LAST, BIAS = 1, 2, 4  # the first, the last block of the vocabulary; a bias is added
