"""Digests of generated device code, to identify the kernels of a record and to check refactorings.

`digests.json` holds one digest for every variant of every kernel, as lowered by the TileLang
version that it names. Comments, spacing, the kernel's name and the names of its variables do not
change a digest. `python -m qla_kernels digests --write` updates the file, and tests compare it.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

FILE = Path(__file__).with_name("digests.json")
DIGITS = 16

_TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|/\*.*?\*/|\s+)
      | (?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      | (?P<name>[A-Za-z_]\w*)
      | (?P<rest>\d[\w.]*|.)""",
    re.VERBOSE | re.DOTALL,
)
_KERNEL = 'extern "C" __global__'
_NO_TYPE = frozenset(
    ["return", "else", "case", "goto", "throw", "new", "delete", "typename", "using", "namespace"]
)
_POINTED_AT = frozenset(
    ["void", "bool", "char", "int", "float", "double", "half_t", "bfloat16_t", "uint", "uchar"]
)


def digest(source: str, function: str) -> str:
    """Returns the digest of one kernel's CUDA C++; `function` is the name of its `__global__`."""
    before, _, body = source.partition(_KERNEL)
    tokens = [*_tokens(before), _KERNEL, *_renamed([*_tokens(body)], function)]
    return hashlib.sha256("\n".join(tokens).encode()).hexdigest()[:DIGITS]


def _tokens(source: str) -> Iterator[str]:
    return (found[0] for found in _TOKEN.finditer(source) if found.lastgroup != "skip")


def _renamed(tokens: list[str], function: str) -> Iterator[str]:
    """Yields the tokens, with each variable replaced by the number of its declaration.

    Members, types and functions keep their names; the kernel's own name becomes `kernel`.
    """
    numbers = {function: "kernel"}
    for i, token in enumerate(tokens):
        if i and token not in numbers and token.isidentifier() and _declares(tokens, i):
            numbers[token] = f"${len(numbers)}"
    for i, token in enumerate(tokens):
        inside = tokens[max(i - 1, 0)] == "." or tokens[max(i - 2, 0) : i] == [":", ":"]
        yield token if inside else numbers.get(token, token)


def _declares(tokens: list[str], i: int) -> bool:
    """Returns whether token i is a name that follows a type: `int i`, `void* p`, `T& x`."""
    before = tokens[i - 1]
    if before in ("*", "&"):
        return tokens[i - 2] in _POINTED_AT
    follows = tokens[i + 1] if i + 1 < len(tokens) else ""
    is_type = before.isidentifier() and before not in _NO_TYPE
    return is_type and follows in ("=", ";", "[", ",", ")")


def recorded() -> dict[str, str]:
    """Returns the digest of every variant in `digests.json`, by its label."""
    return dict(json.loads(FILE.read_text())["kernels"])


def lowered_by() -> str:
    """Returns the TileLang version that lowered the kernels of `digests.json`."""
    return str(json.loads(FILE.read_text())["tilelang"])


def write(digests: dict[str, str], tilelang: str) -> None:
    found = {"tilelang": tilelang, "kernels": dict(sorted(digests.items()))}
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def of_family(families: Iterable[str]) -> str:
    """Returns one digest over all recorded kernels of some families."""
    owners = set(families)
    found = [f"{name} {d}" for name, d in recorded().items() if name.partition(".")[0] in owners]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:DIGITS]
