"""Segments that a forward keeps by itself, on a GPU: the bits are those of calls with the flag."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn import choices
from qla_kernels.gdn.launch.tensors import chunks_of
from qla_kernels.gdn.plan import WARM_LOG_BOUND
from qla_kernels.runtime import device
from tests.compare import assert_close
from tests.gdn_calls import Call, gradients, leaves, on_gpu

pytestmark = pytest.mark.hopper

NAMES = "q", "k", "v", "g", "beta", "initial_state"
KEPT = [
    ([32768], (4, 8), {}),
    ([24576, 8192], (2, 4), {}),
    ([20000, 0, 9000], (4, 8), {"exact": True}),
    ([16384], (4, 8), {"sizes": (96, 128)}),
]
NOT_KEPT = [([2048], (4, 8), {}), ([4096], (4, 16), {}), ([1024] * 8, (4, 8), {})]


def made(lengths: list[int], heads: tuple[int, int], known: bool = True, **others: Any) -> Call:
    """A call with an initial state; every fourth value head forgets nothing."""
    x = on_gpu(lengths, heads=heads, padding=0, output_final_state=True, **others)
    x["g"] *= torch.tensor([0.0, 0.002, 0.02, 1.0], device="cuda").repeat(heads[1] // 4)
    return {**x, "cu_seqlens_cpu": x["cu_seqlens"].cpu()} if known else x


def saved_by(x: Call, keep: bool | None) -> tuple[dict[str, Tensor], int]:
    """Returns all gradients, and how many tensors were saved."""
    inputs, saved = leaves(x), list[Tensor]()

    def noted(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda t: t):
        outputs = chunk_gated_delta_rule(**inputs, enable_fwd_cp_cache=keep)
    return gradients(outputs, inputs), len(saved)


def of_sums(outputs: tuple[Tensor, ...], inputs: Call) -> tuple[Tensor, ...]:
    """Returns gradients of the sum of all outputs; the graph serves again."""
    ones = [torch.ones_like(x) for x in outputs]
    return torch.autograd.grad(outputs, [inputs[n] for n in NAMES], ones, retain_graph=True)


def is_kept(lengths: list[int], heads: tuple[int, int]) -> bool:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    chunks = chunks_of(len(lengths), sum(lengths), bounds)
    sm_count = device.sm_count(torch.device("cuda"))
    shape = heads[1], 128, 128, sm_count
    return choices.is_worth_keeping(chunks, heads[0], shape, WARM_LOG_BOUND)


@pytest.mark.parametrize(("lengths", "heads", "others"), KEPT + NOT_KEPT)
def test_gradients_are_those_with_the_flag(lengths, heads, others):
    x = made(lengths, heads, **others)
    (default, size), (true, most), (false, least) = (saved_by(x, k) for k in (None, True, False))
    assert most == least + 8
    keeps = (lengths, heads, others) in KEPT
    if not others:
        assert keeps == is_kept(lengths, heads)
    assert size == (most if keeps else least)
    for name, want in (true if keeps else false).items():
        assert torch.equal(default[name], want), name
        assert_close(name, default[name], false[name], 1e-2)


@pytest.mark.parametrize("lengths", [[32768], [16384, 16384], [30000, 2768]])
def test_lengths_that_the_device_alone_knows(lengths):
    x = made(lengths, (2, 4), known=False)
    (default, size), (true, most), (false, _) = (saved_by(x, k) for k in (None, True, False))
    assert size == most
    for name, want in true.items():
        assert torch.equal(default[name], want), name
        assert_close(name, want, false[name], 1e-2)


def test_batch_invariant_gradients_stay_so():
    x = made([32768], (4, 8))
    alone, size = saved_by({**x, "batch_invariant": True}, None)
    assert size == saved_by({**x, "batch_invariant": True}, False)[1]
    true, _ = saved_by({**x, "batch_invariant": True}, True)
    for name, want in true.items():
        assert torch.equal(alone[name], want), name


def test_saved_segments_serve_two_backwards():
    inputs = leaves(made([32768], (4, 8)))
    outputs = chunk_gated_delta_rule(**inputs)
    for a, b in zip(*(of_sums(outputs, inputs) for _ in range(2)), strict=True):
        assert torch.equal(a, b)


def test_a_checkpointed_call():
    x = made([32768], (4, 8))
    want, _ = saved_by(x, None)
    inputs = leaves(x)

    def layer(*given: Tensor) -> Any:
        return chunk_gated_delta_rule(**{**inputs, **dict(zip(NAMES, given, strict=True))})

    outputs = checkpoint(layer, *(inputs[n] for n in NAMES), use_reentrant=False)
    for name, got in gradients(outputs, inputs).items():
        assert torch.equal(got, want[name]), name


def test_a_compiled_call_keeps_nothing_and_agrees():
    x = made([32768], (4, 8))
    want, _ = saved_by(x, False)
    inputs = leaves(x)
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True)
    for name, got in gradients(compiled(**inputs), inputs).items():
        assert_close(name, got, want[name], 1e-2)


def test_a_captured_step():
    inputs = leaves(made([32768], (4, 8)))
    want = of_sums(chunk_gated_delta_rule(**inputs), inputs)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        of_sums(chunk_gated_delta_rule(**inputs), inputs)
    with torch.cuda.graph(graph, stream=stream):
        got = of_sums(chunk_gated_delta_rule(**inputs), inputs)
    graph.replay()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
