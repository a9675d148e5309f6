"""The causal convolution of a gated-delta-net layer, with its bias and activation.

Reading order:
    api.py, validate.py, autograd.py   the public function, its checks and its derivative
    update.py                          the public function of one token, for decoding
    ops.py                             the torch operators, and what runs CPU tensors
    launch.py, heuristics.py, shapes.py, kernels/   on a GPU

The same operators also run over prefix trees: see `shared_prefix_conv1d` in hybrid/.
"""

from qla_kernels.conv.api import causal_conv1d
from qla_kernels.conv.update import causal_conv1d_update
from qla_kernels.conv.validate import refusal

__all__ = ["causal_conv1d", "causal_conv1d_update", "refusal"]
