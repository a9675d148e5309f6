"""Three tasks whose answers are far back: to recall values of keys, to copy, and to read on.

    recall   keys and their values, then questions among noise: a key, and its value to predict.
             Each question needs one certain token of the first part.
    copy     random tokens, noise, and the same tokens again: all at one distance.
    bytes    bytes of files that are installed with Python packages, those of a package in a row.

Tokens 0 to 255 are bytes and noise; the values, the keys (which are also the tokens to copy), and
the marks of a question and of a copy follow. Labels are next tokens, IGNORED where a token cannot
be known.
"""

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

IGNORED = -100
BYTES, VALUES, KEYS = 256, 64, 1024
FIRST_VALUE, FIRST_KEY = BYTES, BYTES + VALUES
QUESTION, AGAIN = FIRST_KEY + KEYS, FIRST_KEY + KEYS + 1
VOCABULARY = AGAIN + 1
TASKS = ("recall", "copy", "bytes")

APART = 16  # tokens of a sequence for each key, and for each question
CORPUS_BYTES = 48 << 20
SUFFIXES = (".md", ".rst", ".txt", ".py", ".pyi", ".h")
HELD_OUT = 16  # of so many packages one is for evaluation


def rows(task: str, num: int, T: int, seed: int, evaluation: bool = False) -> tuple[Tensor, Tensor]:
    """Returns tokens and labels, int64 [num, T]; seeds of evaluations give other sequences."""
    draw = torch.Generator().manual_seed(2 * seed + evaluation)
    made = [_one(task, T + 1, draw, evaluation) for _ in range(num)]
    tokens, known = (torch.stack(x) for x in zip(*made, strict=True))
    return tokens[:, :-1], torch.where(known[:, 1:], tokens[:, 1:], IGNORED)


def _one(task: str, num: int, draw: torch.Generator, evaluation: bool) -> tuple[Tensor, Tensor]:
    """Returns the tokens of a sequence, and which of them can be predicted."""
    if task == "recall":
        return _recall(num, draw)
    return _copy(num, draw) if task == "copy" else _bytes(num, draw, evaluation)


def _recall(num: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    pairs = min(num // APART, KEYS)
    keys = torch.randperm(KEYS, generator=draw)[:pairs] + FIRST_KEY
    values = torch.randint(VALUES, (pairs,), generator=draw) + FIRST_VALUE
    tokens = torch.randint(BYTES, (num,), generator=draw)
    tokens[: 2 * pairs] = torch.stack([keys, values], 1).flatten()
    known = torch.zeros(num, dtype=torch.bool)
    starts = torch.arange(2 * pairs, num - 3, APART)
    starts = starts + torch.randint(APART - 3, starts.shape, generator=draw)
    starts = starts[starts + 2 < num]
    asked = torch.randint(pairs, starts.shape, generator=draw)
    for offset, said in ((0, QUESTION), (1, keys[asked]), (2, values[asked])):
        tokens[starts + offset] = said
    known[starts + 2] = True
    return tokens, known


def _copy(num: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    length = int(torch.randint(num // 4, num // 2 - 1, (), generator=draw))
    tokens = torch.randint(BYTES, (num,), generator=draw)
    text = torch.randint(KEYS, (length,), generator=draw) + FIRST_KEY
    tokens[:length], tokens[num - length :] = text, text
    tokens[num - length - 1] = AGAIN
    known = torch.zeros(num, dtype=torch.bool)
    known[num - length + 1 :] = True  # from the second on: the first one's place is not marked
    return tokens, known


def _bytes(num: int, draw: torch.Generator, evaluation: bool) -> tuple[Tensor, Tensor]:
    texts = [text for text in corpus(evaluation) if len(text) > num]
    if not texts:
        raise ValueError(f"no package has {num} bytes of text: pass a smaller --length")
    sizes = torch.tensor([float(len(text)) for text in texts])
    text = texts[int(torch.multinomial(sizes, 1, generator=draw))]
    start = int(torch.randint(len(text) - num, (), generator=draw))
    return text[start : start + num].long(), torch.ones(num, dtype=torch.bool)


@cache
def corpus(evaluation: bool) -> list[Tensor]:
    """Returns the bytes of each installed package's text, uint8: for evaluation, or the others."""
    found: list[Tensor] = []
    room = CORPUS_BYTES // (HELD_OUT if evaluation else 1)
    packages = sorted(x for x in Path(sysconfig.get_paths()["purelib"]).iterdir() if x.is_dir())
    for number, package in enumerate(packages):
        if (number % HELD_OUT == 0) != evaluation or room <= 0:
            continue
        files = sorted(f for f in package.rglob("*") if f.suffix in SUFFIXES and f.is_file())
        text = bytearray()
        for file in files:
            text += file.read_bytes()
            if len(text) > min(room, CORPUS_BYTES // HELD_OUT):  # no package is all of the corpus
                break
        if text:
            found.append(torch.frombuffer(text, dtype=torch.uint8))
            room -= len(text)
    return found
