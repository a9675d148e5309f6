"""The gated norm on a GPU: fp64 truth, strides, packs, graphs, sizes past 2^31."""

import pytest
import torch

from qla_kernels import gated_rms_norm
from qla_kernels.norm import ops
from tests.norm_check import ROUNDING, case, check

pytestmark = pytest.mark.hopper

GPU = "cuda"
DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("size", [8, 64, 96, 128, 192, 256, 384, 512])
def test_sizes_of_heads(size, silu, dtype):
    for shape in ((3000, 16, size), (2, 501, 3, size), (777, size)):
        check(case(shape, GPU, dtype=dtype, silu=silu, projection=16))


@pytest.mark.parametrize("weights", list(ROUNDING))
def test_packs_and_weights_of_any_dtype(weights):
    for bounds in (torch.int32, torch.int64):
        check(case((1, 900, 4, 128), GPU, weights=weights, padding=130, bounds=bounds))


def test_repeats_bit_for_bit():
    *call, dy = case((4000, 8, 128), GPU)
    want = ops.gated_norm_fwd(*call), *ops.gated_norm_bwd(dy, *call)
    for _ in range(5):
        got = ops.gated_norm_fwd(*call), *ops.gated_norm_bwd(dy, *call)
        assert all(map(torch.equal, got, want))


def test_a_graph_replays_a_step():
    x, gate, weight, *_, dy = case((1000, 8, 128), GPU)
    leaves = [t.detach().requires_grad_() for t in (x, gate, weight)]

    def step() -> list[torch.Tensor]:
        y = gated_rms_norm(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        step()  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    x, gate, weight, *_, _ = case((1000, 8, 128), GPU)
    with torch.no_grad():
        for leaf, value in zip(leaves, (x, gate, weight), strict=True):
            leaf.copy_(value)
    graph.replay()
    assert all(map(torch.equal, got, step()))


def test_more_than_2_31_numbers():
    T, H, V = 2**20 + 5, 16, 128
    x = torch.zeros(T, H, V, dtype=torch.bfloat16, device=GPU)
    x[-3:] = torch.randn(3, H, V, device=GPU)
    weight = torch.randn(V, device=GPU)
    y = ops.gated_norm_fwd(x, x, weight, [], 1e-6, True)
    want = ops.gated_norm_fwd(x[-3:].clone(), x[-3:].clone(), weight, [], 1e-6, True)
    assert torch.equal(y[-3:], want)
    done = ops.gated_norm_bwd(x, x, x, weight, [], 1e-6, True)
    few = ops.gated_norm_bwd(*(x[-3:].clone() for _ in range(3)), weight, [], 1e-6, True)
    assert torch.equal(done.dx[-3:], few.dx)
    assert torch.equal(done.dgate[-3:], few.dgate)
