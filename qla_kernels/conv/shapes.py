"""Sizes that the host and the kernels share."""

WIDTHS = (2, 3, 4)
CHANNELS = 8  # 16 bytes of a token: the host refuses channels that are no multiple

# Columns of the table `rows`, which has a row for each node
KEPT, GIVEN = 0, 1
