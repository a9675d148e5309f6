"""What the driver is given by each kind of call of tests/native/workloads.py, as text.

    python -m tests.goldens.launches PATTERN...     started by `standin.run`

A kind has the launches of its first call, and all that its third call does: a replay, if the host
launches nothing. A pointer is a tensor and an offset in bytes: i0, i1 .. are those made before the
first call, in the order in which they were made; r0, r1 .. results, workspaces and tables, in that
of their first use. A table that the host makes has a checksum of its numbers, and is unknown if it
was made before the kind began. What torch launches itself is listed where a call is not replayed.
"""

import gc
import inspect
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qla_kernels.gdn import autograd
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.sharded import exchange
from qla_kernels.gdn.sharded import launch as shard_launch
from qla_kernels.gdn.sharded import ops as shard_ops
from qla_kernels.gdn.sharded.layouts import ShardPlace
from qla_kernels.runtime import device
from qla_kernels.runtime.native.recording import tensors_in
from tests.goldens.store import Texts, chosen, printed
from tests.native import gpu, standin, workloads

NUMBERS = {"fill": "=QQIQ", "copy": "=QQQQQQQ"}  # others have two
LIMIT = 1 << 20  # bytes of the driver's record
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "i32", "int64": "i64"}

Event = tuple[Any, ...]


