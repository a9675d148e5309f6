"""Names of the kernels between the products of a head."""

KERNELS = ("row_sums", "row_grads")
