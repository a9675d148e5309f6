"""Placeholders have the sizes, strides and offsets that tensors have after the same operators."""

import random

import pytest
import torch
from torch import Tensor

from qla_kernels.runtime.native.recording import NotRecordable
from qla_kernels.runtime.native.trace import Trace


def _look(x) -> tuple[object, ...]:
    """What launch code, and a launch, see of a tensor; strides of one number do not count."""
    shape = [int(n) for n in x.shape]
    strides = [int(s) for n, s in zip(shape, x.stride(), strict=True) if n > 1]
    return x.dtype, shape, strides, int(x.storage_offset()), bool(x.is_contiguous())


def _random_operator(x: Tensor, rng: random.Random):
    """Returns an operator that launch code may use on x: its name, and a function of x."""
    n, axis = x.dim(), rng.randrange(x.dim())
    size = x.shape[axis]
    at, more = rng.randrange(size), rng.randrange(size) + 1
    index = [slice(None)] * n
    index[axis] = rng.choice((at, slice(at, None), slice(at, at + more), slice(-more, None)))
    pair = rng.randrange(n - 1) if n > 1 else 0
    other = rng.choice((torch.uint8, torch.int16, torch.int32, torch.float32))
    halves = [2, size // 2] if size % 2 == 0 else [size, 1]
    return rng.choice(
        [
            ("view", lambda y: y.view((*x.shape[:pair], -1, *x.shape[pair + 2 :]))),
            ("view as", lambda y: y.view(other)),
            ("unflatten", lambda y: torch.unflatten(y, axis, halves)),
            ("flatten", lambda y: y.flatten(pair, min(pair + 1, n - 1))),
            ("unsqueeze", lambda y: y.unsqueeze(axis)),
            ("squeeze", lambda y: y.squeeze(axis)),
            ("expand", lambda y: y.unsqueeze(0).expand(3, *[-1] * n)),
            ("narrow", lambda y: y.narrow(axis, at, min(more, size - at))),
            ("split", lambda y: torch.split(y, [at, size - at], axis)[1]),
            ("select", lambda y: y.select(axis, at)),
            ("mT", lambda y: y.mT),
            ("index", lambda y: y[tuple(index)]),
            ("ellipsis", lambda y: y[..., : more]),
            ("none", lambda y: y[:, None] if n > 1 else y[None]),
            ("iteration", lambda y: [*y][at if axis == 0 else 0]),
            ("empty_like", torch.empty_like),
            ("contiguous", lambda y: y.contiguous()),
            ("clone", lambda y: y.clone()),
            ("to", lambda y: y.to(y.dtype)),
        ]
    )  # fmt: skip


def _start(rng: random.Random) -> Tensor:
    shape = [rng.randint(1, 4), rng.randint(1, 6), rng.randint(1, 4), rng.choice((8, 16))]
    room = torch.empty([2, *(n + rng.randrange(2) for n in shape)], dtype=torch.bfloat16)
    whole = room[tuple(slice(n) for n in (1, *shape))][0]
    return rng.choice((whole, torch.empty(shape, dtype=torch.bfloat16), whole.mT))


@pytest.mark.parametrize("is_open", [False, True])
def test_views_and_copies_are_as_torch_has_them(is_open: bool) -> None:
    rng, done = random.Random(is_open), dict[str, int]()
    for _ in range(3000):
        x = _start(rng)
        x = x.as_strided(x.shape, x.stride(), 0)  # an input's place begins with it
        trace = Trace(None, [x], [0] if is_open else [])
        y, names = trace.given(x), list[str]()
        for _ in range(rng.randint(1, 5)):
            name, run = _random_operator(x, rng)
            names.append(name)
            try:
                x = run(x)
            except RuntimeError:
                break
            try:
                y = run(y)
            except NotRecordable:  # a program has no such step
                break
            assert _look(y) == _look(x), names
            done[name] = done.get(name, 0) + 1
            if not x.dim() or not x.numel():
                break
    assert len(done) == 19, sorted(done)
    assert min(done.values()) > 30, done


def test_what_no_program_repeats() -> None:
    x = torch.empty(4, 6)
    y = Trace(None, [x], []).given(x)
    for run in (
        lambda: y[::2],
        lambda: y[torch.tensor([0])],
        lambda: y.zero_(),  # an input
        lambda: y.mT.view(24),
        lambda: y[:, :4].view(16),
        lambda: y.new_empty(4, 4)[:, :2].zero_(),
        lambda: y.new_full((3,), 0.5, dtype=torch.bfloat16),
        lambda: y + 1,
        lambda: torch.where(y, y, y),
    ):
        with pytest.raises((NotRecordable, AttributeError, TypeError)):
            run()
