"""What programs do with the calls of a function, on the stand-in driver.

Each function without an underscore is a test. `python -m tests.native.programs` runs all of them;
it has to be started by `standin.run`. The function under test is `_work`, with the hand-written
entry of behaviour.py: two launches, views, rooms, a fill and copies.
"""

import gc
import os
import struct
import sys
import threading
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from qla_kernels.runtime import programs
from qla_kernels.runtime.device_tables import kept
from qla_kernels.runtime.native import recording
from qla_kernels.runtime.native.pack import pack, texts
from qla_kernels.runtime.native.symbols import decided
from qla_kernels.runtime.native.trace import Trace
from qla_kernels.runtime.programs import RECORD, Programs
from tests.native import standin
from tests.native.behaviour import CUBIN, ENTRY, NAME

NATIVE = standin.replaying()
LAUNCH = NATIVE.launcher(NAME, ENTRY["function"], CUBIN, pack(ENTRY), *texts(ENTRY))
DRIVER = standin.Driver()
LETTERS = standin.kinds(ENTRY)
Trace.is_of_host = staticmethod(lambda x: DRIVER.is_on_host(x.data_ptr()))  # type: ignore


def _work(x: Tensor, bounds: Tensor, scale: float) -> tuple[Tensor | None, ...]:
    """Launches twice: on x, and on a part of a room; returns what the first launch writes."""
    rows, heads, size = x.shape
    room = x.new_empty(rows + 1, heads, size)
    sums = _room(x, rows, heads)
    count = sums.new_zeros(rows + 1, heads)
    LAUNCH(x, scale, sums, len(bounds.int()))
    LAUNCH(room[1:], scale, count[1:], 3)
    return sums, None


def _inputs(rows: int = 40, heads: int = 2) -> tuple[Tensor, Tensor, float]:
    return torch.randn(rows, heads, 64).bfloat16(), torch.tensor([0, 7, rows]), 0.5


def _call(table: Programs, *given: Any, work: Callable[..., Any] = _work) -> Any:
    found = table.find(*given)
    if found is RECORD:
        return table.record(given, work, *given)
    return work(*given) if found is None else found


def _known(*given: Any, work: Callable[..., Any] = _work, gradients: bool = False) -> Programs:
    """Returns a table that has seen a call twice."""
    table = Programs("test", gradients)
    for _ in range(2):
        _call(table, *given, work=work)
    return table


def _record(run: Callable[[], Any]) -> bytes:
    DRIVER.expect(LETTERS)
    run()
    return DRIVER.record()


def _launches(record: bytes) -> list[tuple[Any, ...]]:
    """Returns of each launch: numbers, stream, the map's sizes, rows - 1, scale; and addresses."""
    found = []
    name = ENTRY["function"].encode() + b"\0"
    for part in record.split(name)[1:]:
        tensor_map, address, rows, real = struct.unpack_from("=128sQif", part[40:])
        where, *sizes = struct.unpack_from("10Q", tensor_map)
        found.append((part[:40], sizes, rows, real, where, address))
    return found


def recording_imports_nothing_large() -> None:
    """The first of these tests: torch would import Dynamo, which takes 2 s, at the second call."""
    _known(*_inputs())
    assert "torch._dynamo" not in sys.modules


def replays_are_what_the_call_did() -> None:
    """Same launches and numbers; inputs are those of the new call, the rest is fresh."""
    given = _inputs()
    table = _known(*given)
    assert len(table) == 1
    eager = _launches(_record(lambda: _work(*given)))
    x = torch.randn_like(given[0])
    again = table.find(x, *given[1:])
    assert type(again) is tuple
    assert again[1] is None
    assert again[0].shape == (40, 2)
    assert again[0].is_contiguous()
    done: list[Any] = []
    replayed = _launches(_record(lambda: done.append(table.find(x, *given[1:]))))
    assert [launch[:4] for launch in eager] == [launch[:4] for launch in replayed]
    (first, second), ((sums, _),) = replayed, done
    assert (first[4], first[5]) == (x.data_ptr(), sums.data_ptr())
    # the workspace: room, rounded up to 256 bytes, then count; each begins a row later
    assert second[5] - second[4] == 41 * 256 + 8 - 256
    assert len({first[4], first[5], second[4], second[5]}) == 4


