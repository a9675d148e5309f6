"""Whole gated-delta-net layers, and their parts over batches that store shared prompts once.

These functions call the kernels of gdn, conv and norm; the layouts of batches come from dualkv.

layer.py, recompute.py      a layer between its projections: convolution, rule, norm and gate
step.py                     the same for one token of each sequence, for decoding
conv.py, conv_tables.py     the causal convolution with shared prompts, and its tables
delta.py, delta_tables.py   the gated delta rule with shared prompts, and its tables
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
