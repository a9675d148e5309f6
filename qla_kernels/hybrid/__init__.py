"""Layers of models that mix attention with gated delta nets, on the kernels of other families.

layer.py, recompute.py      a layer between its projections: convolution, rule, norm and gate
step.py                     a step of decoding: convolution, rule, norm and gate
conv.py, conv_tables.py     the causal convolution over a shared-prompt layout, and its tables
delta.py, delta_tables.py   the gated delta rule over a shared-prompt layout, and its tables
layouts.py                  the check of a layout, and the tables that it stores
"""

from qla_kernels.hybrid.conv import prepare_conv1d, shared_prefix_conv1d
from qla_kernels.hybrid.delta import prepare_gated_delta_rule, shared_prefix_gated_delta_rule
from qla_kernels.hybrid.layer import gated_delta_net
from qla_kernels.hybrid.step import decode_gated_delta_net

__all__ = [
    "decode_gated_delta_net",
    "gated_delta_net",
    "prepare_conv1d",
    "prepare_gated_delta_rule",
    "shared_prefix_conv1d",
    "shared_prefix_gated_delta_rule",
]