class Watch(TorchDispatchMode):
    """Writes torch's allocations and launches into the driver's record."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launched: list[tuple[str, list[tuple[int, Any]]]] = []

    def elsewhere(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """As `device.elsewhere`, whose thread is watched, too."""

        def watched() -> Any:
            with self:
                return make(*arguments)

        return _elsewhere(watched)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        before = {_storage(x) for x in tensors_in((*args, *(kwargs or {}).values()))}
        out = [x for x in tensors_in((done,)) if not x.is_meta]
        if out and name == "lift_fresh":  # of torch.tensor: a table of numbers of the host
            before.clear()
            name = f"table {zlib.crc32(repr(out[0].tolist()).encode()):08x}"
        for x in out:
            if _storage(x) not in before:
                memory = x.untyped_storage()
                gpu.DRIVER.note("alloc", memory.data_ptr(), memory.nbytes())
        is_view = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        if out and (name[:5] == "table" or not (is_view or re.match("(new_)?empty|detach", name))):
            gpu.DRIVER.note("torch", len(self.launched), 0)
            self.launched.append((name, [(x.data_ptr(), standin.like(x)) for x in out]))
        return done


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


_elsewhere = device.elsewhere
_stack_size = torch._C._len_torch_dispatch_stack
torch._C._len_torch_dispatch_stack = lambda: _stack_size() - 1  # operators need not see the watch


def _kept_tables() -> Iterator[dict[object, object]]:
    """Yields what the functions keep that `device_tables.kept` decorates."""
    for f in gc.get_objects():
        code = f.__code__ if type(f) is FunctionType else None
        if code and code.co_name == "table" and code.co_filename.endswith("device_tables.py"):
            yield inspect.getclosurevars(f).nonlocals["known"]


def text_of(prepare: Callable[[], workloads.Run]) -> str:
    """Returns what a kind of call does."""
    gpu.forget()
    for kept in KEPT:
        kept.clear()
    workloads.made.cache_clear()
    logs: list[list[Event]] = []
    with Watch() as watch:
        device.elsewhere = watch.elsewhere
        gpu.DRIVER.expect("")
        run = prepare()
        logs.append(list(_events(gpu.DRIVER.record())))
        for _ in range(3):
            gpu.launched.clear()
            gpu.DRIVER.expect("")
            results = run()  # alive until the driver's record is read
            logs.append(list(_events(gpu.DRIVER.record())))
            del results
    is_replayed = not gpu.launched
    first, _, third = Memory(logs, watch).lines()
    if is_replayed:
        first = [line for line in first if not line.startswith("torch ")]
    return "\n".join(["first", *first, "replay" if is_replayed else "not replayed", *third, ""])


def _events(record: bytes) -> Iterator[Event]:
    """Yields ("launch", kernel, stream, arguments) and (name, numbers..)."""
    assert len(record) < LIMIT - 4096, "the driver's record is full"
    at = 0
    while at < len(record):
        end = record.index(b"\0", at)
        name, at = record[at:end].decode(), end + 1
        kernel, is_launch, letters = name.partition("|")
        assert len(name) < 127, name
        if is_launch:
            form = struct.Struct("=7IQi" + letters.replace("p", "Q"))
            numbers = form.unpack_from(record, at)
            yield "launch", gpu.made[int(kernel)], numbers[7], list(numbers[9:])
        else:
            form = struct.Struct(NUMBERS.get(name, "=QQ"))
            yield name, *form.unpack_from(record, at)
        at += form.size


class Memory:
    """Names the memory that a kind's calls use; logs are those of its preparation and its calls."""

    def __init__(self, logs: Sequence[list[Event]], watch: Watch) -> None:
        self._known: list[tuple[int, int]] = []  # address and size; the last one counts
        self._rest: dict[int, int] = {}
        self._launched = watch.launched
        self._calls = [[self._resolved(event) for event in log] for log in logs]
        self._prepared = sum(event[0] == "alloc" for event in logs[0])
        used = {at for log in self._calls[1:] for event in log for at, _ in event[-1]}
        inputs = sorted(at for at in used if 0 <= at < self._prepared)
        self._names = {at: f"i{i}" for i, at in enumerate(inputs)}

    def _resolved(self, event: Event) -> Event:
        """Returns the event, and behind it (number of the memory, offset) of its addresses."""
        kind, *numbers = event
        if kind == "alloc":
            self._known.append((numbers[0], numbers[1]))
        addresses: list[int] = []
        if kind == "launch":
            (_, likes), _, values = numbers
            tensors = filter(_is_tensor, likes)
            addresses = [p for p, x in zip(values, tensors, strict=False) if _full(x)]
        elif kind == "torch":
            addresses = [p for p, x in self._launched[numbers[0]][1] if _full(x)]
        elif kind == "fill":
            addresses = numbers[:1]
        elif kind == "copy":
            addresses = [numbers[0], numbers[2]]
        return *event, [self._place(p) for p in addresses]

    def _place(self, address: int) -> tuple[int, int]:
        for at in range(len(self._known) - 1, -1, -1):
            begin, size = self._known[at]
            if begin <= address < begin + size:
                return at, address - begin
        return -1 - self._rest.setdefault(address, len(self._rest)), 0

    def lines(self) -> list[list[str]]:
        """Returns the lines of each call."""
        return [list(self._lines(log)) for log in self._calls[1:]]

    def _lines(self, log: list[Event]) -> Iterator[str]:
        names, waited = dict(self._names), dict[int, int]()
        for kind, *numbers, places in log:
            where = []
            for at, offset in places:
                new = sum(name[0] == "r" for name in names.values())
                name = names.setdefault(at, f"r{new}" if at >= 0 else f"unknown{-1 - at}")
                where.append(f"{name}+{offset}" if offset else name)
            if kind == "launch":
                (label, likes), stream, values = numbers
                yield f"{label} {_stream(stream)}: {', '.join(_arguments(likes, values, where))}"
            elif kind == "torch":
                name, out = self._launched[numbers[0]]
                tensors = _arguments([x for _, x in out], [p for p, _ in out], where)
                by = "" if name.startswith("table") else "torch "
                yield f"{by}{name}: {', '.join(tensors)}"
            elif kind == "fill":
                _, stream, value, size = numbers
                yield f"fill {_stream(stream)}: {where[0]}, {size} bytes of {value:08x}"
            elif kind == "copy":
                _, stream, _, *pitches, width, height = numbers
                size = f"{width} x {height}, pitches {pitches[0]} {pitches[1]}"
                yield f"copy {_stream(stream)}: {' from '.join(where)}, {size}"
            elif kind == "record":
                waited[numbers[0]] = numbers[1]
            elif kind == "wait":
                yield f"wait {_stream(numbers[1])}: for {_stream(waited[numbers[0]])}"


