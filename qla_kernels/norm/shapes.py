"""Sizes that the host and the kernels share."""

PIECE = 8  # columns of a thread in one access: 16 bytes of 16-bit numbers
SPANS = 2  # pieces of a row that a thread has
COLUMNS = (64, 128, 256, 512)  # of the variants; each serves rows up to this size
WARPS = 8  # of a CTA


def row_threads(columns: int) -> int:
    """Returns how many threads share a row, in the variant for rows up to `columns`."""
    return columns // (PIECE * SPANS)


def pass_rows(columns: int) -> int:
    """Returns how many rows a CTA takes at a time."""
    return 32 * WARPS // row_threads(columns)
