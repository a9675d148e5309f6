"""The GPU's side of the benchmark on a pretended device: graphs, events, poison, replay checks.

What CUDA does is replaced by the least that lets the code run: a graph replays by calling again, an
event reads a counter. That the numbers mean something, only a GPU can show.
"""

import contextlib
import gc
import itertools
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gdn.workloads import Gdn
from benchmarks.harness import records
from benchmarks.harness import worker as worker_module
from benchmarks.harness.adapters import Call
from benchmarks.harness.messages import Begin, Options, RowFacts
from benchmarks.harness.records import FAILED, OK, TIME_LIMIT, WRONG, Result
from benchmarks.harness.timing import EagerTimer, EventTimer, GraphTimer
from benchmarks.harness.watchdog import _note
from benchmarks.harness.worker import Worker
from tests.host.bench_fakes import Raises, Refuses, Right, WrongChunk

WORKLOAD = Gdn((1, 2), (70, 5), head_dim=16)


class Pretended:
    """One pretended device: what was captured, and a clock that runs a millisecond per reading."""

    def __init__(self):
        self.clock = itertools.count()
        self.capturing = None
        self.empty_replays = False  # as when a library launches on a stream of its own
        self.capture_fails = False
        self.broken = False

    def install(self, monkeypatch):
        device = self

        class Graph:
            def __init__(self):
                self.calls = []

            def replay(self):
                for call in [] if device.empty_replays else self.calls:
                    call()

        @contextlib.contextmanager
        def capture(graph, stream):
            assert stream is own
            if device.capture_fails:
                raise RuntimeError("operation not permitted when stream is capturing")
            device.capturing = graph
            yield
            device.capturing = None

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.time = next(device.clock)

            def elapsed_time(self, end):
                return float(end.time - self.time)

        def synchronize():
            if device.broken:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        own = object()
        for name, value in {
            "CUDAGraph": Graph, "graph": capture, "Event": Event, "synchronize": synchronize,
            "current_stream": lambda: own, "empty_cache": lambda: None,
            "mem_get_info": lambda: (1 << 20, 1 << 20), "reset_peak_memory_stats": lambda: None,
            "memory_allocated": lambda: 100, "max_memory_allocated": lambda: 350,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        return self

    def captured(self, function):
        """`function`, which a capture remembers instead of only calling."""

        def run():
            if self.capturing is not None:
                self.capturing.calls.append(function)
            return function()

        return run


@pytest.fixture
def device(monkeypatch):
    return Pretended().install(monkeypatch)


class Graphable(Right):
    """Writes into tensors of its own, so that a replay can be seen."""

    name = label = "graphable"

    def __init__(self, device):
        self.device = device

    def prepare(self, workload, inputs):
        call = super().prepare(workload, inputs)
        kept = call.collect(call.run())

        def compute():
            for name, value in call.collect(call.run()).items():
                kept[name].copy_(value)
            return kept

        run = self.device.captured(compute)
        return Call(run, lambda raw: raw, lambda: run)


def heard(implementations, options):
    said = []
    worker = Worker(said.append, implementations)
    worker._on_gpu = True
    usable = worker.row(WORKLOAD, [i.name for i in implementations], options)
    return usable, said, {m.implementation: m for m in said if isinstance(m, Result)}


OPTIONS = Options(rounds=2, burst_s=0.01, idle_s=0.0)


def test_a_row_from_first_call_to_eager(device):
    usable, said, results = heard([Graphable(device)], OPTIONS)
    result = results["graphable"]
    assert usable
    assert result.status == OK, result.detail
    assert result.graph
    assert result.peak_bytes == 250
    assert 0 < result.eager_p20_ms <= result.eager_ms <= result.eager_p80_ms
    assert result.eager_samples >= 2
    assert result.host_additions > 1  # the reference's chunks are more than an addition
    assert result.p20_ms == result.p50_ms == result.p80_ms == 1.0
    assert result.samples >= 2 * 3
    phases = [m.phase for m in said if isinstance(m, Begin)]
    before = ["inputs", "truth", "first call", "capture"]
    assert phases == [*before, "timing", "timing", "eager", "eager", "eager"]  # one makes the calls
    assert sum(isinstance(m, RowFacts) for m in said) == 1


def test_a_graph_that_computes_nothing_is_not_timed(device):
    device.empty_replays = True
    _, _, results = heard([Graphable(device)], OPTIONS)
    assert results["graphable"].status == FAILED
    assert "a replay of its graph does not write" in results["graphable"].detail


def test_what_cannot_be_captured_is_timed_with_events_and_says_so(device):
    device.capture_fails = True
    _, _, results = heard([Graphable(device)], OPTIONS)
    result = results["graphable"]
    assert result.status == OK
    assert not result.graph
    assert "launch gaps are in its time" in result.detail


def test_implementations_take_turns(device):
    others = [Graphable(device), Graphable(device)]
    others[1].name = "second"
    _, said, _ = heard(others, OPTIONS)
    for phase, bursts in (("timing", 2), ("eager", 3)):
        turns = [m.implementation for m in said if isinstance(m, Begin) and m.phase == phase]
        assert turns == ["graphable", "second"] * bursts


def test_a_broken_context_ends_the_worker_after_naming_the_culprit(device):
    class Illegal(Raises):
        name = "illegal"

        def prepare(self, workload, inputs):
            device.broken = True
            return super().prepare(workload, inputs)

    usable, _, results = heard([Illegal(), Graphable(device)], OPTIONS)
    assert not usable
    assert results["illegal"].status == FAILED
    assert "graphable" not in results


def test_the_others_go_on_after_a_wrong_a_raising_and_a_refusing_one(device):
    usable, _, results = heard([WrongChunk(), Raises(), Refuses(), Graphable(device)], OPTIONS)
    assert usable
    assert results["wrong_chunk"].status == WRONG
    assert results["graphable"].status == OK


def test_a_sample_is_a_replay_over_its_calls(device):
    counts = [0, 0, 0]

    def call(i):
        def run():
            counts[i] += 1

        return device.captured(run)

    timer = GraphTimer([call(i) for i in range(3)])
    assert timer.calls_per_step == 3
    before = list(counts)
    samples = timer.burst(0.0011)
    assert samples == [pytest.approx(1e-3 / 3)] * 3  # 1 ms on the pretended clock
    assert [a - b for a, b in zip(counts, before, strict=True)] == [4, 4, 4]  # one to wake up


def test_a_graph_keeps_what_its_calls_read(device):
    """Inputs made for a rival, such as its form of a gate, belong to its calls alone."""

    class Inputs:
        pass

    def call():
        inputs = Inputs()
        made.append(weakref.ref(inputs))
        return lambda: len(vars(inputs))

    made = []
    timer = GraphTimer([call() for _ in range(2)])
    gc.collect()
    assert all(inputs() is not None for inputs in made)
    del timer
    gc.collect()
    assert not any(inputs() is not None for inputs in made)


def test_a_call_longer_than_a_burst_is_sampled_once(device):
    timer = GraphTimer([device.captured(lambda: None)])
    assert len(timer.burst(0.001)) == 1
    assert len(timer.burst(0.0011)) == 3
    assert len(timer.burst(0.0101)) == 10


def test_a_gpu_worker_is_not_on_the_default_stream(monkeypatch):
    """A backward runs on its forward's stream, and the default one cannot be captured."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "a stream of its own")
    monkeypatch.setattr(torch.cuda, "set_stream", chosen.append)
    Worker(lambda message: None, [])
    assert chosen == ["a stream of its own"]


def test_events_without_a_graph_take_turns_over_the_inputs(device):
    seen = []
    timer = EventTimer([lambda: seen.append(0), lambda: seen.append(1)])
    timer.burst(0.0011)
    assert seen == [0, 0, 1, 0]


def test_poison_is_bounded_by_free_memory(device, monkeypatch):
    made = []
    monkeypatch.setattr(
        worker_module.torch, "full", lambda shape, value, device: made.append((shape, value))
    )
    worker = Worker(lambda message: None, [])
    worker._on_gpu = True
    worker._poison(1e12)
    (shape, value), = made  # fmt: skip
    assert shape == ((1 << 19) // 4,)
    assert math.isnan(value)


def test_eager_calls_take_turns_over_the_inputs_and_a_sample_is_a_call(device, monkeypatch):
    """On a clock that only calls move: 2 and 4 ms each, an addition 0.5 ms, a wait 10 ms."""
    now, seen = [0.0], []

    def spend(seconds, name=None):
        now[0] += seconds
        seen.append(name)

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("benchmarks.harness.timing.time", clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: spend(0.010))
    calls = [lambda: spend(0.002, "a"), lambda: spend(0.004, "b")]
    timer = EagerTimer(calls, torch.device("cpu"))
    timer._addition = lambda: spend(0.0005)
    samples = timer.burst(0.05)  # the first call takes 12 ms with its wait: four fit, once
    assert samples == [pytest.approx(0.003 + 0.010 / 4)]
    assert timer.host == [pytest.approx(0.003 / 0.0005)]
    assert "".join(filter(None, seen)) == "ab" + "a" + "baba"
    assert len(timer.burst(0.5)) == 7  # 500 ms; 75 for ten calls, ten additions and four waits


def test_eager_calls_that_fail_leave_what_was_measured_before(device):
    class Fails(Graphable):
        name = "fails"

        def prepare(self, workload, inputs):
            return replace(super().prepare(workload, inputs), eager=self.broken)

        def broken(self):
            raise RuntimeError("no public function")

    _, said, found = heard([Fails(device), Graphable(device)], OPTIONS)
    assert found["graphable"].eager_ms
    results = {}
    for message in said:
        if isinstance(message, Result):
            _note(results, message)
    kept = results["fails"]
    assert (kept.status, kept.p50_ms, kept.eager_ms) == (OK, 1.0, None)
    assert kept.detail == "eager: RuntimeError: no public function"
    _note(results, Result("fails", TIME_LIMIT, "eager: nothing happened for 120 s"))
    assert results["fails"].status == OK
    assert results["fails"].detail.endswith("function; eager: nothing happened for 120 s")


def test_a_record_says_how_our_kernels_were_launched(monkeypatch):
    file = SimpleNamespace(manifest={"set": "13"})
    for found, programs, text in (
        ("this installation has no prebuilt kernels", "1", "compiled"),
        (file, "1", "prebuilt by nvcc 13"),
        (file, "0", "prebuilt by nvcc 13, QLA_PROGRAMS=0"),
    ):
        monkeypatch.setattr(records.prebuilt, "in_use", lambda found=found: found)
        monkeypatch.setenv("QLA_PROGRAMS", programs)
        assert records._our_kernels() == text
