"""Calls of the gated delta rule with any number of tokens T, on the stand-in driver.

Each function without an underscore is a test. `python -m tests.native.forms` runs all of them, or
the one that it is given; it has to be started by `standin.run`. Kernels are made up: each launch of
one becomes launches that hand every size and stride of every tensor to the driver. So neither
TileLang nor a kernel's entry is needed, and more is compared than any kernel looks at.
"""

import functools
import os
import random
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn import api, autograd, ops, plan
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.launch import steps
from qla_kernels.runtime import device, jit, programs
from qla_kernels.runtime.native import recording
from qla_kernels.runtime.native.entry import Entry
from qla_kernels.runtime.native.pack import pack, texts
from qla_kernels.runtime.native.trace import Trace
from tests.native import standin

NATIVE, DRIVER, SMS = standin.replaying(), standin.Driver(), 132
TENSORS, INTEGERS, REALS = 4, 50, 8  # of a made-up launch, whose arguments are padded to these
LETTERS = "p" * TENSORS + "i" * INTEGERS + "f" * REALS
MOST = 70_000  # tokens
TABLES = api.CALLS, autograd.FORWARDS, autograd.BACKWARDS

for name in ("gdn_fwd", "gdn_bwd", "l2norm_fwd", "l2norm_bwd"):
    setattr(ops, name, getattr(launch, name))
device.of = lambda x: torch._C._AutoDispatchBelowADInplaceOrView()  # type: ignore
device.sm_count = lambda _: SMS
Trace.is_of_host = staticmethod(lambda _: False)  # tables of segments; no call here has bounds


def _entry(function: str, tensors: Sequence[Tensor], scalars: Sequence[Any]) -> Entry:
    """An entry of a launch of such tensors and scalars, the last of which is a float."""
    dtypes = [(f"n{i}", "int32" if type(x) is int else "float32") for i, x in enumerate(scalars)]
    symbols = [
        (f"{what}{i}_{axis}", i, what, axis)
        for i, x in enumerate(tensors)
        for axis in range(x.dim())
        for what in ("size", "stride")
    ]
    integers = [name for name, *_ in symbols] + [name for name, d in dtypes if d == "int32"]
    reals = [name for name, d in dtypes if d != "int32"]
    padded = [
        *(("pointer", [min(i, len(tensors) - 1)]) for i in range(TENSORS)),
        *(("int32", [name]) for name in integers),
        *[("int32", [0])] * (INTEGERS - len(integers)),
        *(("float32", [name]) for name in [*reals, *[reals[-1]] * (REALS - len(reals))]),
    ]
    assert len(padded) == len(LETTERS)
    return {
        "function": function,
        "tensors": [
            {
                "name": f"x{i}",
                "dtype": str(x.dtype).removeprefix("torch."),
                "sizes": [[f"size{i}_{axis}"] for axis in range(x.dim())],
                "strides": [[f"stride{i}_{axis}"] for axis in range(x.dim())],
            }
            for i, x in enumerate(tensors)
        ],
        "scalars": dtypes,
        "order": [*[True] * len(tensors), *[False] * len(scalars)],
        "symbols": symbols,
        "maps": [],
        "arguments": padded,
        "launch": [[1]] * 6 + [[0]],
        "dependent": False,
    }


@functools.cache
def _kernel(module: Any, variant: Any) -> Callable[..., None]:
    """Stands for jit.compile: a function that launches its tensors in groups of four."""
    label, made = jit.label(module, variant), dict[int, Any]()

    def run(*given: Any) -> None:
        tensors = [x for x in given if isinstance(x, Tensor)]
        scalars = [*(x for x in given if not isinstance(x, Tensor)), 0.0]
        for at in range(0, len(tensors), TENSORS):
            group = tensors[at : at + TENSORS]
            if at not in made:
                entry = _entry(f"{label}_{at}", group, scalars)
                made[at] = NATIVE.launcher(
                    label, entry["function"], b"\x7fELF", pack(entry), *texts(entry)
                )
            made[at](*group, *scalars)

    return run


jit.compile = _kernel  # type: ignore[assignment]


def _launches(run: Callable[[], object]) -> list[tuple[Any, ...]]:
    """Runs; returns what the driver was given: of each launch its name, addresses, numbers."""
    DRIVER.expect(LETTERS)
    run()
    record, found = DRIVER.record(), []
    size = 40 + struct.calcsize(f"={TENSORS}Q{INTEGERS}i{REALS}f")
    while record:
        name, rest = record.split(b"\0", 1)
        if name in (b"fill", b"copy", b"record", b"wait"):
            if name in (b"fill", b"copy"):
                found.append((name, (), rest[8:16]))
            record = rest[16:]
        else:
            found.append((name, struct.unpack_from(f"={TENSORS}Q", rest[40:]), rest[:size]))
            record = rest[size:]
    return found


