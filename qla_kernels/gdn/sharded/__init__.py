"""Sequences cut over ranks: the calls of context parallelism, on CPU and CUDA tensors."""