def fills_and_copies() -> None:
    """A room of zeros is zeros again, an int64 tensor is narrowed again, at each replay."""

    def work(x: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ones = x.new_full((3, 2), 7, dtype=torch.int32)
        there = torch.empty_like(x)
        there.copy_(x)
        return ones, there, bounds.to(torch.int32)

    bounds, y = torch.tensor([0, 5, 9]), torch.randn(4, 8)
    table = _known(torch.randn(4, 8), bounds, work=work)
    ones, there, narrow = table.find(y, bounds)
    assert ones.tolist() == [[7, 7]] * 3
    assert torch.equal(there, y)
    assert narrow.dtype == torch.int32
    assert narrow.tolist() == bounds.tolist()


def other_calls_are_not_replayed() -> None:
    """Anything that launch code could look at makes another call."""
    x, bounds, scale = given = _inputs()
    table = _known(*given)
    wide = torch.randn(40, 2, 80).bfloat16()
    unaligned = torch.randn(40 * 2 * 64 + 4).bfloat16()[4:].view(x.shape)
    others = {
        "size": (x[:39], bounds, scale),
        "stride": (wide[..., :64], bounds, scale),
        "alignment": (unaligned, bounds, scale),
        "dtype": (x.half(), bounds, scale),
        "number": (x, bounds, 0.25),
        "kind of number": (x, bounds, 1),
        "number on the host": (x, torch.tensor([0, 8, 40]), scale),
        "None": (x, None, scale),
        "flag": (x, bounds, scale, True),
        "text": (x, bounds, scale, "half"),
        "list": (x, bounds, scale, [x]),
    }
    for name, other in others.items():
        assert table.find(*other) is None, name
    assert type(table.find(x.clone(), bounds.clone(), 0.5)) is tuple


def numbers_of_the_host_that_lie_apart() -> None:
    """They are not compared, so that such a call has no program. One number is not apart."""
    x, bounds, scale = _inputs()
    apart = torch.stack([bounds, bounds], 1)[:, 0]
    table = Programs("test")
    assert [table.find(x, apart, scale) for _ in range(3)] == [None] * 3
    alone = torch.tensor([7, 8, 9]).as_strided((1,), (2,))
    assert type(_known(x, alone, scale).find(x, alone, scale)) is tuple


def a_tensor_given_twice() -> None:
    """It differs from two tensors that look alike."""

    def work(x: Tensor, y: Tensor) -> tuple[Tensor | None]:
        LAUNCH(x, 0.5, _room(x, 40, 2), 3)
        LAUNCH(y, 0.5, _room(y, 40, 2), 3)
        return (None,)

    x, y = _inputs()[0], _inputs()[0]
    table = _known(x, x, work=work)
    assert table.find(x, y) is None
    first, second = _launches(_record(lambda: table.find(y, y)))
    assert first[4] == second[4] == y.data_ptr()
    table = _known(x, y, work=work)
    both = torch.randn(2, *x.shape).bfloat16()  # parts of one tensor
    first, second = _launches(_record(lambda: table.find(*both)))
    assert (first[4], second[4]) == (both[0].data_ptr(), both[1].data_ptr())


class Sub(torch.Tensor):
    pass


def observers() -> None:
    """Modes, subclasses, tracers, tangents and QLA_CHECK see the usual call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    x, bounds, scale = given = _inputs()
    table = _known(*given)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    with Mode():
        assert table.find(*given) is None
    assert table.find(x.as_subclass(Sub), bounds, scale) is None
    with torch.autograd.forward_ad.dual_level():
        assert table.find(*given) is None
    torch.func.vmap(lambda y: y + (table.find(*given) is not None))(torch.zeros(2))
    os.environ["QLA_CHECK"] = "1"
    assert table.find(*given) is None
    del os.environ["QLA_CHECK"]
    assert type(table.find(torch.nn.Parameter(x), bounds, scale)) is tuple
    NATIVE.note([], 0)  # a call inside of one that is traced
    assert table.find(*given) is None
    NATIVE.note(None, 0)
    assert type(table.find(*given)) is tuple


def gradients() -> None:
    """A table may tell calls that want gradients from those that do not."""
    x, bounds, scale = _inputs()
    table = _known(x, bounds, scale, gradients=True)
    leaf = x.clone().requires_grad_()
    assert table.find(leaf, bounds, scale) is None
    with torch.no_grad():
        assert type(table.find(leaf, bounds, scale)) is tuple
    given = leaf, bounds, scale
    assert table.find(*given) is RECORD
    table.keep(given, "accepted", _work, *given)
    assert table.find(*given) == "accepted"
    assert type(table.find(x, bounds, scale)) is tuple
    with torch.inference_mode():
        results = table.find(x, bounds, scale)
        assert results[0].is_inference()


BY_TILELANG = recording.noting("made up", lambda *_: None)


def what_cannot_be_recorded() -> None:
    """The call is run as usual, each time, and its results are right."""
    other = torch.zeros(40, 2)

    def computes(x: Tensor) -> tuple[Tensor]:
        return (x * 2,)

    def reads_back(x: Tensor) -> tuple[Tensor]:
        return (x.new_empty(int(x[0, 0, 0] * 0) + 2),)

    def writes_input(x: Tensor) -> tuple[None]:
        x.zero_()
        return (None,)

    def returns_input(x: Tensor) -> tuple[Tensor]:
        return (x.view(-1),)

    def returns_part(x: Tensor) -> tuple[Tensor]:
        return (x.new_empty(4, 4)[:, :2],)

    def fills_part(x: Tensor) -> tuple[Tensor]:
        room = x.new_empty(4, 4)
        room[:, :2].zero_()
        return (room,)

    def uses_stranger(x: Tensor) -> tuple[None]:
        LAUNCH(x, 0.5, other, 3)
        return (None,)

    def launches_by_tilelang(x: Tensor) -> tuple[Tensor]:
        BY_TILELANG(x)
        return (x.new_empty(4),)

    for work in (
        computes,
        reads_back,
        writes_input,
        returns_input,
        returns_part,
        fills_part,
        uses_stranger,
        launches_by_tilelang,
    ):
        x = _inputs()[0]
        table = _known(x, work=work)
        assert len(table) == 1, work.__name__  # that there is none
        assert table.find(x) is None, work.__name__


def kernels_of_other_calls() -> None:
    """A process that has compiled a kernel with TileLang records calls that do not launch it."""
    given = _inputs()
    BY_TILELANG(given[0])
    assert type(_known(*given).find(*given)) is tuple


def constants() -> None:
    """Tables that are kept are read again, not made again; not in a capture."""
    made = []

    @kept(4)
    def table_of(device: torch.device, n: int) -> Tensor:
        made.append(n)
        return torch.arange(2 * n, dtype=torch.float32).view(n, 2)

    def work(x: Tensor) -> tuple[None]:
        LAUNCH(x, 0.5, table_of(x.device, x.shape[0]), 3)
        return (None,)

    x = _inputs()[0]
    table = _known(x, work=work)
    (launch,) = _launches(_record(lambda: table.find(x)))
    assert launch[5] == table_of(x.device, 40).data_ptr()
    assert made == [40]


class _Stream:
    def __init__(self, number: int) -> None:
        self.cuda_stream = number


def _open(work: Callable[..., Any], *lengths: int) -> Programs:
    """Returns a table that has seen calls with x [40, T, 64] of these T, where T may be open."""
    table = Programs("test", tokens=[0])
    for T in lengths:
        _call_open(table, work, T)
    return table


def _call_open(table: Programs, work: Callable[..., Any], T: int) -> bool:
    """Calls with x [40, T, 64]; returns whether that was a replay, with the same launches."""
    x = _inputs(heads=T)[0]
    expected, before = _launches(_record(lambda: work(x))), table.replays()

    def call() -> None:
        if table.find(x) is RECORD:
            table.record((x,), work, x)
        elif table.replays() == before:
            work(x)

    got = _launches(_record(call))
    assert [launch[:4] for launch in got] == [launch[:4] for launch in expected]
    os.environ["QLA_CHECK_PROGRAMS"] = "1"
    if table.find(x) is RECORD:
        table.record((x,), work, x)
    del os.environ["QLA_CHECK_PROGRAMS"]
    return table.replays() > before


def _room(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


def forms() -> None:
    """A program serves other T as far as what its call compared, and decided, stays the same."""
    asked = []

    def widths(T: int, known: str) -> tuple[str, int]:
        asked.append(T)
        return ("narrow" if T < 60 else "wide") + known, T * T // 9 + 1

    def work(x: Tensor) -> tuple[Tensor]:
        rows, T, size = x.shape
        sums = _room(x, rows, T)
        LAUNCH(x, 0.5, sums, max(T // 8 + 2, 5))
        kind, ctas = decided(widths, T // 2, "!")
        if kind == "wide!":
            LAUNCH(x[1:], 0.5, _room(x, rows - 1, T), -(-T // 7))
        room = x.new_empty(3, T + 1, size)
        LAUNCH(room, 0.25, x.new_zeros(3, T + 1, dtype=torch.float32), ctas)
        return (sums,)

    table = _open(work, 30, 31)
    for T in (32, 23, 7, 33):  # below 24 the other operand of `max` is larger
        assert _call_open(table, work, T) == (T != 23)
    assert _call_open(table, work, 100)
    assert not _call_open(table, work, 120)  # wide
    for T in range(121, 300, 7):
        assert _call_open(table, work, T)
    assert _call_open(table, work, 299)
    asked.clear()
    assert _call_open(table, work, 298)
    assert asked == [149, 149]  # by the launch code alone, and in the check: not by the form
    assert table.find(_inputs(heads=200)[0].half()) is None


def lengths_of_one_kind() -> None:
    """The second call of a kind is recorded, whatever its T."""
    table = Programs("test", tokens=[0])
    assert table.find(_inputs(heads=30)[0]) is None
    assert table.find(_inputs(heads=31)[0]) is RECORD


def decisions_that_fail() -> None:
    """A form does not hold where a decision raises: launch code says so itself."""

    def parts(T: int) -> int:
        if T > 100:
            raise ValueError("too long")
        return T + 1

    def work(x: Tensor) -> tuple[Tensor]:
        sums = _room(x, 40, x.shape[1])
        LAUNCH(x, 0.5, sums, decided(parts, x.shape[1]))  # the last number that is computed
        return (sums,)

    table = _open(work, 30, 31)
    assert _call_open(table, work, 100)
    for _ in range(2):
        assert type(table.find(_inputs(heads=101)[0])) is not tuple
    assert _call_open(table, work, 99)


def decisions_of_several_numbers() -> None:
    """They are made again for each new T, from the values that their numbers then have."""

    def parts(T: int, chunks: tuple[int, int]) -> tuple[str, int]:
        return "few" if chunks[0] < 12 else "many", T * chunks[1] + chunks[0]

    def work(x: Tensor) -> tuple[None]:
        T = x.shape[1]
        odd = decided(lambda n: 3 * n + 1, T % 7)
        kind, ctas = decided(parts, T, (-(-T // 16), odd + T // 5))
        LAUNCH(x, 0.5, _room(x, 40, T), ctas)
        if kind == "many":
            LAUNCH(x, 0.25, _room(x, 40, T), ctas)
        return (None,)

    table = _open(work, 30, 31)
    assert all(_call_open(table, work, T) for T in (32, 7, 33, 100, 176))
    assert not _call_open(table, work, 177)
    assert all(_call_open(table, work, T) for T in (200, 208, 500))


def numbers_that_are_read() -> None:
    """They fix T, or a part of it, whatever reads them."""

    def work(x: Tensor) -> tuple[None]:
        T = x.shape[1]
        scale = {0: 0.25, 1: 0.5}.get(T // 100, float(T // 100))
        LAUNCH(x, scale, _room(x, 40, T), len(range(T // 50)) + 1)
        return (None,)

    table = _open(work, 210, 211)
    assert all(_call_open(table, work, T) for T in (200, 249))
    assert not _call_open(table, work, 250)
    assert all(_call_open(table, work, T) for T in (260, 299, 220))


def calls_without_a_form() -> None:
    """They have no program. More kinds of calls than forms have programs of their own."""

    def work(x: Tensor) -> tuple[Tensor]:
        LAUNCH(x, 0.5, _room(x, 40, x.shape[1]).t().t(), 3)
        return (_room(x, 40, x.shape[1]),)

    table = _open(work, 30, 31)
    assert not any(_call_open(table, work, T) for T in (32, 32, 32, 33, 33, 33))
    again = [False, True, True]  # the second sight of a call is that of _call_open's check

    def scattered(x: Tensor) -> tuple[None]:
        LAUNCH(x, float(x.shape[1]), _room(x, 40, x.shape[1]), 3)
        return (None,)

    table = _open(scattered, *range(100, 165))
    assert [_call_open(table, scattered, 400) for _ in range(3)] == again


def threads_with_forms() -> None:
    """Threads that ask for many T at once, while forms and programs come and go."""
    wrong: list[object] = []

    def work(x: Tensor) -> tuple[Tensor]:
        sums = _room(x, 40, x.shape[1])
        LAUNCH(x, 0.5, sums, decided(lambda T: T + 1, x.shape[1]))
        return (sums,)

    table = _open(work, 30, 31)

    def run(first: int) -> None:
        try:
            for T in [*range(first, first + 150)] * 2:
                x = _inputs(heads=T)[0]
                found = table.find(x)
                assert type(found) is tuple, found
                assert found[0].shape == (40, T)
        except Exception as error:
            wrong.append(error)

    runners = [threading.Thread(target=run, args=(40 + 50 * n,)) for n in range(6)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    assert not wrong, wrong
    assert len(table) == programs.MOST


def waits() -> None:
    """Waits between two streams are repeated, in their places among the launches."""

    def work(x: Tensor) -> tuple[None]:
        recording.note_wait(_Stream(7), _Stream(0))
        LAUNCH(x, 0.5, _room(x, 40, 2), 3)
        recording.note_wait(_Stream(0), _Stream(7))
        return (None,)

    x = _inputs()[0]
    table = _known(x, work=work)
    assert DRIVER["events"] == 2
    record = _record(partial(table.find, x))
    words = [w for w in (b"record", b"wait", ENTRY["function"].encode()) if w in record]
    assert len(words) == 3
    assert record.index(b"record") < record.index(b"wait") < record.index(words[2])
    event, stream = struct.unpack_from("QQ", record, record.index(b"record") + 7)
    assert (stream, *struct.unpack_from("QQ", record, record.index(b"wait") + 5)) == (0, event, 7)
    last = record.rindex(b"wait")
    assert last > record.index(words[2])
    assert struct.unpack_from("QQ", record, last + 5)[1] == 0
    del table
    assert DRIVER["events"] == 0


def checks() -> None:
    """QLA_CHECK_PROGRAMS records again, and names a function that depends on something else."""
    hidden = [3]

    def work(x: Tensor) -> tuple[None]:
        LAUNCH(x, 0.5, _room(x, 40, 2), hidden[0])
        return (None,)

    x = _inputs()[0]
    table = _known(x, work=work)
    os.environ["QLA_CHECK_PROGRAMS"] = "1"
    assert table.find(x) is RECORD
    _call(table, x, work=work)
    hidden[0] = 4
    with pytest.raises(RuntimeError, match="launches other kernels or numbers; need the same"):
        _call(table, x, work=work)
    del os.environ["QLA_CHECK_PROGRAMS"]


def checks_of_the_workspace() -> None:
    """Its size is compared, too: a kernel may use what no launch was seen to use."""
    hidden = [5]

    def work(x: Tensor) -> tuple[None]:
        LAUNCH(x, 0.5, _room(x, 40, 2), 3)
        x.new_empty(hidden[0], 64)
        return (None,)

    x = _inputs()[0]
    table = _known(x, work=work)
    os.environ["QLA_CHECK_PROGRAMS"] = "1"
    _call(table, x, work=work)
    hidden[0] = 50
    with pytest.raises(RuntimeError, match="launches other kernels or numbers; need the same"):
        _call(table, x, work=work)
    del os.environ["QLA_CHECK_PROGRAMS"]


def _stored(table: Programs, code: bytes, *steps: Any, held: object = None, of: Any = ()) -> Any:
    """Stores a program without results, for a call with an empty tensor."""
    given = (torch.empty(1, 3),)
    return NATIVE.store(table.find.__self__, given, (), (), (), 0, steps, 0, held, code, of)


CODE = struct.pack("7q", 1, 1, 0, 0, 0, 0, 0)  # a node, the constant 0: the workspace's size


def writes_are_counted() -> None:
    """Each call, replayed or not, is one write to what it overwrites."""

    def work(x: Tensor, y: Tensor) -> tuple[None]:
        recording.overwritten(y, None, _room(x, 3))
        LAUNCH(x, 0.5, y, 3)
        return (None,)

    x, y = _inputs()[0], torch.empty(40, 2)
    table = Programs("test")
    for n in range(5):
        versions = x._version, y._version
        _call(table, x, y, work=work)
        assert (x._version, y._version) == (versions[0], versions[1] + 1), n
    assert table.replays() == 3


def too_many_bases() -> None:
    """No step has more addresses than a launch."""
    table = _known(*_inputs())
    fill = 2, 0, (0,) * 25, 0
    with pytest.raises(ValueError, match="a step with 25 bases; need at most 24"):
        _stored(table, CODE, fill)
    assert len(table) == 1


def refused_programs() -> None:
    """Programs that are refused, or not needed any more, leave nothing behind."""
    table, held, tables = Programs("test", tokens=[0]), object(), (object(),)
    table.find(torch.empty(1, 3))
    no_form = struct.pack("q", 0)
    wait = 1, 0, (), 1  # which has an event
    wrong = 2, 0, (0,) * 25, 0
    store = partial(_stored, held=held, of=tables)
    assert store(table, CODE) == ()

    def refuse(times: int) -> int:
        for _ in range(times):
            with pytest.raises(ValueError, match="a step with 25 bases"):
                store(table, CODE, wait, wrong)
            assert store(table, no_form, wait) == programs.FAILS
            assert store(table, CODE, wait) == programs.DIFFERS
            for tokens in ([0], []):
                other = Programs("test", tokens=tokens)
                other.find(torch.empty(1, 3))
                assert store(other, CODE, wait) == ()
                assert store(other, CODE, wait) == ()
                assert store(other, CODE) == programs.DIFFERS
                assert len(other) == 1
        del other
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    first, references = refuse(10), [sys.getrefcount(x) for x in (held, CODE, no_form, tables)]
    assert refuse(100) - first < 20_000  # bytes; a program has 2,000 and more
    tracemalloc.stop()
    assert [sys.getrefcount(x) for x in (held, CODE, no_form, tables)] == references
    assert DRIVER["events"] == 0


def forgotten_beside_a_call() -> None:
    """Between the parts of a call, as by another thread: it runs as usual, and is not kept."""
    given = _inputs()
    table = Programs("test", tokens=[0])

    def forgets(*given: Any) -> Any:
        table.forget()
        return _work(*given)

    for _ in range(3):
        assert _call(table, *given)[0].shape == (40, 2)
        assert table.find(*given) is RECORD
        table.forget()
        assert table.record(given, _work, *given)[0].shape == (40, 2)
        table.keep(given, "accepted", _work, *given)
        assert (len(table), table.replays(), table.find(*given)) == (0, 0, None)
        assert table.find(*given) is RECORD
        assert table.record(given, forgets, *given)[0].shape == (40, 2)
        assert len(table) == 0


def bounded() -> None:
    """The program that was used longest ago makes room for another; nothing else is lost."""
    table = Programs("test")
    first, bounds, _ = _inputs()
    for n in range(programs.MOST + 20):
        for _ in range(2):
            _call(table, first, bounds, float(n))
        if n:
            assert type(table.find(first, bounds, 0.0)) is tuple  # kept by use
    assert len(table) == programs.MOST
    assert type(table.find(first, bounds, float(programs.MOST))) is tuple
    assert table.find(first, bounds, 1.0) in (None, RECORD)


def failures() -> None:
    """The driver's errors are named, and the program stays."""
    given = _inputs()
    table = _known(*given)
    DRIVER["fail"] = 1
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx gave CUDA_ERROR_INVALID_VALUE"):
        table.find(*given)
    assert type(table.find(*given)) is tuple


def threads() -> None:
    """Many threads that make the same and other calls at once."""
    table, errors = Programs("test"), []
    together = threading.Barrier(8)

    def run(number: int) -> None:
        x, bounds, scale = _inputs(rows=40 + number % 2)
        together.wait()
        try:
            for _ in range(100):
                sums, none = _call(table, x, bounds, scale)
                assert sums.shape == (len(x), 2)
                assert none is None
        except Exception as error:
            errors.append(error)

    runners = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    assert not errors, errors
    assert len(table) == 2


def memory() -> None:
    """Replays leave nothing behind, and neither do tables that are dropped."""
    import resource

    given = _inputs()

    def used() -> int:
        for _ in range(20):
            table = _known(*given)
            for _ in range(300):
                table.find(*given)
            table = _open(lambda x: (_room(x, 40, x.shape[1]),), 30, 31)
            for T in range(32, 332):
                table.find(given[0].new_empty(40, T, 64))
            assert table.replays() >= 300
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    used()
    first = used()
    assert used() - first < 1_000  # KiB
    assert sys.getrefcount(given[0]) < 5


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if getattr(test, "__module__", "") == "__main__" and name[0] != "_" and name != "Sub":
            print(name, flush=True)
            test()
