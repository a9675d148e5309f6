"""One random case: its choices have names, and each follows from (target, seed, name) alone.

So a case is its target and seed; a choice can be changed and all others stay, which is how
`python -m tests.fuzz gdn.chunk --seed 7 --set heads="(1, 1)"` and `shrunk` make a failure smaller.
Options are listed from simple to hard: what comes before the drawn one counts as simpler.
"""

import ast
import math
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STRIDES = ("contiguous", "transposed", "sliced", "stepped", "expanded")
KERNEL_STRIDES = ("contiguous", "transposed", "sliced")  # what TMA can step through


class Draw:
    """The choices of one case. `kernels`: only what the CUDA kernels take; on `device`."""

    def __init__(
        self,
        target: str,
        seed: int,
        fixed: dict[str, Any] | None = None,
        *,
        kernels: bool = False,
        device: str = "cpu",
    ) -> None:
        self.target, self.seed, self.fixed = target, seed, fixed or {}
        self.kernels, self.device = kernels, device
        self.chosen: dict[str, Any] = {}
        self.simpler: dict[str, list[Any]] = {}

    def choose(self, name: str, options: Sequence[T]) -> T:
        return self._taken(name, options, self._stream(name).choice(options))

    def flag(self, name: str, chance: float = 0.5) -> bool:
        return self._taken(name, (False, True), self._stream(name).random() < chance)

    def whole(self, name: str, first: int, last: int) -> int:
        """An int from first to last, both included."""
        drawn = self._stream(name).randint(first, last)
        return self._taken(name, list(range(first, drawn + 1)), drawn)

    def several(self, name: str, options: Sequence[T], most: int, least: int = 0) -> list[T]:
        """A list of `least` to `most` options, each any number of times."""
        stream = self._stream(name)
        drawn = [stream.choice(options) for _ in range(stream.randint(least, most))]
        drawn = self._taken(name, [], drawn)
        if len(drawn) > least:
            self.simpler[name] = [drawn[:i] + drawn[i + 1 :] for i in range(len(drawn))]
        return drawn

    def normal(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """In fp64 on the CPU, or in a dtype on the case's device."""
        x = torch.randn(*shape, generator=self._generator(name), dtype=torch.float64)
        return x if dtype is None else x.to(self.device, dtype)

    def uniform(self, name: str, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator(name), dtype=torch.float64)

    def ints(self, name: str, end: int, *shape: int) -> Tensor:
        """int64 from 0 to end - 1."""
        return torch.randint(end, shape, generator=self._generator(name))

    def numbers(self, name: str) -> random.Random:
        """For choices that are too many to name."""
        return self._stream(name)

    def strided(
        self, name: str, x: Tensor, kinds: Sequence[str] | None = None, vectors: bool = False
    ) -> Tensor:
        """x, laid out in memory in another way; "expanded" repeats its first rows instead, but not
        the first numbers of `vectors`, which would be longer then.
        """
        kinds = kinds or (KERNEL_STRIDES if self.kernels else STRIDES)
        kind = self.choose(f"strides of {name}", kinds)
        stream = self._stream(f"axes of {name}")
        dims = list(range(x.dim()))
        outer = dims[:-1] if self.kernels else dims
        if kind == "contiguous" or not outer or x.numel() == 0:
            return x
        axis = stream.choice(dims[:-1] if vectors and kind == "expanded" else outer)
        if kind == "transposed":
            order = stream.sample(outer, len(outer)) + dims[len(outer) :]
            back = [order.index(i) for i in dims]
            return x.permute(order).contiguous().permute(back)
        if kind == "expanded":
            return x.narrow(axis, 0, 1).expand(x.shape)
        step = 2 if kind == "stepped" else 1
        before, after = (8, 8) if self.kernels else (stream.randint(0, 3), stream.randint(0, 3))
        shape = list(x.shape)
        shape[axis] = before + step * x.shape[axis] + after
        rest = math.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
        room = torch.full(shape, rest, dtype=x.dtype, device=x.device)
        rows = [slice(None)] * x.dim()
        rows[axis] = slice(before, before + step * x.shape[axis], step)
        room[tuple(rows)] = x
        return room[tuple(rows)]

    def _taken(self, name: str, options: Sequence[Any], drawn: Any) -> Any:
        value = drawn
        if name in self.fixed:
            value = self.fixed[name]
            if isinstance(value, str) and value not in options:  # from the command line
                found = [x for x in options if str(x) == value]
                value = found[0] if found else ast.literal_eval(value)
        self.chosen[name] = value
        before = list(options[: options.index(value)]) if value in options else []
        self.simpler[name] = before
        return value

    def _stream(self, name: str) -> random.Random:
        return random.Random(f"{self.target}/{self.seed}/{name}")

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(
            zlib.crc32(f"{self.target}/{self.seed}/{name}".encode())
        )

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.chosen.items())


def shrunk(first: Draw, fails: Callable[[Draw], bool], tries: int = 200) -> Draw:
    """The same failure from simpler choices: each is replaced as long as the case still fails."""
    best, going = first, True
    while going:
        going = False
        for name, options in list(best.simpler.items()):
            for option in options:
                if tries == 0:
                    return best
                tries -= 1
                smaller = Draw(
                    first.target,
                    first.seed,
                    {**best.fixed, name: option},
                    kernels=first.kernels,
                    device=first.device,
                )
                if fails(smaller):
                    best, going = smaller, True
                    break
    return best
