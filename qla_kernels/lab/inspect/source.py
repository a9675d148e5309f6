"""Reads a kernel's generated CUDA: the threads that run each line, and their use of barriers.

TileLang's code generator writes one statement per line and braces every branch. The parser is a
stack of thread sets, pushed at `{` and popped at `}`.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from qla_kernels.lab.inspect.threads import Block, Threads, everyone, parse_c, split

NOBODY: Threads = frozenset()

_COMMENT = re.compile(r"/\*.*?\*/")
_IF = re.compile(r"if \((.*)\) \{$")
_INIT = re.compile(r"\b(\w+)\[\d+\]\.init\((\d+)\)")
_WAIT = re.compile(r"\b(\w+)\[.*?\]\.(?:wait|try_wait|test_wait)\(")
_ARRIVE = re.compile(
    r"\b(\w+)\[.*?\]\.arrive(?:_and_expect_tx)?\(|mbarrier_cp_async_arrive_noinc\((\w+)"
)
_REGISTERS = re.compile(r"tl::warpgroup_reg_(alloc|dealloc)<(\d+)>")
_BUFFER = re.compile(r"void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\);")


@dataclass
class Buffer:
    """A dynamic shared-memory buffer: its offset, and the threads that touch it."""

    offset: int
    threads: Threads = NOBODY


@dataclass
class Code:
    """The facts read from a kernel's CUDA, by thread."""

    lines: dict[int, Threads] = field(default_factory=dict)  # line number -> its threads
    barriers: dict[str, list[int]] = field(default_factory=dict)  # arrive count of each slot
    waits: dict[str, Threads] = field(default_factory=dict)
    arrives: dict[str, Threads] = field(default_factory=dict)
    registers: list[tuple[Threads, str, int]] = field(default_factory=list)  # threads, kind, count
    buffers: dict[str, Buffer] = field(default_factory=dict)


def read(source: str, function: str, block: Block) -> Code:
    """Reads the body of `function` in `source` and returns its facts."""
    code = Code()
    waits: defaultdict[str, Threads] = defaultdict(frozenset)
    arrives: defaultdict[str, Threads] = defaultdict(frozenset)
    slots: defaultdict[str, list[int]] = defaultdict(list)
    for number, text, threads in _walk(source, function, block):
        code.lines[number] = threads
        for name, count in _INIT.findall(text):
            slots[name].append(int(count))
        for name in _WAIT.findall(text):
            waits[name] |= threads
        for methods, asynchronous in _ARRIVE.findall(text):
            arrives[methods or asynchronous] |= threads
        for kind, count in _REGISTERS.findall(text):
            code.registers.append((threads, kind, int(count)))
        if declared := _BUFFER.search(text):
            code.buffers[declared[1]] = Buffer(int(declared[2]))
        else:
            for name in set(re.findall(r"\w+", text)) & code.buffers.keys():
                code.buffers[name].threads |= threads
    code.barriers = dict(slots)
    # other objects have methods of these names too: keep the names initialised as barriers
    code.waits = {name: who for name, who in waits.items() if name in slots}
    code.arrives = {name: who for name, who in arrives.items() if name in slots}
    return code


def _walk(source: str, function: str, block: Block) -> Iterator[tuple[int, str, Threads]]:
    """Yields (line number, statement, threads that may run it) for lines of the function's body."""
    stack: list[tuple[Threads, Threads]] = []  # threads inside, threads that an `else` would take
    for number, raw in enumerate(source.splitlines(), 1):
        text = _COMMENT.sub("", raw).strip()
        if not stack:
            if text.endswith("{") and re.search(rf"__global__ .*\b{function}\(", text):
                stack.append((everyone(block), NOBODY))
            continue
        if text.startswith("}"):
            _, otherwise = stack.pop()
            if not stack:
                return
            if "else" not in text:
                continue
            threads = otherwise
        else:
            threads, _ = stack[-1]
        if condition := _IF.search(text):
            stack.append(split(parse_c(condition[1]), threads, block, {}))
        elif text.endswith("{"):
            stack.append((threads, NOBODY))
        yield number, text, threads
