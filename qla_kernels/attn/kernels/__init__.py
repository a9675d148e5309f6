"""Names of the kernel modules that every attention family uses."""

KERNELS = ("delta",)
