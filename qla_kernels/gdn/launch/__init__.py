"""What runs on a GPU: allocates, picks variants, launches kernels in order.

forward.py and backward.py have the whole order; the others launch a group of kernels each.
"""
