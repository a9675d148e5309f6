"""Every argument of every function replaced by something wrong.

A call then runs and is right by the definition (a scale of None is a default), or it raises an
error that says what it got, what it needs and how to get there. Everything else is a failure: an
error that Python or torch made further in, or a result that means nothing.
"""

import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.draw import Draw
from tests.fuzz.target import Call, Target

CLEAR = re.compile(r"^[^:;]+: .+; need .+; .+", re.DOTALL)
KNOWN = Path(__file__).with_name("known.txt")
HEAD = """\
# Wrong arguments that are not refused clearly yet, by function and argument. A line goes when it is
# mended: tests/fuzz/test_wrong.py says which. `python -m tests.fuzz --wrong` says what happens,
# `python -m tests.fuzz --wrong --remember` writes this file."""
SEEDS = range(3)  # of calls that arguments are replaced in: not every call has all of them

# Small calls: what is wrong with an argument does not depend on lengths.
SMALL = {
    "tokens": {"gdn": 3, "sparse_ring": 128},
    "lengths": {"gdn": [2, 1], "dualkv": [2, 1, 3]},
    "sizes": {"gdn": (8, 8)},
    "rows": {"gdn": 1, "sparse_ring": 1},
    "slots": {"gdn": 5},
    "size": {"dualkv": 8, "sparse_ring": 8},
    "groups": {"dualkv": 2},
    "made": {"gdn": "from_forest"},
    "dtype": dict.fromkeys(("gdn", "dualkv", "sparse_ring"), torch.float32),
}


def replacements(value: Any) -> Iterator[tuple[str, Any]]:
    """What stands for an argument, by name."""
    yield "None", None
    yield "a string", "x"
    yield "NaN", float("nan")
    yield "a list of a list", [[0.5]]
    if isinstance(value, Tensor):
        yield from _tensors(value)
    elif isinstance(value, bool):
        yield "a tensor", torch.ones(2)
    elif isinstance(value, int | float):
        yield "infinity", float("inf")
        yield "negative", -3
        yield "larger", 3 * value + 7
        yield "a fraction", 1.5
        yield "a tensor of several", torch.ones(2)
        yield "a tensor that is learned", torch.tensor(0.5, requires_grad=True)
    else:
        yield "a number", 3
        yield "a tensor of floats", torch.ones(3)
        yield "a dictionary", {"a": 1}


def _tensors(x: Tensor) -> Iterator[tuple[str, Any]]:
    x = x.detach()
    yield "its list", x.tolist()
    yield "its array", x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()
    yield "a number", 3
    yield "a tensor of one", torch.tensor(1.0)
    yield "another axis", x[None]
    yield "flat", x.flatten()
    yield "one more", torch.cat([x, x[:1]]) if x.dim() else x
    yield "one less", x[..., :-1] if x.dim() else x
    yield "on meta", x.to("meta")
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float16, torch.float64):
        if dtype != x.dtype:
            yield f"in {str(dtype).removeprefix('torch.')}", _cast(x, dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.nan_to_num().to(dtype) if x.is_floating_point() else x.to(dtype)


def small(name: str, seed: int, **machine: Any) -> Draw:
    family = name.partition(".")[0]
    fixed = {choice: of[family] for choice, of in SMALL.items() if family in of}
    return Draw(name, seed, fixed, **machine)


def problem(target: Target, d: Draw, argument: str, kind: str) -> str | None:
    """What is unclear or wrong when this argument is replaced; None if nothing is, or if the
    call of this seed has no such argument to replace.
    """
    call = target.call(d)
    wrong = dict(replacements(call[argument])) if argument in call else {}
    if kind not in wrong:
        return None
    call[argument] = wrong[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _outcome(target, d, call, wrong[kind])


def _outcome(target: Target, d: Draw, call: Call, wrong: Any) -> str | None:
    try:
        result = target.run(**call)
    except (ValueError, TypeError) as error:
        return None if CLEAR.match(str(error)) else f"raises {type(error).__name__}: {error}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    if isinstance(wrong, Tensor) and wrong.requires_grad:
        return "runs, and its gradient is lost"
    try:
        target.verify(d, call, result)
    except Exception as error:
        return f"runs, and should not ({type(error).__name__}: {str(error)[:200]})"
    return None


def problems(name: str, target: Target, seeds: Iterable[int] = SEEDS) -> dict[str, str]:
    """Of every argument and replacement, by `function(argument=replacement)`."""
    found: dict[str, str] = {}
    for seed in seeds:
        call = target.call(small(name, seed))
        for argument, value in call.items():
            for kind, _ in replacements(value):
                case = f"{name}({argument}={kind})"
                if {argument, f"{argument}={kind}"} & set(target.given):
                    continue
                said = problem(target, small(name, seed), argument, kind)
                if said is not None:
                    found.setdefault(case, f"seed {seed}: {' '.join(said.split())}")
    return found


def known() -> set[str]:
    """Cases that fail today, of known.txt: `function(argument): replacement, replacement`."""
    found = set()
    for line in KNOWN.read_text().splitlines():
        if line and not line.startswith("#"):
            call, _, kinds = line.partition("): ")
            found |= {f"{call}={kind})" for kind in kinds.split(", ")}
    return found


def remember(cases: Iterable[str]) -> None:
    """Write known.txt anew."""
    of_argument: dict[str, list[str]] = {}
    for case in cases:
        call, _, kind = case.removesuffix(")").partition("=")
        of_argument.setdefault(call, []).append(kind)
    lines = [f"{call}): {', '.join(sorted(kinds))}" for call, kinds in of_argument.items()]
    KNOWN.write_text("\n".join([HEAD, *sorted(lines), ""]))
