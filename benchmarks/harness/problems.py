"""A workload made concrete: rotating input sets, the counted work, and its truth."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..attention.layer import layer_inputs, layer_truth, layer_work
from ..attention.problem import attention_inputs, attention_truth, attention_work
from ..attention.workloads_layer import DecoderLayer
from ..gdn.inputs import GdnInputs, gdn_inputs, num_input_sets
from ..gdn.workloads import Gdn
from .floor import Work, gdn_work
from .truth import Truth, gdn_truth


class Problem(NamedTuple):
    workload: Any
    dtype: torch.dtype
    inputs: list[Any]
    work: Work
    truth: Callable[[], Truth]  # of the first input set


def problem_of(workload: Any, device: torch.device, input_sets: int = 0) -> Problem:
    """`input_sets` 0 takes as many as outlast the L2 cache; without a GPU there is one."""
    kinds: tuple[tuple[type, Callable[..., Made]], ...] = ((Gdn, _gdn), (DecoderLayer, _layer))
    of_kind = next((make for kind, make in kinds if isinstance(workload, kind)), _attention)
    first, more, dtype, work, truth = of_kind(workload, device)
    if device.type != "cuda":
        input_sets = 1
    elif not input_sets:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        input_sets = num_input_sets(first.num_bytes, l2_bytes)
    others = [more(seed) for seed in range(1, input_sets)]
    return Problem(workload, dtype, [first, *others], work, truth)


Made = tuple[Any, Callable[[int], Any], torch.dtype, Work, Callable[[], Truth]]


def _gdn(workload: Gdn, device: torch.device) -> Made:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    first = gdn_inputs(workload, device, dtype)

    def more(seed: int) -> GdnInputs:
        return gdn_inputs(workload, device, dtype, seed, first.cu_seqlens)

    work = gdn_work(workload, dtype.itemsize)
    return first, more, dtype, work, lambda: gdn_truth(workload, first)


def _attention(workload: Any, device: torch.device) -> Made:
    dtype = getattr(torch, workload.dtype) if device.type == "cuda" else torch.float32
    first = attention_inputs(workload, device, dtype)
    work = attention_work(workload, dtype.itemsize)

    def more(seed: int) -> Any:
        return attention_inputs(workload, device, dtype, seed)._replace(visible=first.visible)

    return first, more, dtype, work, lambda: attention_truth(workload, first)


def _layer(workload: DecoderLayer, device: torch.device) -> Made:
    dtype = getattr(torch, workload.dtype) if device.type == "cuda" else torch.float32
    first = layer_inputs(workload, device, dtype)

    def more(seed: int) -> Any:
        return layer_inputs(workload, device, dtype, seed)._replace(weights=first.weights)

    work = layer_work(workload, dtype.itemsize)
    return first, more, dtype, work, lambda: layer_truth(workload, first)
