"""Texts by key, in files that are compressed without a time or a name in them."""

import lzma
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

FOLDER = Path(__file__).parent
HEAD = "== "

Texts = Iterator[tuple[str, str]]


def chosen(key: str, patterns: Sequence[str]) -> bool:
    """Returns whether a key fits one of the patterns, or begins like one, or there is none."""
    return not patterns or any(fnmatchcase(key, p) or key.startswith(p) for p in patterns)


def printed(texts: Iterable[tuple[str, str]]) -> None:
    for key, text in texts:
        sys.stdout.write(f"{HEAD}{key}\n{text}")
        sys.stdout.flush()


def parsed(text: str) -> dict[str, str]:
    """Returns the texts of what `printed` prints."""
    parts = f"\n{text}".split(f"\n{HEAD}")[1:]
    pairs = (part.removesuffix("\n").split("\n", 1) for part in parts)
    return {key: "".join(rest) for key, *rest in pairs}


def read(part: str) -> dict[str, str]:
    path = FOLDER / f"{part}.txt.xz"
    return parsed(lzma.decompress(path.read_bytes()).decode()) if path.exists() else {}


def write(part: str, texts: Mapping[str, str]) -> None:
    text = "".join(f"{HEAD}{key}\n{text}\n" for key, text in texts.items())
    preset = 9 | lzma.PRESET_EXTREME
    (FOLDER / f"{part}.txt.xz").write_bytes(lzma.compress(text.encode(), preset=preset))
