"""RMSNorm with an output gate, behind a gated delta net.

Reading order:
    api.py, validate.py, autograd.py   the public function, its checks and its derivative
    ops.py                             the torch operators, and what runs CPU tensors
    launch.py, heuristics.py, shapes.py, kernels/  on a GPU
"""

from qla_kernels.norm.api import gated_rms_norm
from qla_kernels.norm.validate import refusal

__all__ = ["gated_rms_norm", "refusal"]
