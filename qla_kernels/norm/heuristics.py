"""Chooses the variant of a kernel and the number of CTAs: pure functions of sizes."""

from qla_kernels.norm.shapes import COLUMNS, pass_rows


def columns_of(size: int) -> int:
    """Returns the columns of the smallest kernel variant that takes rows of `size` columns."""
    return next(columns for columns in COLUMNS if size <= columns)


def num_blocks(num_rows: int, columns: int, places: int) -> int:
    """Returns the number of CTAs among which the rows are divided.

    All of them run at once, and their numbers of steps differ by at most one.

    Args:
        num_rows: number of rows.
        columns: columns of the kernel variant.
        places: how many CTAs can run on the GPU at once.
    """
    steps = -(-num_rows // pass_rows(columns))
    rounds = -(-steps // places)
    return -(-steps // rounds)
