"""Launches variants by TileLang's host code and by ours, and compares what the driver was given.

    python -m tests.native.compare                     every variant of every kernel
    python -m tests.native.compare gdn.gate attn       of a kernel, of a family
    python -m tests.native.compare --first             the first variant of each kernel
    python -m tests.native.compare --wrong gdn.gate    a control: wrong entries have to differ

Compared byte by byte: function, grid, block, shared memory, stream, dependent launch, every
argument and every tensor map. Arguments are random, and some calls have a wrong tensor: those both
refuse, except sizes that TileLang's host code does not compare. Exit status 1 if anything differs,
or, of wrong entries, if any launch is the same. Needs TileLang and a C compiler; neither nvcc nor a
GPU.
"""

import argparse
import copy
import operator
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from qla_kernels.lab.build import selected
from qla_kernels.runtime import jit
from qla_kernels.runtime.native.entry import SIZE, Entry, Expression, symbols_of
from qla_kernels.runtime.native.pack import pack, texts
from tests.native import standin, tilelang_host

CALLS = 60  # of each variant, of which half are given a wrong tensor


OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    ">>": operator.rshift,
}


def value(expression: Expression, numbers: dict[str, int]) -> int:
    stack: list[int] = []
    for token in expression:
        if token in OPERATIONS:
            right, left = stack.pop(), stack.pop()
            stack.append(OPERATIONS[token](left, right))
        else:
            stack.append(token if isinstance(token, int) else numbers[token])
    return stack[0]


