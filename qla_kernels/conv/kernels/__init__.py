"""The kernels of the causal convolution: module names, of a training step and of engines."""

KERNELS = ("fwd", "bwd", "join_parts", "weight_sums", "update", "prefill")
