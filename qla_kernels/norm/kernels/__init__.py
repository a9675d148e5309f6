"""The kernels of the gated norm: module names, of a forward and of a backward."""

KERNELS = ("fwd", "bwd", "weight_sums")
