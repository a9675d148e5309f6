"""Digests of generated device code, to identify the kernels of a record and to check refactorings.

`digests.json` holds one digest for every variant of every kernel, as lowered by the TileLang
version that it names. Comments, spacing, the kernel's name and the names of its variables do not
change a digest. It also holds a digest of what a variant's launch needs (`launch`), and for every
kernel one of the sources that were lowered (`native/sources.py`): if those are not the sources that
are here, the file says nothing about the kernel. `python -m qla_kernels digests --write` updates
the file, and tests compare it.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
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
    parts = [*tokens(before), _KERNEL, *_renamed([*tokens(body)], function)]
    return _hashed("\n".join(parts))


def launch(entry: bytes, pass_configs: Mapping[str, object]) -> str:
    """Returns the digest of what a launch needs: a variant's entry, and the flags of its compile.

    The device code does not say how large the grid is or how tensor maps are encoded.
    """
    flags = [f"{name} {value!r}" for name, value in sorted(pass_configs.items())]
    return _hashed("\n".join([entry.decode(), *flags]))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def tokens(source: str) -> Iterator[str]:
    """Yields the tokens of CUDA C++, without comments."""
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


def launches() -> dict[str, str]:
    """Returns the digest of what each variant's launch needs, by its label.

    A variant that was last lowered before these were recorded has none.
    """
    return dict(json.loads(FILE.read_text())["launches"])


def sources() -> dict[str, str]:
    """Returns the digest of the sources that were lowered, by kernel."""
    return dict(json.loads(FILE.read_text())["sources"])


def recorded_for(label: str, code: str) -> tuple[str, str] | None:
    """Returns the digests of a variant's code and launch, if these sources were lowered.

    `code` is the digest of its kernel's sources; None if others were lowered, or if one of the
    variant's digests is not recorded.
    """
    if sources().get(label.partition("-")[0]) != code:
        return None
    found = recorded().get(label), launches().get(label)
    return None if None in found else (str(found[0]), str(found[1]))


def write(
    kernels: Mapping[str, str],
    launches: Mapping[str, str],
    sources: Mapping[str, str],
    tilelang: str,
) -> None:
    parts = {"kernels": kernels, "launches": launches, "sources": sources}
    found = {name: dict(sorted(part.items())) for name, part in parts.items()}
    FILE.write_text(json.dumps({"tilelang": tilelang, **found}, indent=1) + "\n")


def of_family(families: Iterable[str]) -> str:
    """Returns one digest over all recorded kernels of some families."""
    owners = set(families)
    found = [f"{name} {d}" for name, d in recorded().items() if name.partition(".")[0] in owners]
    return _hashed("\n".join(found))
