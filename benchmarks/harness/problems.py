"""A workload made concrete: rotating input sets, the counted work, and its truth."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.problem import attention_inputs, attention_truth, attention_work
from ..attention.workloads import DecoderLayer, SharedPrompts, VerticalSlash
from ..conv.rivals import conv_inputs, conv_truth, conv_work
from ..conv.workloads import Convolution
from ..gdn.problem import gdn_inputs, gdn_truth, gdn_work
from ..gdn.workloads import Gdn
from ..hybrid.layers import layer_inputs, layer_truth, layer_work
from ..hybrid.step import DecodeStep, step_inputs, step_truth, step_work
from ..hybrid.workloads import HybridPart
from ..model.problem import model_inputs, model_truth, model_work
from ..model.workloads import ModelStep
from ..serving.problem import prefill_inputs, prefill_truth, prefill_work
from ..serving.workloads import LayerStep, PoolDecode, PoolPrefill
from .truth import Truth
from .workload import Work


class Problem(NamedTuple):
    workload: Any
    dtype: torch.dtype
    inputs: list[Any]
    work: Work
    truth: Callable[[], Truth]  # of the first input set


# Inputs, work and truth by kind of workload, and the input that all sets have in common: libraries
# cache tables by the identity of cu_seqlens.
Parts = tuple[Callable[..., Any], Callable[..., Work], Callable[..., Truth], str]
ATTENTION: Parts = attention_inputs, attention_work, attention_truth, "visible"
LAYER: Parts = layer_inputs, layer_work, layer_truth, "weights"
STEP: Parts = step_inputs, step_work, step_truth, "weights"
PARTS: dict[type, Parts] = {
    Gdn: (gdn_inputs, gdn_work, gdn_truth, "cu_seqlens"),
    Convolution: (conv_inputs, conv_work, conv_truth, "bounds"),
    SharedPrompts: ATTENTION, VerticalSlash: ATTENTION, DecoderLayer: LAYER, HybridPart: LAYER,
    DecodeStep: STEP, LayerStep: STEP, PoolDecode: STEP,
    PoolPrefill: (prefill_inputs, prefill_work, prefill_truth, "cu_seqlens"),
    ModelStep: (model_inputs, model_work, model_truth, "layers"),
}  # fmt: skip


def work_of(workload: Any, element_size: int = 4) -> Work:
    """The counted work, without making inputs; by default in float32."""
    return PARTS[type(workload)][1](workload, element_size)


def problem_of(workload: Any, device: torch.device) -> Problem:
    """Input sets are as many as outlast the L2 cache; without a GPU there is one."""
    make, work, truth, common = PARTS[type(workload)]
    dtype = getattr(torch, workload.dtype) if device.type == "cuda" else torch.float32
    make_set = partial(make, workload, device, dtype)
    first = make_set()
    count = 1
    if device.type == "cuda":
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        count = num_input_sets(num_bytes(first), l2_bytes)
    sets = [first, *others(first, common, make_set, count - 1)]
    return Problem(
        workload, dtype, sets, work(workload, dtype.itemsize), partial(truth, workload, first)
    )


def others(first: Any, common: str, make: Callable[..., Any], count: int) -> list[Any]:
    """Input sets of other numbers, which have one input in common with the first."""
    shared = {common: getattr(first, common)}
    return [make(seed=seed)._replace(**shared) for seed in range(1, count + 1)]


def num_bytes(inputs: Any) -> int:
    """Of the tensors in a tuple, and in tuples and dicts inside."""
    if isinstance(inputs, Tensor):
        return inputs.numel() * inputs.element_size()
    inputs = tuple(inputs.values()) if isinstance(inputs, dict) else inputs
    return sum(map(num_bytes, inputs)) if isinstance(inputs, tuple) else 0


def num_input_sets(bytes_per_set: int, l2_bytes: int) -> int:
    """Enough sets that by the time one returns, the L2 cache holds none of it any more.

    A set of many times the cache's size needs no other: a call finds a few percent of it there.
    """
    if bytes_per_set >= 16 * l2_bytes:
        return 1
    return max(2, min(16, math.ceil(2 * l2_bytes / max(1, bytes_per_set))))
