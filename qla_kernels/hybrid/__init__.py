"""Shared prompts for models that mix attention with gated delta nets: layers over prefix trees.

    delta.py, delta_tables.py   the gated delta rule, and its tables

These functions take dualkv's SharedLayout, and run the kernels of other families.
"""

from qla_kernels.hybrid.delta import prepare_gated_delta_rule, shared_prefix_gated_delta_rule

__all__ = ["prepare_gated_delta_rule", "shared_prefix_gated_delta_rule"]
