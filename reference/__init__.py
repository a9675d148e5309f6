"""What the operations mean: of each, the definition and the algorithm the kernels follow.

torch and einops only, on any device, in fp64 for truth. `gdn`, `conv`, `norm`, `dualkv`, `head` and
`sparse_ring` hold the forms; the functions here have the names and arguments of `qla_kernels`.
"""

from . import conv, dualkv, gdn, head, norm, sparse_ring
from .api import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    chunk_gdn,
)

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "chunk_gdn",
    "conv",
    "dualkv",
    "gdn",
    "head",
    "norm",
    "sparse_ring",
]
