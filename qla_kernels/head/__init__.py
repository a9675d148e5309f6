"""Log-probabilities of target tokens from hidden states and the weight of a language model's head.

The logits of all tokens are never in memory together. `SharedBatch.logprobs` and the integrations
of trainers call `target_logprobs`.

Reading order:
    api.py, validate.py, parts.py   the function, its checks, and the weights of a head's module
    autograd.py                     its derivative
    ops.py                          the torch operators, and what runs CPU tensors
    launch.py, shapes.py, kernels/  on a GPU
"""

from qla_kernels.head.api import target_logprobs
from qla_kernels.head.validate import refusal

__all__ = ["refusal", "target_logprobs"]
