"""CUDA source that moves states of a pool, after that of gated_tiles.py: see pools.cuh."""

from pathlib import Path

from qla_kernels.gdn.kernels.chain.gated_tiles import SOURCE as GATED_TILES

SOURCE = GATED_TILES + Path(__file__).with_suffix(".cuh").read_text()
