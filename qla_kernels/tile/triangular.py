"""The inverse of a 64x64 unit lower triangular tile, as CUDA: see triangular.cuh.

The code is inline CUDA because the work is per warp, on 16x16 blocks in mma registers, which tile
operations cannot address. A kernel imports `SOURCE` and calls these functions from a CUDA function
of its own, which writes the matrix from its accumulators.
"""

from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cuh").read_text()
SCRATCH_BYTES = 4 * 16 * 24 * 4 + 64 * 64 * 2  # qla::Scratch
