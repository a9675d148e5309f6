"""CUDA source that makes rows of P for new tokens of a chunk: see new_rows.cuh."""

from pathlib import Path

from qla_kernels.gdn.kernels.chain.gated_tiles import SOURCE as GATED_TILES

SOURCE = GATED_TILES + Path(__file__).with_suffix(".cuh").read_text()
