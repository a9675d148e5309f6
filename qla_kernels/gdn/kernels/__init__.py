"""The kernels of the gated delta net: module names, in the order in which a forward runs them."""

KERNELS = ("l2norm", "chunk_table", "gate", "kkt_solve", "fused_fwd")
