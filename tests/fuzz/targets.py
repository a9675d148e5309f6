"""All functions under attack, by name."""

from tests.fuzz import (
    dualkv_attention,
    dualkv_packing,
    gdn,
    makers,
    sparse,
    sparse_layouts,
)
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    **gdn.TARGETS,
    **dualkv_attention.TARGETS,
    **dualkv_packing.TARGETS,
    **sparse.TARGETS,
    **sparse_layouts.TARGETS,
    **makers.TARGETS,
}

# What launches kernels; the rest is host code, which knows no device.
ON_KERNELS = (
    "gdn.chunk",
    "gdn.forward",
    "gdn.backward",
    "gdn.recurrent",
    "dualkv.attention",
    "dualkv.varlen",
    "sparse_ring.sparse_attention",
    "sparse_ring.build_index",
)
