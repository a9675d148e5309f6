"""Sizes that the host and the kernels share."""

PIECE = 4  # fp32 logits in a 16-byte access
# Size of a block of logits: 528 MiB. In tiles of 128 x 256, its product is 32 whole waves on the
# 132 SMs of an H100, and the gradient of a weight with 4096 columns is 8.
COLUMNS = 33 * 256
TOKENS = 16384

# Flags of a launch: the block is the first or the last of the vocabulary; there is a bias
FIRST, LAST, BIAS = 1, 2, 4
