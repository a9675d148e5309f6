"""Chooses a variant and a number of CTAs: pure functions of sizes."""

from qla_kernels.norm.shapes import COLUMNS, pass_rows


def columns_of(size: int) -> int:
    """Returns the smallest variant for rows of `size` columns."""
    return next(columns for columns in COLUMNS if size <= columns)


def num_blocks(num_rows: int, columns: int, places: int) -> int:
    """Returns how many CTAs walk the rows; `places` is the number of CTAs that run together.

    All CTAs run at once, and take equally many steps but for one.
    """
    steps = -(-num_rows // pass_rows(columns))
    rounds = -(-steps // places)
    return -(-steps // rounds)