@contextmanager
def _without_programs() -> Iterator[None]:
    """Calls run their launch code; what tables hold stays."""
    found = [table.find for table in TABLES]
    for table in TABLES:
        table.find = programs._nothing
    yield
    for table, find in zip(TABLES, found, strict=True):
        table.find = find


def _numbers(launch: tuple[Any, ...]) -> tuple[Any, ...]:
    name, addresses, rest = launch
    return name, rest[:40], rest[40 + 8 * len(addresses) :]


def _compare(call: Callable[[], object], inputs: Sequence[Tensor]) -> None:
    """Launches of a call are those of its launch code, and so is its program."""
    here = {x.data_ptr() for x in inputs}
    with _without_programs():
        expected = _launches(call)
    got = _launches(call)
    assert list(map(_numbers, got)) == list(map(_numbers, expected))
    for one, other in zip(got, expected, strict=True):
        for a, b in zip(one[1], other[1], strict=True):
            assert a == b or not {a, b} & here
    os.environ["QLA_CHECK_PROGRAMS"] = "1"
    call()  # raises if a program has other numbers, or other places in memory
    del os.environ["QLA_CHECK_PROGRAMS"]


def _lengths(most: int, heads: int, n: int, rng: random.Random) -> list[int]:
    """All residues modulo 64, and the lengths around steps of both plans."""
    found = [1, 2, 63, 64, 65] + [64 * rng.randrange(most // 64) + i for i in range(64)]
    found += [rng.randint(1, most) for _ in range(n)]
    plans = [
        (plan.forward(c, (heads, 128, 128, SMS)), plan.backward(c, (heads, 128, 128, SMS)))
        for c in [((i, 1),) for i in range(1, most // 64, 1 + most // 64 // 200)]
    ]
    step = 64 * (1 + most // 64 // 200)
    changes = [i for i, (a, b) in enumerate(pairwise(plans)) if a != b]
    for i in rng.sample(changes, min(n, len(changes))):
        found += [step * i + 64 + rng.choice((-1, 0, 1, step - 1, step)) for _ in range(2)]
    return [max(1, min(most, T)) for T in found]


def _buffers(B: int, most: int, H: int, HV: int) -> list[Tensor]:
    """q, k, v, g and beta as flat memory; nothing reads it."""
    half = torch.bfloat16
    q, k = (torch.zeros(B * most, H, 128, dtype=half) for _ in range(2))
    v, g = torch.zeros(B * most, HV, 128, dtype=half), torch.zeros(B * most, HV)
    return [q, k, v, g, torch.zeros(B * most, HV, dtype=half)]


def _of(flat: Sequence[Tensor], B: int, T: int) -> list[Tensor]:
    return [x[: B * T].view(B, T, *x.shape[1:]) for x in flat]


def _sweep(
    B: int, H: int, HV: int, most: int = MOST, n: int = 30, training: bool = False, **options: Any
) -> None:
    rng = random.Random(most + HV)
    flat, lengths = _buffers(B, most, H, HV), _lengths(most, HV, n, rng)
    programs.forget()
    for T in lengths:
        x = _of(flat, B, T)
        _compare(functools.partial(_step if training else _infer, x, options), x)
    calls, replayed = len(lengths), [table.replays() for table in TABLES]
    print(f"   {calls} calls of {B} x 1 .. {most}, {H}/{HV}; replayed {replayed}")
    assert min(x for x in replayed if x) > 0.75 * calls, "a form serves many lengths"
    assert [bool(x) for x in replayed] == [not training, training, training]


@torch.no_grad()
def _infer(x: Sequence[Tensor], options: dict[str, Any]) -> None:
    chunk_gated_delta_rule(*x, **options)


def _written(x: Tensor) -> Tensor:
    """Tables of segments are memory of the host here, so a call looks like what is in them."""
    return torch.zeros_like(x) if x.dtype == torch.int32 else x


def _step(x: Sequence[Tensor], options: dict[str, Any]) -> None:
    leaves = [a.detach().requires_grad_() for a in x]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, _written):
        o, _ = chunk_gated_delta_rule(*leaves, **options)
    o.backward(x[2])


def one_sequence() -> None:
    _sweep(1, 2, 8)


def one_sequence_of_many_heads() -> None:
    _sweep(1, 16, 32, n=10, output_final_state=True)


def one_head() -> None:
    _sweep(1, 1, 1, 9000, output_final_state=True, state_v_first=True)


def batches() -> None:
    h0 = torch.zeros(3, 8, 128, 128)
    _sweep(3, 2, 8, 9000, initial_state=h0, output_final_state=True)


def equal_shares() -> None:
    """144 items: shares from some length on, segments or whole sequences below."""
    _sweep(6, 8, 24, 3000, n=10, output_final_state=True)
    x = _of(_buffers(6, 3000, 8, 24), 6, 3000)
    named = [name for name, *_ in _launches(functools.partial(_infer, x, {}))]
    assert any(b"share_table" in name for name in named)


def activations() -> None:
    raw = torch.zeros(8), torch.zeros(8)
    flags = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    both = {"use_qk_l2norm_in_kernel": True, "A_log": raw[0], "dt_bias": raw[1]}
    _sweep(2, 2, 8, 20_000, exact=True, **flags, **both)


class _Stream:
    def __init__(self, number: int) -> None:
        self.cuda_stream = number


@contextmanager
def _fork(x: Tensor) -> Iterator[Any]:
    """Tells of the waits of device.fork; all launches stay on one stream."""
    recording.note_wait(_Stream(7), _Stream(0))
    yield nullcontext()
    recording.note_wait(_Stream(0), _Stream(7))


def training() -> None:
    """Programs of a form share its events, which go with the last of them."""
    device.fork = _fork
    _sweep(1, 2, 8, training=True)
    assert DRIVER["events"] > 0
    _sweep(3, 2, 8, 9000, n=10, training=True, use_qk_l2norm_in_kernel=True)
    h0 = torch.zeros(1, 8, 128, 128, requires_grad=True)
    _sweep(1, 4, 8, 33_000, n=10, training=True, initial_state=h0, output_final_state=True)
    programs.forget()
    assert DRIVER["events"] == 0


def kept_segments() -> None:
    """Where a forward keeps its segments by default, both directions launch what True launches."""
    device.fork = _fork
    for T, keeps in ((32768, True), (2048, False)):
        x = _of(_buffers(1, T, 2, 8), 1, T)
        found = []
        for asked in (None, keeps, not keeps):
            given = {"enable_fwd_cp_cache": asked}
            with _without_programs():
                found.append(list(map(_numbers, _launches(functools.partial(_step, x, given)))))
        default, same, other = found
        assert default == same
        maps = [sum(name.startswith(b"gdn.segment_map-") for name, *_ in y) for y in (same, other)]
        if keeps:
            assert maps[1] == 2 * maps[0] > 0, "a backward without them makes its own"


def strides() -> None:
    """Slices of a projection, and sequences of one buffer: some strides follow from T."""
    whole = torch.zeros(1, 9000, 2 + 2 + 8, 128, dtype=torch.bfloat16)
    g, beta = torch.zeros(1, 9000, 8), torch.zeros(1, 9000, 8, dtype=torch.bfloat16)
    wide = torch.zeros(3 * 9000, 12, 128, dtype=torch.bfloat16)
    programs.forget()
    for T in _lengths(9000, 8, 20, random.Random(0)):
        for B, parts in ((1, whole[:, :T]), (3, wide[: 3 * T].view(3, T, 12, 128))):
            q, k, v = parts.split((2, 2, 8), 2)
            gates = [x[:, :T].expand(B, T, 8).contiguous() for x in (g, beta)]
            call = functools.partial(_infer, [q, k, v, *gates], {})
            _compare(call, [q, k, v])
    assert api.CALLS.replays() > 100


def wrong_forms_are_found() -> None:
    """The control: launch code that depends on T behind a trace's back."""
    flat = _buffers(1, 5000, 2, 8)
    programs.forget()
    for T in (2000, 2001):
        _infer(_of(flat, 1, T), {})
    hidden, fused = [0], steps.fused_fwd

    def wrong(*given: Any, **named: Any) -> None:
        fused(*given[:5], given[5] + hidden[0], *given[6:], **named)

    steps.fused_fwd = wrong  # of sequences that are cut
    try:
        call = functools.partial(_infer, _of(flat, 1, 2002), {})
        _compare(call, [])
        hidden[0] = 1
        with pytest.raises(AssertionError):
            _compare(call, [])
        os.environ["QLA_CHECK_PROGRAMS"] = "1"
        with pytest.raises(RuntimeError, match="launches other kernels or numbers"):
            call()
    finally:
        os.environ.pop("QLA_CHECK_PROGRAMS", None)
        steps.fused_fwd = fused


if __name__ == "__main__":
    tests = [x for x in globals().values() if getattr(x, "__module__", "") == "__main__"]
    for test in tests if len(sys.argv) == 1 else [globals()[sys.argv[1]]]:
        if test.__name__[0] != "_":
            print(test.__name__, flush=True)
            test()
