"""Equal shares of chunks on a GPU: the bits of whole items, whatever runs beside."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.plan import Plan
from qla_kernels.lab.selftest.compare import relative_l2
from qla_kernels.lab.selftest.gdn_forward import check, forward
from qla_kernels.lab.selftest.gdn_shares import SHARED, WHOLE, assert_same_bits, both
from tests.gdn_calls import Call, on_gpu

pytestmark = pytest.mark.hopper

LENGTHS = (
    [8192] * 4,  # with 48 heads 192 items
    [8192, 6000, 4000, 9000, 2000],
    [0, 65, 0, 1, 1300, 0, 777, 64, 2000, 0],
    [70, 1],  # fewer chunks than CTAs
    [(37 * i) % 600 for i in range(120)],
)


def mild(lengths: list[int], **others: Any) -> Call:
    """A call whose states survive many chunks, so that one that is not handed on shows."""
    x = on_gpu(lengths, **others)
    return x | {"g": x["g"] / 100}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: f"{len(x)} sequences")
def test_bits_of_whole_items(lengths, dtype):
    x = mild(lengths, dtype=dtype, heads=(16, 48))
    want, first = both(x, is_train=True)
    assert_same_bits(x, want, first)
    for i in range(20):
        _, again = both(x, is_train=True)
        assert_same_bits(x, want, again, f"run {i}: ")


def test_items_longer_than_several_shares():
    x = mild([20_000, 300], heads=(2, 4))
    want, got = both(x)
    assert_same_bits(x, want, got)
    check(x, got.o, got.final_state)


def test_graph_replays_beside_another_stream(monkeypatch):
    x, y = (mild([8192] * n, heads=(16, heads)) for n, heads in ((4, 48), (3, 64)))
    monkeypatch.setattr(launch, "planned", lambda *_: (WHOLE, False))
    wants = forward(x), forward(y)
    monkeypatch.setattr(launch, "planned", lambda *_: (SHARED, False))
    forward(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = forward(x)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for i in range(10):
        replayed.o.fill_(torch.nan)
        replayed.final_state.fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            graph.replay()
        with torch.cuda.stream(streams[1]):
            beside = forward(y)
        torch.cuda.synchronize()
        for given, want, got in zip((x, y), wants, (replayed, beside), strict=True):
            assert_same_bits(given, want, got, f"replay {i}: ")


# of 32768 tokens: equal shares, whole items longest first, and one sequence with all tokens
CONTENTS = ([8192] * 4, [16000, 6768, 10000, 0], [9000, 7000, 8768, 8000], [32768, 0, 0, 0])


def packed(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0)


@pytest.mark.parametrize("heads", [48, 64])
def test_a_graph_takes_any_lengths_that_the_device_alone_knows(heads):
    """With the bits of whole items, unless the lengths ask for another path than shares."""
    lengths = CONTENTS if heads == 48 else [[*x[:2], 24576 - sum(x[:2])] for x in CONTENTS[:3]]
    x = mild(lengths[0], heads=(16, heads))
    chosen, _ = planned_for(x)
    assert chosen.most_cut is not None
    forward(x)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward(x)
    for each in (*lengths, *lengths):
        x["cu_seqlens"].copy_(packed(each))
        got.o.fill_(torch.nan)
        got.final_state.fill_(torch.nan)
        graph.replay()
        want, _ = both(x)
        if not chosen.bands or max(each) < 64 * chosen.bands[1].least:
            assert_same_bits(x, want, got, f"{each}: ")
        else:
            for a, b in ((got.o, want.o), (got.final_state, want.final_state)):
                assert relative_l2(a.float(), b.float()) < 0.01  # another order of sums


@pytest.mark.parametrize("most_cut", [1, 200])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: f"{len(x)} sequences")
def test_shares_or_whole_items_by_length(lengths, most_cut):
    x = mild(lengths, heads=(16, 48))
    for _ in range(5):
        want, got = both(x, SHARED._replace(most_cut=most_cut), is_train=True)
        assert_same_bits(x, want, got)


def planned_for(x: Call) -> tuple[Plan, bool]:
    """Returns the plan of a call."""
    found = []
    planned = launch.planned

    def noted(*given: Any) -> Any:
        found.append(planned(*given))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "planned", noted)
        forward(x)
    return found[0]
