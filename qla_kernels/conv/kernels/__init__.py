"""The kernels of the causal convolution: module names, in the order of a training step."""

KERNELS = ("fwd", "bwd", "join_parts", "weight_sums")
