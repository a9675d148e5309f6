"""CUDA source that makes A and P of a chunk from K K^T and Q K^T: see gated_tiles.cuh."""

from pathlib import Path

from qla_kernels.tile.triangular import SCRATCH_BYTES
from qla_kernels.tile.triangular import SOURCE as TRIANGULAR

__all__ = ["SCRATCH_BYTES", "SOURCE"]

SOURCE = TRIANGULAR + Path(__file__).with_suffix(".cuh").read_text()
