"""The kernels of the causal convolution: module names, of a training step and of decoding."""

KERNELS = ("fwd", "bwd", "join_parts", "weight_sums", "update")
