"""What is asked of the machine, and that a machine without a GPU has an answer too."""

import contextlib
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qla_kernels.runtime import device

DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root)\n"
    "GCC version:  gcc version 13.3.0\n"
)


@pytest.fixture
def driver(monkeypatch):
    """device.driver, not cached, on a machine whose driver says `text`."""

    def ask(text: str | None) -> str | None:
        def read_text(path: Path) -> str:
            if text is None:
                raise FileNotFoundError(path)
            return text

        monkeypatch.setattr(Path, "read_text", read_text)
        return device.driver.__wrapped__()

    return ask


def test_driver_from_proc(driver):
    assert driver(DRIVER) == "580.65.06"


@pytest.mark.parametrize("text", [None, ""])
def test_driver_where_proc_is_hidden(driver, monkeypatch, tmp_path, text):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver(text) is None
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 570.86.10\necho 570.86.10\n")
    smi.chmod(smi.stat().st_mode | stat.S_IEXEC)
    assert driver(text) == "570.86.10"
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert driver(text) is None


def test_properties_are_those_of_the_asked_device(monkeypatch):
    class Properties:
        major, minor, multi_processor_count, name = 9, 0, 132, "H200"

    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: asked.append(d) or Properties
    )
    remembered = device._remembered_properties, device._remembered_sm_count
    for cache in remembered:
        cache.cache_clear()
    for any_one in (torch.device("cuda", 1), torch.device("cuda")):
        assert device.capability(any_one) == (9, 0)
        assert device.sm_count(any_one) == 132
        assert device.name(any_one) == "H200"
    for cache in remembered:
        cache.cache_clear()
    # once of a GPU; "cuda" is whichever is the current one
    assert asked == [torch.device("cuda", 1)] + [torch.device("cuda")] * 3


def test_where_kernels_are_launched_the_gpu_is_current_and_autograd_away(monkeypatch):
    """And both as they were afterwards, also where the block fails."""
    current = [3]

    def exchange(index):
        current.append(index)
        return current[-2]

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    x = torch.zeros(2, 3, requires_grad=True)

    def launches():
        with device.of(SimpleNamespace(get_device=lambda: 1)):
            assert current[-1] == 1
            assert not x.view(6).requires_grad
            assert not (2 * x).requires_grad
            raise KeyError

    with pytest.raises(KeyError):
        launches()
    assert current == [3, 1, 3]
    assert (2 * x).requires_grad


def test_a_cpu_tensor_changes_no_device():
    with device.of(torch.zeros(1)):
        assert not torch.ones(1, requires_grad=True).exp().requires_grad


def test_a_fork_is_ordered_with_the_caller_s_stream(monkeypatch):
    """Both ways, also where the block fails; a CPU tensor needs no streams."""
    events = []

    class Stream:
        def __init__(self, name):
            self.name, self.device = name, torch.device("cuda", 0)

        def __eq__(self, other):
            return self.name == other.name

        def __hash__(self):
            return hash(self.name)

        def wait_stream(self, other):
            events.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def stream(entered):
        events.append(f"to {entered.name}")
        try:
            yield
        finally:
            events.append("back")

    device._second_stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("first"))
    handed_out = iter(("first", "second", "third", "fourth"))  # streams in use among them
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream(next(handed_out)))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))

    def launches():
        with device.fork(x) as aside, aside:
            events.append("launch")
            raise KeyError

    with pytest.raises(KeyError):
        launches()
    entered = ["second waits for first", "to second", "launch", "back"]
    assert events == [*entered, "first waits for second"]
    with device.fork(torch.zeros(1)) as aside, aside:
        assert len(events) == 5
    for here, second in (("other", "third"), ("first", "second"), ("other", "third")):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, here=here: Stream(here))
        events.clear()
        with device.fork(x):
            assert events == [f"{second} waits for {here}"]
    device._second_stream.cache_clear()


def test_fresh_memory_can_be_poisoned(request):
    """The fixture of conftest.py, which GPU tests always run under."""
    request.getfixturevalue("poison")
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    fresh = (torch.empty(5), torch.empty_like(x), x.new_empty(2), torch.empty_strided((2,), (3,)))
    assert all(t.isnan().all() for t in fresh)
    assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
