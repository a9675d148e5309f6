"""Sizes that the host and the kernels share."""

WIDTHS = (2, 3, 4)
CHANNELS = 8  # 16 bytes of a token: on a GPU, channels are a multiple of this

PIECE = 4  # channels of a thread: 8 bytes of a token
LANES = 32  # of a warp
TILE = LANES * PIECE  # channels of a warp
RUNS = 8  # runs of tokens of a CTA, one for each warp; or for each two, see heads.py

EPSILON = 1e-6  # added to a head's sum of squares

# Columns of the table `rows`, which has a row for each node
KEPT, GIVEN = 0, 1
