"""Checks a layer of vLLM when our subclass of it is constructed."""

from typing import Any

import torch

from qla_kernels.gdn import prefill_refusal
from qla_kernels.runtime import device
from qla_kernels.runtime.sm90 import CAPABILITY


def refused(layer: Any) -> str | None:
    """Returns the reason why our kernels cannot run a gated-delta-net layer of vLLM, or None.

    The answer depends on the layer's head sizes and dtypes, and on the GPU of this process; without
    a GPU, it is the answer for a Hopper GPU.
    """
    K, V, dtype = layer.head_k_dim, layer.head_v_dim, layer.model_config.dtype
    q, v = (torch.empty(0, 1, 1, size, dtype=dtype, device="cpu") for size in (K, V))
    pool = torch.empty(0, 1, V, K, dtype=layer.get_state_dtype()[1], device="cpu")
    here = CAPABILITY
    if device.available():
        here = device.capability(torch.device("cuda", torch.cuda.current_device()))
    return prefill_refusal(q, q, v, pool=pool, capability=here)
