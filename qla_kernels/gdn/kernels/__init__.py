"""The kernels of the gated delta net: module names, in the order of a training step."""

KERNELS = (
    "l2norm",
    "activate",
    "chunk_table",
    "gate",
    "kkt_solve",
    "segment_plan",
    "segment_map",
    "segment_map_bwd",
    "segment_scan",
    "fused_fwd",
    "chunk_states",
    "dstate_chain",
    "child_sums",
    "chunk_grads",
    "activate_bwd",
    "gate_sums",
    "l2norm_bwd",
    "recurrent",
    "verify",
)