def arguments(entry: Entry, rng: random.Random) -> list[Any]:
    """Tensors and scalars that fit an entry; sizes and strides are whatever it leaves open."""
    numbers = {name: rng.randint(1, 9) for name, dtype in entry["scalars"] if dtype == "int32"}
    few = rng.random() < 0.3  # axes of one element, whose strides do not count
    sizes = [name for name, _, what, _ in entry["symbols"] if what == SIZE]
    for name in sizes:
        numbers[name] = 1 if few and rng.random() < 0.4 else rng.choice([8, 16, 24])
    for extent in entry["launch"]:
        while set(symbols_of(extent)) & set(sizes) and value(extent, numbers) < 1:
            numbers |= {name: numbers[name] + 64 for name in symbols_of(extent) if name in sizes}
    strides_from = {(i, axis): name for name, i, what, axis in entry["symbols"] if what != SIZE}
    tensors = []
    for i, tensor in enumerate(entry["tensors"]):
        extents = [value(size, numbers) for size in tensor["sizes"]]
        inner = 16
        for axis in reversed(range(len(extents))):
            if (i, axis) in strides_from:
                numbers[strides_from[i, axis]] = inner + 16 * rng.randint(0, 2)
            inner = max(inner, extents[axis] * max(1, _stride(tensor, axis, numbers)))
            inner = -(-inner // 16) * 16
        strides = [value(stride, numbers) for stride in tensor["strides"]]
        tensors.append(_tensor(extents, _loosened(extents, strides, rng), tensor["dtype"]))
    scalars = [
        numbers[name] if dtype == "int32" else rng.random() for name, dtype in entry["scalars"]
    ]
    return [(tensors if is_tensor else scalars).pop(0) for is_tensor in entry["order"]]


def _stride(tensor: Any, axis: int, numbers: dict[str, int]) -> int:
    try:
        return value(tensor["strides"][axis], numbers)
    except KeyError:  # depends on a stride that is chosen later
        return 1


def _loosened(sizes: list[int], strides: list[int], rng: random.Random) -> list[int]:
    return [s if n > 1 or rng.random() < 0.5 else 32 for n, s in zip(sizes, strides, strict=True)]


def _tensor(sizes: list[int], strides: list[int], dtype: str) -> torch.Tensor:
    room = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True) if n)
    # elements are never read; 64 bytes more, so that the address can be aligned
    x = torch.empty(room + 64, dtype=getattr(torch, dtype))
    return x[-(x.data_ptr() // x.element_size()) % 64 :].as_strided(sizes, strides)


def wronged(entry: Entry, given: list[Any], rng: random.Random) -> tuple[str, list[Any]]:
    """The arguments with one tensor of another size, stride, dtype or number of dimensions."""
    given = list(given)
    place = rng.choice([i for i, is_tensor in enumerate(entry["order"]) if is_tensor])
    x, what = given[place], rng.choice(["size", "size", "stride", "dtype", "dimensions"])
    axis = rng.randrange(x.dim())
    sizes, strides, dtype = list(x.shape), list(x.stride()), str(x.dtype).removeprefix("torch.")
    if what == "size":
        sizes[axis] += rng.choice([-1, 1, 8])
    elif what == "stride":
        strides[axis] += 16
    elif what == "dtype":
        dtype = rng.choice([d for d in ("float64", "int8", "bool") if d != dtype])
    else:
        sizes, strides = [*sizes, 1], [*strides, 1]
    given[place] = _tensor(sizes, strides, dtype)
    return what, given


def broken(entry: Entry) -> Iterator[tuple[str, Entry]]:
    """The entry with one thing wrong that a comparison has to find."""
    for what, change in {
        "grid": lambda e: e["launch"].__setitem__(0, [*e["launch"][0], 1, "+"]),
        "dependent": lambda e: e.__setitem__("dependent", not e["dependent"]),
        "order of arguments": lambda e: e["arguments"].reverse(),
        "an argument": lambda e: e["arguments"].__setitem__(
            -1, ("int32", [77]) if e["arguments"][-1][0] == "int32" else ("float32", [0])
        ),
        "a map's size": lambda e: e["maps"][-1]["dims"].__setitem__(-1, [77]),
        "a map's swizzle": lambda e: e["maps"][0].__setitem__("swizzle", 1),
    }.items():
        wrong = copy.deepcopy(entry)
        if "map" not in what or entry["maps"]:
            change(wrong)
            yield what, wrong


class Comparison:
    def __init__(self) -> None:
        self.driver, self.native = standin.Driver(), standin.launcher()

    def launched(self, letters: str, call: Any) -> bytes | str:
        """What the driver was given, or how the call was refused."""
        self.driver.expect(letters)
        try:
            call()
        except Exception as error:
            return str(error).strip().splitlines()[-1]
        return self.driver.record()

    def variant(self, kernel: jit.Kernel, variant: Any, wrong: bool) -> Counter[str]:
        name = jit.label(kernel.module, variant)
        entry, theirs, letters, _ = tilelang_host.lowered(kernel, variant)
        entries = dict(broken(entry)) if wrong else {"": entry}
        counts: Counter[str] = Counter()
        for what, used in entries.items():
            code = b"\x7fELF"
            numbers = pack(used)
            ours = self.native.launcher(name, used["function"], code, numbers, *texts(used))
            counts.update(self.calls(name, what, entry, ours, theirs, letters))
        return counts

    def calls(
        self, name: str, what: str, entry: Entry, ours: Any, theirs: Any, letters: str
    ) -> Iterator[str]:
        rng = random.Random(name)
        for i in range(CALLS):
            given, change = arguments(entry, rng), ""
            if i % 2:
                change, given = wronged(entry, given, rng)
            two = [
                self.launched(letters, lambda: tilelang_host.launch(theirs, given)),  # noqa: B023
                self.launched(letters, lambda: ours(*given)),  # noqa: B023
            ]
            outcome = verdict(*two, change)
            if outcome == "differ" and not what:
                said = [x if isinstance(x, str) else f"{len(x)} bytes" for x in two]
                print(f"{name}: differ ({change or 'right arguments'})", *said, sep="\n   ")
            yield f"{what} {outcome}".strip()


def verdict(theirs: bytes | str, ours: bytes | str, change: str) -> str:
    if isinstance(theirs, bytes) and isinstance(ours, bytes):
        return "same" if theirs == ours and len(ours) > 40 else "differ"
    if isinstance(theirs, str) and isinstance(ours, str):
        return "both refuse"
    if isinstance(theirs, bytes) and change == "size":
        return "refused here alone"  # a size that TileLang's host code does not compare
    return "differ"


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kernels", nargs="*", help="families or family.kernel; default: all")
    parser.add_argument("--first", action="store_true", help="one variant of each kernel")
    parser.add_argument("--wrong", action="store_true", help="a control: wrong entries differ")
    options = parser.parse_args(given)
    comparison, total = Comparison(), Counter[str]()
    for kernel, variant in selected(options.kernels):
        if options.first and variant != kernel.module.VARIANTS[0]:
            continue
        counts = comparison.variant(kernel, variant, options.wrong)
        print(jit.label(kernel.module, variant), dict(sorted(counts.items())), flush=True)
        total.update(counts)
        total["never launched"] += not (options.wrong or counts["same"])
    print(dict(sorted(total.items())))
    if options.wrong:
        return int(any(outcome.endswith("same") for outcome in total))
    return int(total["differ"] + total["never launched"] > 0)


if __name__ == "__main__":
    if "STANDIN_FOLDER" not in os.environ:
        folder = standin.built()
        command = [sys.executable, "-m", "tests.native.compare", *sys.argv[1:]]
        os.execve(sys.executable, command, standin.environment(folder))
    sys.exit(main(sys.argv[1:]))
