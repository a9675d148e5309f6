"""CUDA source that makes rows of A and P of a chunk that grows: see new_rows.cuh."""

from pathlib import Path

from qla_kernels.gdn.kernels.chain.gated_tiles import SOURCE as GATED_TILES

SOURCE = GATED_TILES + Path(__file__).with_suffix(".cuh").read_text()
