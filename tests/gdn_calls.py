"""Calls of gdn for tests: one of each thing that a caller can ask for, and calls on a GPU."""

from typing import Any

import torch

from qla_kernels.lab.selftest.gdn_calls import (
    DIFFERENTIABLE,
    Call,
    call,
    definition,
    gradients,
    leaves,
    records,
)

__all__ = [
    "CALLS",
    "DIFFERENTIABLE",
    "Call",
    "call",
    "definition",
    "gradients",
    "leaves",
    "on_gpu",
    "records",
]

# One of each thing a caller can ask for: arguments of `call`.
CALLS: dict[str, dict[str, Any]] = {
    "dense": {},
    "one head per group": {"heads": (3, 3), "tokens": 64},
    "packed": {"lengths": [0, 1, 65, 0, 63], "padding": 4},
    "activated": {"activations": True},
    "negative eigenvalues": {"activations": True, "allow_neg_eigval": True},
    "activated and packed": {"activations": True, "lengths": [33, 0, 70], "padding": 4},
    "V first": {"state_v_first": True, "scale": 0.5},
    "scale 0": {"scale": 0.0},
    "FLA's keywords": {"chunk_size": 32, "chunk_indices": torch.zeros(1, 2, dtype=torch.int64)},
}


def on_gpu(lengths: list[int] | None = None, dtype=torch.bfloat16, size=128, **others: Any) -> Call:
    """A call's arguments on a GPU; packed ones are followed by padding tokens full of NaN."""
    others = {"sizes": (size, size), "gates": torch.float32, **others}
    padding = others.pop("padding", 3 if lengths else 0)
    x = call(lengths, dtype=dtype, padding=padding, **others)
    return {
        name: value.to("cuda") if torch.is_tensor(value) else value for name, value in x.items()
    }
