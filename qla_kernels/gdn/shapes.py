"""Sizes that host code and kernels share; the chunk's size is in tile/constants.py."""

L2NORM_EPSILON = 1e-6  # added to a row's sum of squares
STATE_PIECE = 4  # numbers of a decoding state that a thread reads or writes in one access