def _is_tensor(like: Any) -> bool:
    return isinstance(like, tuple)


def _full(like: Any) -> bool:
    return bool(0 not in like[1])


def _stream(number: int) -> str:
    return "s1" if number == gpu.SECOND else "s0"


def _arguments(likes: Sequence[Any], values: Sequence[Any], where: list[str]) -> Iterator[str]:
    """Yields arguments in order; the driver has pointers first, then integers, then floats."""
    num = sum(map(_is_tensor, likes))
    floats = sum(x is float for x in likes)
    whole, real = iter(values[num : len(values) - floats]), iter(values[len(values) - floats :])
    places = iter(where)
    for like in likes:
        if not _is_tensor(like):
            yield f"{next(real):.9g}" if like is float else str(next(whole))
            continue
        dtype, shape, strides = like
        name = str(dtype).removeprefix("torch.")
        text = f"{SHORT.get(name, name)}[{','.join(map(str, shape))}"
        if strides != torch.empty(shape, device="meta").stride():
            text += f": {','.join(map(str, strides))}"
        yield f"{next(places) if _full(like) else '-'} {text}]"


def ranks() -> Iterator[workloads.Kind]:
    """The second of two ranks that share a sequence, and one that holds parts of two."""
    shard_ops.gdn_shard_fwd = shard_launch.gdn_shard_fwd
    shard_ops.gdn_shard_bwd = shard_launch.gdn_shard_bwd
    vars(exchange)["group_named"] = lambda _: SimpleNamespace(rank=lambda: 1)
    vars(exchange)["gather"] = lambda links, _: torch.stack([links] * 2)
    for heads in (2, 4), (16, 32):
        for K, V in (128, 128), (96, 192), (256, 256):
            for stretches in (1, 2):
                for raw in (False, True):
                    name = f"{heads[0]}x{heads[1]}, {K} x {V}, {stretches} stretches{', raw' * raw}"
                    yield name, partial(_on_rank, heads, K, V, stretches, raw)


def _on_rank(heads: tuple[int, int], K: int, V: int, stretches: int, raw: bool) -> workloads.Run:
    (H, HV), T, f32 = heads, 8192, torch.float32
    x = [workloads.room(1, T, n, D) for n, D in ((H, K), (H, K), (HV, V))]
    x += [workloads.room(1, T, HV, dtype=f32), workloads.room(1, T, HV)]
    x += [workloads.room(HV, dtype=f32) for _ in range(2 * raw)]
    bounds = torch.tensor([0, *[T // 2] * (stretches - 1), T], dtype=torch.int32)
    before, after = ([1], [0]) if stretches == 1 else ([0, 3], [3, 0])
    place = ShardPlace("", before, after, front=1)
    options = Options(is_train=True, use_beta_sigmoid_in_kernel=raw)

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *gate: Tensor) -> Tensor:
        call = Call(q, k, v, g, beta, 1.0, None, bounds, None, *gate)
        return autograd.apply_sharded(call, options, place)[0]

    return workloads.with_gradients(run, *x)


KEPT = [*_kept_tables()]
FAMILIES = {name: getattr(workloads, name) for name in workloads.FAMILIES} | {"ranks": ranks}


def texts(patterns: Sequence[str]) -> Texts:
    for family, kinds in FAMILIES.items():
        for name, prepare in kinds():
            key = f"{family}/{name}"
            if chosen(key, patterns):
                yield key, text_of(prepare)


if __name__ == "__main__":
    printed(texts(sys.argv[1:]))
