"""Names of the kernel modules of shared-prompt attention, in the order of a training step."""

KERNELS = ("fwd", "bwd_dq", "bwd_dkv", "bwd_dkv_wide", "bwd", "dkv_combine", "dq_cast")
