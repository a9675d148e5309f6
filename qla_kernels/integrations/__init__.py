"""Other libraries' models on our kernels. Nothing here is imported unless asked for."""
