"""Kept tables under several streams and under captures, on a GPU that only keeps a diary."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from qla_kernels.runtime import device, device_tables

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Buffer:
    """Of a tensor on a GPU, all that a table asks for."""

    def __init__(self, name: object) -> None:
        self.name = name

    def get_device(self) -> int:
        return 0


@pytest.fixture
def gpu(monkeypatch):
    state = SimpleNamespace(stream=0, capturing=False, diary=[])
    monkeypatch.setattr(device, "stream", lambda _: state.stream)
    monkeypatch.setattr(device, "capturing", lambda: state.capturing)
    monkeypatch.setattr(device, "elsewhere", lambda make, *arguments: make(*arguments))
    monkeypatch.setattr(device, "reached", lambda: f"made on {state.stream}")

    def follow(event, read):
        state.diary.append((state.stream, event, [x.name for x in read]))

    monkeypatch.setattr(device, "follow", follow)
    monkeypatch.setattr(device_tables, "_read_by_graphs", set())
    return state


def cache(most: int = 3):
    made = []

    @device_tables.kept(most)
    def table(on, name):
        made.append(name)
        return torch.zeros(1) if on is CPU else Buffer(name)

    return table, made


def test_a_table_is_made_once_and_the_oldest_is_dropped():
    table, made = cache()
    first = table(CPU, 1)
    for name in (2, 3, 1, 2, 3):
        table(CPU, name)
    assert table(CPU, 1) is first
    assert made == [1, 2, 3]
    table(CPU, 4)
    assert table(CPU, 2) is table(CPU, 2)
    assert made == [1, 2, 3, 4]
    assert table(CPU, 1) is not first


def test_another_stream_waits_once_and_the_first_one_never(gpu):
    table, made = cache()
    for stream in (5, 5, 0, 0, 7, 5, 7):
        gpu.stream = stream
        table(GPU, "x")
    assert gpu.diary == [(0, "made on 5", ["x"]), (7, "made on 5", ["x"])]
    assert made == ["x"]


def test_what_a_capture_read_outlives_the_cache(gpu):
    """A graph's table was once freed when other lengths filled the cache."""
    table, _ = cache(most=1)
    read, unread = (weakref.ref(table(GPU, name)) for name in ("read", "unread"))
    gc.collect()
    assert read() is None
    read = weakref.ref(table(GPU, "read"))
    gpu.stream, gpu.capturing = 9, True
    assert table(GPU, "read") is read()
    gpu.stream, gpu.capturing = 0, False
    for name in ("unread", "others"):
        unread = weakref.ref(table(GPU, name)) if name == "unread" else unread
        table(GPU, name)
    gc.collect()
    assert read() is not None
    assert unread() is None
    assert gpu.diary == []  # a capture cannot wait for what is outside it


def test_what_a_capture_made_is_for_no_other_call(gpu):
    """It is filled at replays alone, in memory of that graph."""
    table, made = cache()
    gpu.stream, gpu.capturing = 9, True
    inside = table(GPU, "x")
    gpu.stream, gpu.capturing = 0, False
    outside = table(GPU, "x")
    assert outside is not inside
    assert table(GPU, "x") is outside
    assert made == ["x", "x"]


def test_a_table_of_several_tensors(gpu):
    held = device_tables.Kept({"views": 1}, Buffer("a"), Buffer("b"))
    gpu.stream = 3
    assert held.here() == held.here() == {"views": 1}
    assert gpu.diary == [(3, "made on 0", ["a", "b"])]


def test_numbers_become_arguments_of_launches_in_a_capture(monkeypatch):
    rows = [[0, 3, 7], [-1, 0, 2**31 - 1]]
    want = torch.tensor(rows, dtype=torch.int32)
    assert torch.equal(device_tables.numbers(rows, CPU), want)
    with torch.device("meta"):
        assert torch.equal(device_tables.numbers(rows, CPU), want)
    zeros = torch.zeros
    monkeypatch.setattr(device, "capturing", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *a, device, **o: zeros(*a, **o))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda _: pytest.fail("a copy"))
    assert torch.equal(device_tables.numbers(rows, GPU), want)
