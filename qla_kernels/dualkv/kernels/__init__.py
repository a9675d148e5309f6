"""The kernels of shared-prompt attention: module names, in the order of a training step."""

KERNELS = ("fwd", "bwd_dq", "bwd_dkv", "bwd", "dkv_combine", "dq_cast")
