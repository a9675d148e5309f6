"""Sizes that the host and the kernels share."""

PIECE = 4  # fp32 logits in a 16-byte access
# Of a block, whose logits are in memory at a time: 528 MiB. Tiles of 128 x 256 are 32 whole waves
# on the 132 SMs of an H100 for logits, and 8 for gradients of weights of 4096 columns.
COLUMNS = 33 * 256
TOKENS = 16384

# Flags of a launch
FIRST, LAST, BIAS = 1, 2, 4  # the first, the last block of the vocabulary; a bias is added
