"""Checks of our layer for vLLM when it is built, and a log message."""

from functools import cache
from typing import Any

import torch

from qla_kernels.gdn import prefill_refusal
from qla_kernels.integrations.engines import log
from qla_kernels.runtime import device
from qla_kernels.runtime.sm90 import CAPABILITY


def refused(layer: Any) -> str | None:
    """Returns the reason why our prefill cannot run a layer of vLLM, or None.

    The answer is for the GPU of this process, or for a Hopper GPU if there is none.
    """
    K, V, dtype = layer.head_k_dim, layer.head_v_dim, layer.model_config.dtype
    q, v = (torch.empty(0, 1, 1, size, dtype=dtype, device="cpu") for size in (K, V))
    pool = torch.empty(0, 1, V, K, dtype=layer.get_state_dtype()[1], device="cpu")
    here = CAPABILITY
    if device.available():
        here = device.capability(torch.device("cuda", torch.cuda.current_device()))
    return prefill_refusal(q, q, v, pool=pool, capability=here)


@cache
def say_mixed() -> None:
    """Logs once per process that a batch with drafts and other sequences runs on vLLM's kernels."""
    log.info("vLLM: batches in which drafts stand beside other sequences run on vLLM's kernels")
