"""The kernels of sparse ring attention: module names, in the order of a training step."""

KERNELS = (
    "window_lse",
    "window_mass",
    "mark_candidates",
    "keep_best_columns",
    "select_lines",
    "diagonals",
    "gather_columns",
    "fwd",
    "bwd_dkv_columns",
    "bwd_dq",
    "bwd_dkv",
    "scatter",
    "round_sums",
)
