"""What public functions say to wrong arguments: each argument of each, replaced by something wrong.

    python -m tests.goldens.refusals PATTERN...

Calls and replacements are those of tests/fuzz, on the CPU. A case has the error's type and text, or
"runs". What Python and torch say themselves has the type alone.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence

import torch

from tests.fuzz import wrong
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS
from tests.goldens.store import Texts, chosen, printed


def said(target: Target, name: str, seed: int, argument: str, kind: str) -> str:
    call = target.call(wrong.small(name, seed))
    call[argument] = dict(wrong.replacements(call[argument]))[kind]
    try:
        target.run(**call)
    except Exception as error:
        text = " ".join(str(error).split())
        return type(error).__name__ + (f": {text}" if wrong.CLEAR.match(text) else "")
    return "runs"


def of_target(name: str, target: Target) -> Iterator[tuple[str, str]]:
    """Yields cases, `argument=replacement`, and what is said, with the first seed that has them."""
    known = set[str]()
    for seed in wrong.SEEDS:
        for argument, value in target.call(wrong.small(name, seed)).items():
            for kind, _ in wrong.replacements(value):
                case = f"{argument}={kind}"
                if case in known or {argument, case} & set(target.given):
                    continue
                known.add(case)
                yield case, said(target, name, seed, argument, kind)


def texts(patterns: Sequence[str]) -> Texts:
    for name, target in TARGETS.items():
        if chosen(name, patterns):
            yield name, "".join(f"{case}: {text}\n" for case, text in of_target(name, target))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    printed(texts(sys.argv[1:]))
