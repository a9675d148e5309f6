"""The host code on a GPU: allocates results, picks variants and launches kernels in order.

forward.py and backward.py show the whole order. chunks.py, segments.py, chains.py, states.py and
activations.py launch one group of kernels each; tensors.py prepares the tensors of a call.
"""
