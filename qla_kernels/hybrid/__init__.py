"""Shared prompts for models that mix attention with gated delta nets: layers over prefix trees.

    conv.py, conv_tables.py     the causal convolution, and its tables
    delta.py, delta_tables.py   the gated delta rule, and its tables
    layouts.py                  what both share

These functions take dualkv's SharedLayout, and run the kernels of other families.
"""

from qla_kernels.hybrid.conv import prepare_conv1d, shared_prefix_conv1d
from qla_kernels.hybrid.delta import prepare_gated_delta_rule, shared_prefix_gated_delta_rule

__all__ = [
    "prepare_conv1d",
    "prepare_gated_delta_rule",
    "shared_prefix_conv1d",
    "shared_prefix_gated_delta_rule",
]
