"""Sizes that host code and kernels share; the chunk's size is in tile/constants.py."""

STATE_PIECE = 4  # numbers of a decoding state that a thread reads or writes in one access
