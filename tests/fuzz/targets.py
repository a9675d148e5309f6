"""All functions under attack, by name."""

from tests.fuzz import (
    conv,
    dualkv_attention,
    dualkv_batch,
    dualkv_packing,
    gdn,
    makers,
    norm,
    sparse,
    sparse_layouts,
)
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    **gdn.TARGETS,
    **conv.TARGETS,
    **norm.TARGETS,
    **dualkv_attention.TARGETS,
    **dualkv_packing.TARGETS,
    **dualkv_batch.TARGETS,
    **sparse.TARGETS,
    **sparse_layouts.TARGETS,
    **makers.TARGETS,
}

# Of the time of a session, where it is not the same for all: numbers need more cases than lengths.
SHARES = {
    **dict.fromkeys(("gdn.chunk", "gdn.tree", "gdn.backward", "gdn.forward", "gdn.recurrent"), 6.0),
    **dict.fromkeys(("dualkv.attention", "sparse_ring.sparse_attention"), 6.0),
    **dict.fromkeys(("dualkv.varlen", "sparse_ring.build_index"), 3.0),
    **dict.fromkeys((*makers.TARGETS, "dualkv.padded_groups", "dualkv.plan_microbatches"), 0.2),
}

# What launches kernels; the rest is host code, which knows no device.
ON_KERNELS = (
    "gdn.chunk",
    "gdn.tree",
    "gdn.forward",
    "gdn.backward",
    "gdn.recurrent",
    "conv.causal",
    "conv.shared",
    "norm.gated",
    "dualkv.attention",
    "dualkv.varlen",
    "sparse_ring.sparse_attention",
    "sparse_ring.build_index",
)
