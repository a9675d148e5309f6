KERNELS: tuple[str, ...] = ()
