"""The backward at K = 256 on a GPU, by its launches: fp64 truth, repeated runs, a CUDA graph."""

import pytest
import torch

from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.lab.selftest.cases import to
from qla_kernels.lab.selftest.gdn_backward import backward, check, gradients, saved
from qla_kernels.lab.selftest.gdn_calls import small

pytestmark = pytest.mark.hopper

# FLA's GatedDeltaNet has V = 512, one value head a key head
SHAPES = [((2, 2), (256, 512)), ((1, 4), (256, 128)), ((2, 4), (256, 64))]


def same(got: GdnBackward, want: GdnBackward) -> None:
    for name in GdnBackward._fields:
        a, b = getattr(got, name), getattr(want, name)
        assert a is b is None or torch.equal(a, b), name


@pytest.mark.parametrize(("heads", "sizes"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_packs_repeat_bit_for_bit(heads, sizes, dtype):
    x = small([1000, 777, 3, 64], dtype, heads=heads, sizes=sizes)
    do, dht = gradients(x)
    given = to((x, do, dht, saved(x)), "cuda")
    first = backward(*given)
    check(x, do, dht, to(first, "cpu"))
    for _ in range(20):
        same(backward(*given), first)


def test_a_batch_with_raw_gates_and_norms():
    x = small(batch=3, tokens=300, heads=(2, 4), sizes=(256, 128), activations=True)
    do, dht = gradients(x)
    got = backward(*to((x, do, dht, saved(x)), "cuda"))
    check(x, do, dht, to(got, "cpu"))


def test_a_graph_replays_it():
    x = small([500, 300], heads=(2, 2), sizes=(256, 256))
    do, dht = gradients(x)
    given = to((x, do, dht, saved(x)), "cuda")
    want = backward(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = backward(*given)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        same(got, want)
