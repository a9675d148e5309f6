"""Shared prompts for models that mix attention with gated delta nets: layers over prefix trees.

    conv.py, conv_tables.py   the causal convolution, and its tables

These functions take dualkv's SharedLayout, and run the kernels of other families.
"""

from qla_kernels.hybrid.conv import prepare_conv1d, shared_prefix_conv1d

__all__ = ["prepare_conv1d", "shared_prefix_conv1d"]
