"""Sizes that host and kernels share, besides the chunk's (tile/constants.py)."""

STATE_PIECE = 4  # numbers of a decoding state that a thread reads or writes at once
